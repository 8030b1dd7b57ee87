"""The end of a client waits for pending calls that change something at the server, and for no other calls."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from textwrap import dedent
from typing import Any

import pytest
from support.scripts import Script
from support.tinker_stub import Answer, Stub, StubServer

from tinker_sync import types
from tinker_sync.clients.service import ServiceClient
from tinker_sync.clients.training import TrainingClient
from tinker_sync.errors import ClientClosedError
from tinker_sync.runtime.pending import PENDING_LIMIT_S

FULL = {"custom_loss_server_side": False}
PATIENCE_S = 120.0
PROMPT, PARAMS = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=2)
DATUM = types.Datum(PROMPT, {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]})
STEP = types.AdamParams()


def new_service(stub: Stub) -> ServiceClient:
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
    service = new_service(stub)
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
    service = new_service(stub)
    trainer = service.create_lora_training_client("stub/model")
    passed, stepped = trainer.forward_backward([DATUM], "cross_entropy"), step(trainer)
    saved = save(trainer)
    stub.await_asked("/create_model")
    leaving = leave(service)
    release.set()
    leaving.join(PATIENCE_S)
    assert [future.exception(0) for future in (passed, stepped, saved)] == [None] * 3


def test_calls_of_rest_clients(stub: Stub) -> None:
    service = new_service(stub)
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
    service = new_service(stub)
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
    service = new_service(stub)
    trainer = service.create_lora_training_client("stub/model").result()
    stub.script("/forward_backward", Answer(status=0))
    passed = trainer.forward_backward([DATUM], "cross_entropy")
    stub.await_asked("/forward_backward")
    service.close().result(PATIENCE_S)
    assert isinstance(passed.exception(0), ClientClosedError)


# The line that names what is waited for comes at once.
SCRIPT = """
from tinker_sync.runtime import pending
pending.NOTICE_AFTER_S = 0.0
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
