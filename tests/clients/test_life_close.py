"""Closing a client: with `close`, by a `with` block, and by dropping the last reference."""

from __future__ import annotations

import gc
import logging
import pickle
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from support.crowd import start, together, until
from support.isolation import our_threads
from support.raising import raising
from support.tinker_stub import Answer, Stub

from tinker_sync import types
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.clients.service import ServiceClient
from tinker_sync.clients.training import TrainingClient
from tinker_sync.errors import ClientClosedError, TinkerError
from tinker_sync.runtime.futures import APIFuture

FINISH = "/sessions/session-0/finish"
PROMPT, PARAMS = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=2)
DATUM = types.Datum(PROMPT, {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]})


def new_service(stub: Stub, **options: Any) -> ServiceClient:
    return ServiceClient(base_url=stub.url, api_key="tml-x", **options)


def finishes(stub: Stub) -> list[Any]:
    bodies = [asked.json() for asked in stub.asked(FINISH)]
    return [(body["reason"]["type"], body["detail"]) for body in bodies]


def sample(client: SamplingClient) -> APIFuture[types.SampleResponse]:
    return client.sample(PROMPT, 1, PARAMS)


# ---------------------------------------------------------------------------------------------- close


def test_close_reports_the_outcome_once(stub: Stub) -> None:
    service = new_service(stub)
    service.create_sampling_client(base_model="stub/model").result()
    first = service.close("errored", "out of patience")
    assert service.close("success") is first
    assert first.result(120) is None
    assert finishes(stub) == [("errored", "out of patience")]
    assert our_threads() == set()


def test_closing_from_many_threads_is_closing_once(stub: Stub) -> None:
    service = new_service(stub)
    service.create_sampling_client(base_model="stub/model").result()
    futures = together(*[lambda: service.close("success")] * 8)
    assert len({id(future) for future in futures}) == 1
    futures[0].result(120)
    assert finishes(stub) == [("success", None)]


NEW_CALLS: dict[str, Callable[[ServiceClient, TrainingClient, SamplingClient], Any]] = {
    "capabilities": lambda service, *_: service.get_server_capabilities(),
    "create_lora": lambda service, *_: service.create_lora_training_client("m").result(),
    "create_sampling": lambda service, *_: service.create_sampling_client(base_model="m").result(),
    "from_state": lambda service, *_: service.create_training_client_from_state(
        "tinker://r/weights/a"
    ).result(),
    "forward_backward": lambda _s, trainer, _c: trainer.forward_backward([DATUM], "cross_entropy"),
    "forward": lambda _s, trainer, _c: trainer.forward([DATUM], "cross_entropy"),
    "optim_step": lambda _s, trainer, _c: trainer.optim_step(types.AdamParams()),
    "save_state": lambda _s, trainer, _c: trainer.save_state("a"),
    "save_for_sampler": lambda _s, trainer, _c: trainer.save_weights_for_sampler("a"),
    "save_and_sample": lambda _s, trainer, _c: trainer.save_weights_and_get_sampling_client().result(),
    "get_info": lambda _s, trainer, _c: trainer.get_info(),
    "sample": lambda _s, _t, sampler: sample(sampler),
    "compute_logprobs": lambda _s, _t, sampler: sampler.compute_logprobs(PROMPT),
    "get_base_model": lambda _s, _t, sampler: sampler.get_base_model(),
    "handle": lambda _s, _t, sampler: sampler.get_sampler_handle(),
    "pickle": lambda _s, _t, sampler: pickle.dumps(sampler),
}


def test_after_close_every_new_call_is_a_runtime_error(stub: Stub) -> None:
    service = new_service(stub)
    trainer = service.create_lora_training_client("stub/model").result()
    sampler = service.create_sampling_client(base_model="stub/model").result()
    service.close().result(120)
    asked = len(stub.log)
    for name, call in NEW_CALLS.items():
        with pytest.raises(RuntimeError, match="this client is closed; make a new one"):
            pytest.fail(f"{name} gave {call(service, trainer, sampler)!r}")
    assert len(stub.log) == asked


