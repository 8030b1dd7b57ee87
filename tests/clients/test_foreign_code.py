"""Code of the user on the client's threads, which blocks, fails or calls the client, holds up no other call.

Such code is a done callback, or a listener for queue states.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.hasty import sampler_of
from support.tinker_stub import Answer, StubServer

from tinker_sync import types
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.clients.service import ServiceClient

PATIENCE_S = 120.0
PROMPT = types.ModelInput.from_ints([1, 2, 3])
ONE_TOKEN = types.SamplingParams(max_tokens=1)
PAUSED = Answer(408, {"queue_state": "active", "queue_state_reason": "one moment"})
PLACES = pytest.mark.parametrize("place", ["callback", "listener"])


def client_of(stub: Any, **options: Any) -> ServiceClient:
    return ServiceClient(base_url=stub.url, api_key="tml-x", **options)


def sample(sampler: SamplingClient) -> Any:
    return sampler.sample(PROMPT, 1, ONE_TOKEN)


class Once:
    """Code of the user that runs the first time it is called."""

    def __init__(self, code: Callable[[SamplingClient], object]) -> None:
        self._left = [code]
        self.begun, self.ended = threading.Event(), threading.Event()
        self.sampler: Any = None

    def __call__(self, _: object) -> None:
        if not self._left:
            return
        code = self._left.pop()
        self.begun.set()
        try:
            code(self.sampler)
        finally:
            self.ended.set()


@contextmanager
def client_with(place: str, once: Once) -> Iterator[tuple[SamplingClient, Any]]:
    """Yield a client and a sample of it that makes the code run in this place."""
    listener = once if place == "listener" else None
    with StubServer() as stub, client_of(stub, on_queue_state=listener) as client:
        once.sampler = sampler = sampler_of(client)
        stub.script("/retrieve_future", PAUSED)
        first = sample(sampler)
        if place == "callback":
            first.add_done_callback(once)
        yield sampler, first


@PLACES
def test_code_that_blocks_holds_up_no_other_call(place: str) -> None:
    release = threading.Event()
    once = Once(lambda _: release.wait(PATIENCE_S))
    with client_with(place, once) as (sampler, first):
        assert once.begun.wait(PATIENCE_S)
        for future in [sample(sampler) for _ in range(20)]:
            future.result(PATIENCE_S)
        assert not once.ended.is_set()
        release.set()
        first.result(PATIENCE_S)


@PLACES
@pytest.mark.parametrize("failure", [ValueError("odd"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_code_that_fails_harms_no_call(place: str, failure: BaseException) -> None:
    def fail(_: object) -> None:
        raise failure

    once = Once(fail)
    with client_with(place, once) as (sampler, first):
        assert once.ended.wait(PATIENCE_S)
        first.result(PATIENCE_S)
        for future in [sample(sampler) for _ in range(20)]:
            future.result(PATIENCE_S)


@PLACES
def test_code_may_make_calls_and_wait_for_them(place: str) -> None:
    results: list[Any] = []
    once = Once(lambda sampler: results.append(sample(sampler).result(PATIENCE_S)))
    with client_with(place, once) as (_, first):
        assert once.ended.wait(PATIENCE_S)
        first.result(PATIENCE_S)
    assert results


def test_a_chain_of_calls_does_not_lie_on_one_stack() -> None:
    """Each answer causes the next call; the chain is longer than a stack may be deep."""
    left, over = [sys.getrecursionlimit() + 200], threading.Event()
    with StubServer() as stub, client_of(stub) as client:
        sampler = sampler_of(client)

        def follow(_: object) -> None:
            left[0] -= 1
            if left[0]:
                sample(sampler).add_done_callback(follow)
            else:
                over.set()

        sample(sampler).add_done_callback(follow)
        assert over.wait(PATIENCE_S)


def test_callbacks_that_wait_at_the_close_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_sync.runtime.lifecycle._JOIN_S", 0.0)  # the close need not wait for them
    gate, ran = threading.Event(), threading.Semaphore(0)

    def call_back(_: object) -> None:
        gate.wait(PATIENCE_S)
        ran.release()

    with StubServer() as stub:
        client = client_of(stub)
        sampler = sampler_of(client)
        for future in [sample(sampler) for _ in range(100)]:
            future.add_done_callback(call_back)
            future.result(PATIENCE_S)
        client.close("success").result(PATIENCE_S)
        assert not ran.acquire(blocking=False)
        gate.set()
        for _ in range(100):
            assert ran.acquire(timeout=PATIENCE_S)
