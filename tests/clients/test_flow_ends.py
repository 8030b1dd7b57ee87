"""Calls that end at any wait of any flow: their futures end, and slots, bytes and permits come back.

Each scenario runs once to count its waits. Then it runs once for each wait and each way to end there.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

import pytest
from support.crowd import until
from support.hasty import FLAGS, PATIENCE_S, sampler_of, trainer_of, world
from support.tinker_stub import Answer, Stub, StubServer

from tinker_sync import types
from tinker_sync.clients.service import ServiceClient
from tinker_sync.errors import APITimeoutError, ClientClosedError, DeadlineError, InternalServerError
from tinker_sync.runtime.flows import Flow, Flows, Task
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.transport.call import Call

PROMPT, PARAMS = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=2)
INPUTS: dict[str, Any] = {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]}
LONG_S = 1000.0
TRY_AGAIN = {"type": "try_again", "queue_state": "active"}
BIG = {"status": "complete_metadata", "response_payload_size": 1000}


class Watch:
    """Counts the waits of all flows, and acts at one of them.

    Args:
        at: the number of this wait, from 0; None: only count.
        act: called at the wait, on the thread that resumes the flows; returns None, or an exception with
            which the wait fails if it is one for an exchange or a pause.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, at: int | None = None, act: Callable[[], Any] = lambda: None
    ) -> None:
        self.count = 0
        self._at, self._act = at, act
        start = Flows.start

        def watched(flows: Flows, flow: Flow[Any], future: APIFuture[Any] | None = None) -> Task:
            return start(flows, self._watch(flow), future)

        monkeypatch.setattr(Flows, "start", watched)

    def _watch(self, flow: Flow[Any]) -> Generator[Any, Any, Any]:
        go: Callable[[Any], Any] = flow.send
        value: Any = None
        while True:
            try:
                wish = go(value)
            except StopIteration as end:
                return end.value
            now, self.count = self.count, self.count + 1
            failure = self._act() if now == self._at else None
            if failure is not None and isinstance(wish, (Call, float)):
                go, value = flow.throw, failure
                continue
            try:
                value, go = (yield wish), flow.send
            except BaseException as thrown:  # noqa: BLE001  # the flow decides
                value, go = thrown, flow.throw


def script_trouble(stub: Stub) -> None:
    stub.script("/asample", Answer(503), Answer(429), Answer(body=b"?"))
    stub.script("/retrieve_future", Answer(body=TRY_AGAIN), Answer(410), Answer(body=BIG), Answer(503))


Prepare = Callable[[ServiceClient], Callable[[], APIFuture[Any]]]


def sample(client: ServiceClient, tokens: int = 3) -> Callable[[], APIFuture[Any]]:
    sampler, prompt = sampler_of(client), types.ModelInput.from_ints([1] * tokens)
    return lambda: sampler.sample(prompt, 1, PARAMS, deadline=LONG_S)


def step(client: ServiceClient) -> Callable[[], APIFuture[Any]]:
    trainer = trainer_of(client)
    return lambda: trainer.optim_step(types.AdamParams(), deadline=LONG_S)


def passes(client: ServiceClient) -> Callable[[], APIFuture[Any]]:
    trainer, data = trainer_of(client), [types.Datum(PROMPT, INPUTS) for _ in range(5)]
    return lambda: trainer.forward_backward(data, "cross_entropy", deadline=LONG_S)


SCENARIOS: dict[str, tuple[Prepare, Callable[[Stub], None], dict[str, Any]]] = {
    "sample": (sample, lambda _: None, {}),
    "sample in trouble": (sample, script_trouble, {}),
    "sample of a large prompt": (partial(sample, tokens=10_000), lambda _: None, {}),
    "sample of a session": (sample, lambda _: None, {"sample_use_retrieve_futures": True}),
    "optim_step": (step, lambda stub: stub.script("/optim_step", Answer(503)), {}),
    "forward_backward": (passes, lambda _: None, {"fwdbwd_max_chunk_len": 2}),
}
KINDS: dict[str, tuple[type[BaseException], ...]] = {
    "cancel": (CancelledError,),
    # A call that was sent before ends with what it met last.
    "deadline": (DeadlineError, APITimeoutError, InternalServerError),
    "close": (ClientClosedError,),
    "failure": (ZeroDivisionError,),
}


