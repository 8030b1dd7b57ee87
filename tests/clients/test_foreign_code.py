"""Code of the user on the client's threads, which blocks, fails or calls the client, holds up no other call.

Such code is a done callback, a listener for queue states, or a handler of the log.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from support.forks import in_child
from support.handed_records import wait_for_handlers
from support.hasty import sampler_of
from support.tinker_stub import Answer, StubServer

from tinker_sync import types
from tinker_sync._base.log import Log
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.clients.service import ServiceClient
from tinker_sync.runtime.workers import Workers

PATIENCE_S = 120.0
PROMPT = types.ModelInput.from_ints([1, 2, 3])
ONE_TOKEN = types.SamplingParams(max_tokens=1)
PAUSED = Answer(408, {"queue_state": "active", "queue_state_reason": "one moment"})
PLACES = pytest.mark.parametrize("place", ["callback", "listener", "handler"])


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


class Handler(logging.Handler):
    """A handler that runs code at the first record about a sample that a thread of the client makes."""

    def __init__(self, once: Once) -> None:
        super().__init__()
        self._once = once

    def emit(self, record: logging.LogRecord) -> None:
        if record.threadName == "tinker-poll" and "sample" in record.getMessage():
            self._once(record)


@contextmanager
def handling(handler: logging.Handler) -> Iterator[None]:
    """Let the log of the package have a handler, and take every record."""
    log = logging.getLogger("tinker_sync")
    before, raises = log.level, logging.raiseExceptions
    log.setLevel(logging.DEBUG)
    log.addHandler(handler)
    logging.raiseExceptions = False  # print no tracebacks of handlers
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
        logging.raiseExceptions = raises


@contextmanager
def client_with(place: str, once: Once) -> Iterator[tuple[SamplingClient, Any]]:
    """Yield a client and a sample of it that makes the code run in this place."""
    listener = once if place == "listener" else None
    handled = handling(Handler(once)) if place == "handler" else nullcontext()
    with StubServer() as stub, handled, client_of(stub, on_queue_state=listener) as client:
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
    monkeypatch.setattr("tinker_sync.runtime.client._JOIN_S", 0.0)  # the close need not wait for them
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


class Failing(logging.Handler):
    """A handler that raises an exception at every record."""

    def __init__(self, failure: BaseException) -> None:
        super().__init__()
        self._failure = failure

    def emit(self, record: logging.LogRecord) -> None:
        raise self._failure


@pytest.mark.filterwarnings("ignore::tinker_sync.ExperimentalWarning")
@pytest.mark.parametrize("failure", [ValueError("odd"), SystemExit(3)], ids=repr)
def test_a_handler_that_fails_at_every_record_harms_no_call(failure: BaseException) -> None:
    """Calls of every kind end as without the handler, also those that are logged on the user's thread."""
    with StubServer() as stub, handling(Failing(failure)), client_of(stub) as client:
        stub.script("/asample", Answer(429, {"detail": "slowly"}), Answer(503))
        stub.script("/forward_backward", Answer(503))
        stub.script("/get_server_capabilities", Answer(503))
        assert client.get_server_capabilities().supported_models
        sampler = sampler_of(client)
        for future in [sample(sampler) for _ in range(20)]:
            future.result(PATIENCE_S)
        training = client.create_lora_training_client("stub/model").result(PATIENCE_S)
        datum = types.Datum(PROMPT, {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]})
        training.forward_backward([datum], "cross_entropy").result(PATIENCE_S)
        training.optim_step(types.AdamParams()).result(PATIENCE_S)


def test_records_reach_a_handler_in_the_order_in_which_they_were_made() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    with StubServer() as stub, handling(handler), client_of(stub) as client:
        sampler = sampler_of(client)
        for future in [sample(sampler) for _ in range(50)]:
            future.result(PATIENCE_S)
        wait_for_handlers()
    made: dict[str | None, list[float]] = {}
    for record in records:
        if str(record.threadName).startswith("tinker-"):
            made.setdefault(record.threadName, []).append(record.created)
    assert sum(map(len, made.values())) > 100
    assert [name for name, times in made.items() if times != sorted(times)] == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks are for POSIX")
def test_a_child_that_a_worker_forks_logs_by_itself() -> None:
    """The thread that takes the records of the parent is not in the child, so they would be lost."""

    def log() -> None:
        records: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = records.append  # type: ignore[method-assign]
        logging.getLogger("tinker_sync.clients").addHandler(handler)
        Log("tinker_sync.clients").warning("from the child")
        assert [record.getMessage() for record in records] == ["from the child"]

    with Workers("fork", 1) as workers:
        workers.submit(in_child, log).result(PATIENCE_S)
