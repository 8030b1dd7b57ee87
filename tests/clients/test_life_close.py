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
from contextlib import ExitStack
from textwrap import dedent
from typing import Any

import pytest
from support.crowd import start, together, until
from support.isolation import our_threads
from support.raising import raising
from support.scripts import Script
from support.tinker_stub import Answer, Stub, StubServer

from tinker_sync import types
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.clients.service import ServiceClient
from tinker_sync.clients.training import TrainingClient
from tinker_sync.errors import ClientClosedError, TinkerError
from tinker_sync.runtime.client import PENDING_LIMIT_S
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
        with pytest.raises(RuntimeError, match="closed"):
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

    def is_gone() -> bool:
        gc.collect()  # again, because the thread that tried to start it drops it a moment after the failure
        return runtime() is None

    until(is_gone)
    until(lambda: our_threads() == set())


# ---- The end of a client waits for pending calls that change something at the server, and for no other calls
FULL = {"custom_loss_server_side": False}
PATIENCE_S = 120.0
STEP = types.AdamParams()


def unpaced_service(stub: Stub) -> ServiceClient:
    return ServiceClient(base_url=stub.url, api_key="tml-x")  # type: ignore[attr-defined]


def leave(service: ServiceClient) -> threading.Thread:
    """Start a thread that leaves the `with` block of a client, and return the thread."""
    thread = threading.Thread(target=lambda: service.__exit__(None, None, None))
    thread.start()
    return thread


def save(trainer: TrainingClient) -> Any:
    return trainer.save_state("final")


def step(trainer: TrainingClient) -> Any:
    return trainer.optim_step(STEP)


@pytest.mark.parametrize(
    ("call", "path"),
    [
        (save, "/save_weights"),
        (step, "/optim_step"),
        (lambda trainer: trainer.save_weights_for_sampler("a"), "/save_weights_for_sampler"),
    ],
    ids=["save_state", "optim_step", "save_weights_for_sampler"],
)
def test_a_change_is_waited_for(stub: Stub, call: Callable[[TrainingClient], Any], path: str) -> None:
    service = unpaced_service(stub)
    trainer = service.create_lora_training_client("stub/model").result()
    sampler = service.create_sampling_client(base_model="stub/model").result()
    stub.behaviour.latency_s = 3600.0
    sampled = sampler.sample(PROMPT, 1, PARAMS)
    release = stub.hold(path)
    changed = call(trainer)
    stub.await_asked(path)
    leaving = leave(service)
    # Calls that only read end at once, and new calls are refused.
    assert isinstance(sampled.exception(PATIENCE_S), ClientClosedError)
    for attempt in (lambda: trainer.optim_step(STEP), lambda: sampler.sample(PROMPT, 1, PARAMS)):
        with pytest.raises(ClientClosedError):
            attempt()
    assert not changed.done()
    release.set()
    leaving.join(PATIENCE_S)
    assert changed.exception(0) is None
    assert stub.paths()[-1] == "/sessions/session-0/finish"


def test_calls_before_a_change_are_sent(stub: Stub) -> None:
    """The end of a client also sends calls that were made before a change, once their model exists."""
    release = stub.hold("/create_model")
    service = unpaced_service(stub)
    trainer = service.create_lora_training_client("stub/model")
    passed, stepped = trainer.forward_backward([DATUM], "cross_entropy"), step(trainer)
    saved = save(trainer)
    stub.await_asked("/create_model")
    leaving = leave(service)
    release.set()
    leaving.join(PATIENCE_S)
    assert [future.exception(0) for future in (passed, stepped, saved)] == [None] * 3


def test_calls_of_rest_clients(stub: Stub) -> None:
    service = unpaced_service(stub)
    rest = service.create_rest_client()
    release = threading.Event()
    path = "/training_runs/run/checkpoints/weights/a"
    stub.script(path, Answer(gate=release, body={}))
    deleted = rest.delete_checkpoint("run", "weights/a")
    stub.await_asked(path)
    leaving = leave(service)
    release.set()
    leaving.join(PATIENCE_S)
    assert deleted.exception(0) is None


def test_what_is_dropped_is_named_in_one_warning(stub: Stub, caplog: pytest.LogCaptureFixture) -> None:
    service = unpaced_service(stub)
    trainer = service.create_lora_training_client("stub/model").result()
    stub.script("/optim_step", Answer(status=0))
    futures = [step(trainer), step(trainer), save(trainer)]
    stub.await_asked("/optim_step")
    with caplog.at_level(logging.WARNING):
        service.close(pending=0.0).result(PATIENCE_S)
    assert all(isinstance(future.exception(0), ClientClosedError) for future in futures)
    (warning,) = [record.getMessage() for record in caplog.records if "lost" in record.getMessage()]
    assert warning.endswith("2 optim_step, save_state")