def free_of(made: Any) -> tuple[int, ...]:
    """Return what is free of each limit."""
    quotas = made.polls.room, made.train_bytes, made.sending_bytes
    return made.admission.slots, made.admission.bytes, *(quota.free for quota in quotas)


def run(
    name: str, kind: str, at: int | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, BaseException | None]:
    """Run a scenario, and end it at a wait. Return the number of waits, and how the call has ended."""
    prepare, script, flags = SCENARIOS[name]
    with world(flags) as (stub, client), monkeypatch.context() as patch:
        call, free = prepare(client), free_of(client.holder.server.ready())
        script(stub)
        futures: list[APIFuture[Any]] = []
        ends: list[APIFuture[None]] = []
        make = client.holder.lifecycle.make_future

        def note(*given: Any, **named: Any) -> APIFuture[Any]:
            futures.append(make(*given, **named))
            return futures[-1]

        def act() -> Any:
            if kind == "cancel":
                futures[0].cancel()
            elif kind == "deadline":
                client.holder.clock.advance(2 * LONG_S)  # type: ignore[attr-defined]
            elif kind == "close":
                ends.append(client.close("errored"))
            else:
                return ZeroDivisionError("injected")
            return None

        patch.setattr(client.holder.lifecycle, "make_future", note)
        watch = Watch(patch, at, act)
        try:
            failure = call().exception(PATIENCE_S)
        except CancelledError as cancelled:
            failure = cancelled
        for end in ends:
            end.result(PATIENCE_S)
        made = client.holder.server.machinery.value
        until(lambda: free_of(made) == free)
        if kind in ("cancel", "deadline"):
            later = sampler_of(client).sample(PROMPT, 1, PARAMS)
            assert later.result(PATIENCE_S).sequences
        return watch.count, failure


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_call_that_ends_at_any_wait_leaves_nothing_taken(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, failure = run(name, kind, None, monkeypatch)
    assert failure is None
    assert count >= 3
    ended = [run(name, kind, at, monkeypatch)[1] for at in range(count)]
    for failure in ended:
        assert failure is None or isinstance(failure, KINDS[kind]), failure
    assert "sample" not in name or any(failure is not None for failure in ended)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("name", ["sample", "sample of a session"])
def test_a_fork_at_any_wait_leaves_the_flow_to_the_parent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child has all slots and bytes, and samples on its own; the sample of the parent goes on."""
    flags = SCENARIOS[name][2]

    def run_forked(at: int | None) -> int:
        with (
            StubServer(config={**FLAGS, **flags}) as stub,
            ServiceClient(base_url=stub.url, api_key="tml-x") as client,  # type: ignore[attr-defined]
            monkeypatch.context() as patch,
        ):
            sampler, children = sampler_of(client), []
            sampler.sample(PROMPT, 1, PARAMS).result(PATIENCE_S)
            free = free_of(client.holder.server.ready())

            def fork() -> None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # threads run, on purpose
                    child = os.fork()
                if child == 0:
                    status = 1
                    try:
                        unused = free_of(client.holder.server.ready()) == free
                        fine = sampler.sample(PROMPT, 1, PARAMS).result(PATIENCE_S).sequences
                        status = 0 if unused and fine else 2
                    finally:
                        os._exit(status)
                children.append(child)

            watch = Watch(patch, at, fork)
            future = sampler.sample(PROMPT, 1, PARAMS)
            assert future.result(PATIENCE_S).sequences
            for child in children:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            until(lambda: free_of(client.holder.server.ready()) == free)
            return watch.count

    for at in range(run_forked(None)):
        run_forked(at)