def test_close_fails_what_is_under_way_and_nothing_hangs(stub: Stub) -> None:
    """Calls in every state fail: queued, sending, before a retry, paused, waiting for results."""
    service = new_service(stub)
    trainer = service.create_lora_training_client("stub/model").result()
    sampler = service.create_sampling_client(base_model="stub/model").result()
    # Samples that wait for results, that wait to be submitted again, and that wait for the next poll.
    stub.behaviour.latency_s = 3600.0
    futures: list[APIFuture[Any]] = [sample(sampler) for _ in range(30)]
    stub.await_asked("/retrieve_future", 1 + 30)
    stub.script("/asample", *[Answer(500)] * 20, *[Answer(429, headers={"retry-after": "60"})] * 20)
    futures += [sample(sampler) for _ in range(20)]
    stub.await_asked("/asample", 30 + 20)
    stub.script("/retrieve_future", *[Answer(503)] * 20)
    # Training calls: the first one gets no answer, so the later ones stay queued.
    stub.script("/forward_backward", Answer(status=0))
    futures += [trainer.forward_backward([DATUM] * 3, "cross_entropy")]
    futures += [trainer.optim_step(types.AdamParams()) for _ in range(20)]
    stub.await_asked("/forward_backward")
    futures += [sampler.compute_logprobs(PROMPT)]
    heard: list[str] = []
    futures[0].add_done_callback(lambda future: heard.append(type(future.exception()).__name__))

    service.close(pending=0.0).result(120)
    assert [type(future.exception(120)) for future in futures] == [ClientClosedError] * len(futures)
    assert "this client is closed" in str(futures[0].exception())
    until(lambda: heard == ["ClientClosedError"])


def test_close_interrupts_calls_that_block(stub: Stub) -> None:
    service = new_service(stub)
    trainer = service.create_lora_training_client("stub/model").result()
    stub.script("/get_info", Answer(status=0))
    stub.script("/get_server_capabilities", *[Answer(500)] * 20)
    blocked = [start(trainer.get_info), start(service.get_server_capabilities)]
    stub.await_asked("/get_info")
    stub.await_asked("/get_server_capabilities")
    service.close().result(120)
    assert [type(each.exception(120)) for each in blocked] == [ClientClosedError] * 2


def test_a_client_closed_while_it_starts_leaves_no_session(stub: Stub) -> None:
    release = stub.hold("/create_session")
    service = new_service(stub)
    made = start(lambda: service.create_sampling_client(base_model="stub/model").result())
    stub.await_asked("/create_session")
    service.close().result(120)
    release.set()
    assert isinstance(made.exception(120), ClientClosedError)
    assert our_threads() == set()


def test_ctrl_c_in_close_leaves_the_end_to_the_next_close(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = new_service(stub)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            service.close()
    service.close().result(120)


def test_close_from_a_callback(stub: Stub) -> None:
    service = new_service(stub)
    sampler = service.create_sampling_client(base_model="stub/model").result()
    closed = threading.Event()

    def close(_: object) -> None:
        service.close().result(120)
        closed.set()

    sample(sampler).add_done_callback(close)
    assert closed.wait(120)
    assert finishes(stub) == [("success", None)]


@pytest.mark.parametrize("answer", [Answer(status=0), Answer(500), Answer(429)], ids=["silent", "500", "429"])
def test_close_is_bounded_in_time(stub: Stub, answer: Answer, caplog: pytest.LogCaptureFixture) -> None:
    stub.script(FINISH, *[answer] * 100)
    service = new_service(stub)
    service.create_sampling_client(base_model="stub/model").result()
    with caplog.at_level(logging.WARNING, "tinker_sync"):
        service.close("success", timeout=0.3).result(9)  # the usual limit is 10
    assert our_threads() == set()


def test_a_server_without_the_call_is_no_reason_to_raise(
    stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    stub.script(FINISH, Answer(404, {"detail": "Not Found"}))
    with caplog.at_level(logging.WARNING, "tinker_sync"):
        service = new_service(stub)
        service.create_sampling_client(base_model="stub/model").result()
        service.close("success").result(120)
    assert finishes(stub) == [("success", None)]
    assert caplog.records == []


# ---------------------------------------------------------------------------------------------- with


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "success"),
        (ValueError, "errored"),
        (KeyboardInterrupt, "interrupted"),
        (SystemExit, "interrupted"),
    ],
)
def test_with_reports_how_the_block_ended(stub: Stub, error: type[BaseException] | None, status: str) -> None:
    def block() -> None:
        with new_service(stub) as service:
            service.create_sampling_client(base_model="stub/model").result()
            if error is not None:
                raise error("mine")

    if error is None:
        block()
    else:
        with pytest.raises(error, match="mine"):
            block()
    assert finishes(stub) == [(status, None)]