def test_passes_by_themselves_are_not_waited_for(stub: Stub) -> None:
    service = unpaced_service(stub)
    trainer = service.create_lora_training_client("stub/model").result()
    stub.script("/forward_backward", Answer(status=0))
    passed = trainer.forward_backward([DATUM], "cross_entropy")
    stub.await_asked("/forward_backward")
    service.close().result(PATIENCE_S)
    assert isinstance(passed.exception(0), ClientClosedError)


# The line that names what is waited for comes at once.
SCRIPT = """
from tinker_sync.runtime import client
client.NOTICE_AFTER_S = 0.0
service = ServiceClient(base_url=os.environ["URL"], api_key="tml-x")
trainer = service.create_lora_training_client("stub/model")
"""


def run(stub: Stub, text: str) -> Script:
    return Script(SCRIPT + dedent(text), URL=stub.url, unhurried=True)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("trainer.result(); trainer.save_state('final')", 0),
        ("trainer.save_state('final')", 0),
        ("trainer.save_state('final'); raise ValueError('mine')", 1),
        ("threading.Thread(target=lambda: (trainer.save_state('final'), sys.exit(1))).start(); hear()", 0),
        ("threading.Thread(target=trainer.save_state, args=('final',), daemon=True).start(); hear()", 0),
    ],
    ids=["end", "end-during-creation", "exception", "exit-of-a-thread", "daemon-thread"],
)
def test_the_end_of_a_script_waits_for_a_save(stub: Stub, text: str, code: int) -> None:
    release = stub.hold("/save_weights")
    with run(stub, text) as script:
        stub.await_asked("/save_weights")
        script.say("go on")
        release.set()
        ended = script.wait()
    assert ended.code == code
    assert "lost" not in ended.err
    asked = stub.paths()
    assert asked.index("/sessions/session-0/finish") > asked.index("/save_weights")
    assert stub.asked("/retrieve_future")[-1].json()["request_id"] == f"req-{stub._counters['promise'] - 1}"


def test_calls_made_just_before_the_end_of_a_script_are_carried_out() -> None:
    """The calls wait for an answer that comes after the last line. By then Python 3.12 starts no threads."""
    text = """
    datum = types.Datum(PROMPT, {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]})
    trainer.forward_backward([datum], "cross_entropy")
    trainer.optim_step(types.AdamParams())
    trainer.save_state("final")
    """
    release = threading.Event()
    with ExitStack() as stack:
        runs = []
        for path in ("/client/config", "/create_session", "/retrieve_future"):
            stub = stack.enter_context(StubServer(config=FULL))
            stub.script(path, Answer(gate=release, usual=True))
            script = stack.enter_context(run(stub, text))
            runs.append((path, stub, script))
        for path, stub, script in runs:
            stub.await_asked(path)
            assert script.err_line().startswith("tinker_sync: waiting for optim_step, save_state"), path
        release.set()
        for path, stub, script in runs:
            ended = script.wait()
            assert (ended.code, ended.err.count("\n")) == (0, 1), path
            made = [asked.rpartition("/")[2] for asked in stub.paths()]
            names = ("forward_backward", "optim_step", "save_weights")
            assert [made.count(name) for name in names] == [1, 1, 1], path
            assert made[-1] == "finish", path


def test_ctrl_c_leaves_at_once(stub: Stub) -> None:
    """A script that waits at its end for a save leaves at the first Ctrl-C, without an answer."""
    stub.script("/save_weights", Answer(status=0))
    with run(stub, "trainer.save_state('final')") as script:
        stub.await_asked("/save_weights")
        assert script.err_line().startswith("tinker_sync: waiting for save_state")
        script.interrupt()
        ended = script.wait()
    assert ended.err.count("may be lost: save_state") == 1
    assert len(stub.asked("/save_weights")) == 1


@pytest.mark.parametrize("block", ["with service:", "if True:"], ids=["with", "script"])
def test_the_first_ctrl_c_leaves_soon(stub: Stub, block: str) -> None:
    """The script is given up long before a minute is over, and before the server has answered."""
    stub.script("/save_weights", Answer(status=0))
    text = f"""
    {block}
        saved = trainer.save_state('final')
        say("saving")
        saved.result()
    """
    with run(stub, text) as script:
        script.hear()
        stub.await_asked("/save_weights")
        script.interrupt()
        ended = script.wait()
    assert ended.code == -2
    assert ended.err.count("may be lost: save_state") == 1
    assert ended.took_s < PENDING_LIMIT_S / 2


def test_sys_exit_in_a_signal_handler_waits_for_a_save(stub: Stub) -> None:
    """A script that a batch system ends by SIGTERM saves and exits; the end of its block is a normal one."""
    release = stub.hold("/save_weights")
    text = """
    def leave(*_):
        trainer.save_state("final")
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave)
    with service:
        trainer.result()
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()
    """
    with run(stub, text) as script:
        stub.await_asked("/save_weights")
        assert script.err_line().startswith("tinker_sync: waiting for save_state")
        release.set()
        ended = script.wait()
    assert (ended.code, "lost" in ended.err) == (0, False)
    assert stub.paths()[-1] == "/sessions/session-0/finish"