@pytest.mark.parametrize("answer", [Answer(404, {"detail": "Not Found"}), Answer(400, {"detail": "no"})])
def test_with_never_hides_the_users_exception(stub: Stub, answer: Answer) -> None:
    stub.script(FINISH, answer)

    def block() -> None:
        with new_service(stub) as service:
            service.create_sampling_client(base_model="stub/model").result()
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        block()
    assert finishes(stub) == [("errored", None)]


def test_a_with_block_ends_soon_after_ctrl_c(stub: Stub) -> None:
    stub.script(FINISH, Answer(status=0))
    began: list[float] = []

    def block() -> None:
        with new_service(stub) as service:
            service.create_sampling_client(base_model="stub/model").result()
            began.append(time.monotonic())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        block()
    assert time.monotonic() - began[0] < 9  # the usual limit is 10


# ---------------------------------------------------------------------------------------------- dropped


def test_a_dropped_client_takes_its_threads_along(stub: Stub) -> None:
    """A dropped client is freed without the garbage collector, and its threads end.

    The program still holds the futures of its calls.
    """
    gc.collect()
    gc.disable()
    try:
        service = new_service(stub, on_queue_state=lambda _: None)
        trainer = service.create_lora_training_client("stub/model").result()
        sampler = service.create_sampling_client(base_model="stub/model").result()
        results = [sample(sampler) for _ in range(10)]
        results += [
            trainer.optim_step(types.AdamParams()),
            trainer.forward_backward([DATUM], "cross_entropy"),
        ]
        results += [sampler.compute_logprobs(PROMPT)]
        for each in results:
            each.result(120)
        runtime = weakref.ref(service.holder)
        del service, trainer, sampler
        until(lambda: runtime() is None)
        until(lambda: our_threads() == set())
    finally:
        gc.enable()
    assert [each.done() for each in results] == [True] * 13
    # Other clients may use the session, so it must not be reported as over.
    assert finishes(stub) == []


KEPT: dict[str, tuple[str, Callable[[ServiceClient], APIFuture[Any]], str]] = {
    "sample waiting": (
        "/retrieve_future",
        lambda service: sample(service.create_sampling_client(base_model="m").result()),
        "SampleResponse",
    ),
    "sample being sent": (
        "/asample",
        lambda service: sample(service.create_sampling_client(base_model="m").result()),
        "SampleResponse",
    ),
    "step being sent": (
        "/optim_step",
        lambda service: service.create_lora_training_client("m").result().optim_step(types.AdamParams()),
        "OptimStepResponse",
    ),
    "pass being sent": ("/forward_backward", lambda service: one_pass(service), "ForwardBackwardOutput"),
    "pass waiting": ("/retrieve_future", lambda service: one_pass(service), "ForwardBackwardOutput"),
}


def one_pass(service: ServiceClient) -> APIFuture[Any]:
    return service.create_lora_training_client("m").result().forward_backward([DATUM], "cross_entropy")


@pytest.mark.parametrize("name", KEPT)
def test_a_client_in_use_is_not_dropped(stub: Stub, name: str) -> None:
    """A program that keeps only a future still gets its result."""
    path, call, result = KEPT[name]
    release = threading.Event()
    polls_before = [Answer(usual=True)] * (name == "pass waiting")  # the poll for the new model
    stub.script(path, *polls_before, Answer(gate=release, usual=True))
    future = call(new_service(stub))
    stub.await_asked(path, len(polls_before) + 1)
    gc.collect()
    release.set()
    assert type(future.result(120)).__name__ == result
    until(lambda: our_threads() == set())


def test_a_client_that_failed_to_start_leaves_nothing() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    service = ServiceClient(base_url=address, api_key="tml-x", deadline=0.2)
    with pytest.raises(TinkerError, match="Cannot connect"):
        service.create_sampling_client(base_model="m").result()
    runtime = weakref.ref(service.holder)
    del service
    gc.collect()
    until(lambda: runtime() is None)  # the thread that tried to start it drops it a moment after the failure
    until(lambda: our_threads() == set())
