"""A process ends at once, also in the middle of calls, and its session is finished with the right status."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from support.scripts import Ended, Script
from support.tinker_stub import Answer, Stub, StubServer

FULL = {"custom_loss_server_side": False}  # a setting by which clients recognise the newest servers
FINISH = "/sessions/session-0/finish"
BUSY = 60
# The server answers in an hour, so a process that waits for an answer does not end in time.
INTERRUPTS = int(os.environ.get("INTERRUPT_ROUNDS", "25"))
GONE_S = 120.0

IN_FLIGHT = f"""
service = ServiceClient(base_url=os.environ["URL"], api_key="tml-x")
sampler = service.create_sampling_client(base_model="stub/model")
futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range({BUSY})]
say("busy")
hear()
"""

STUCK_CALLBACK = """
running = threading.Event()
futures[0].add_done_callback(lambda _: (running.set(), threading.Event().wait()))
assert futures[0].cancel()
running.wait()
"""
FORK_AND_EXEC = """
import subprocess, warnings
warnings.filterwarnings("ignore", "This process", DeprecationWarning)
subprocess.run([sys.executable, "-c", "pass"], check=True)
child = os.fork()
if child == 0:
    sys.exit(5)  # as a script ends, with what is registered for that
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
"""


@pytest.fixture
def stub() -> Iterator[Stub]:
    with StubServer(config=FULL, latency_s=3600.0) as stub:
        yield stub


def run(stub: Stub, text: str, *, unhurried: bool = False) -> Script:
    return Script(text, URL=stub.url, unhurried=unhurried)


def finishes(stub: Stub) -> list[Any]:
    """Return the status and the detail of each request that finishes a session."""
    bodies = [asked.json() for asked in stub.asked(FINISH)]
    return [(body["reason"]["type"], body["detail"]) for body in bodies]


def end_of(stub: Stub, text: str, *, unhurried: bool = False) -> Ended:
    """Run a script that makes many calls and then runs the code in `text`. Return how it ended."""
    with run(stub, IN_FLIGHT + text, unhurried=unhurried) as script:
        script.hear()
        stub.await_asked("/retrieve_future", BUSY)
        script.say("go on")
        return script.wait()


@pytest.mark.parametrize(
    ("text", "code", "status", "last_words"),
    [
        ("", 0, ["success"], ""),
        ("raise ValueError('mine')", 1, ["errored"], "ValueError: mine"),
        ("sys.exit(3)", 3, ["success"], ""),
        ("os._exit(4)", 4, [], ""),
        ("service.close('errored', 'a detail')", 0, ["errored"], ""),
        (
            "import atexit; atexit.register(lambda: service.close('interrupted').result())",
            0,
            ["interrupted"],
            "",
        ),
        ("with service: raise ValueError('mine')", 1, ["errored"], "ValueError: mine"),
        ("os.kill(os.getpid(), signal.SIGTERM); threading.Event().wait()", -15, [], ""),
        (STUCK_CALLBACK, 0, ["success"], ""),
        (FORK_AND_EXEC, 0, ["success"], ""),
        ("thread = threading.Thread(target=sys.exit); thread.start(); thread.join()", 0, ["success"], ""),
    ],
    ids=[
        *("end", "exception", "sys.exit", "os._exit", "close-not-awaited", "close-at-exit", "with"),
        *("SIGTERM", "callback-that-runs", "fork-with-and-without-exec", "sys.exit-in-a-thread"),
    ],
)
def test_the_process_is_gone_and_the_session_finished(
    stub: Stub, text: str, code: int, status: list[str], last_words: str
) -> None:
    ended = end_of(stub, text, unhurried=True)
    assert (ended.code, [kind for kind, _ in finishes(stub)]) == (code, status)
    assert ended.took_s < GONE_S
    lines = ended.err.strip().splitlines()
    # stderr has the traceback of the user's program and no other output.
    assert lines[-1:] == ([last_words] if last_words else [])
    assert "tinker" not in ended.err
    assert ended.err.count("Traceback") == bool(last_words)


MANY = """
url, count = os.environ["URL"], int(os.environ["COUNT"])
services = [ServiceClient(base_url=url, api_key="tml-x") for _ in range(count)]
for service in services:
    service.create_sampling_client(base_model="stub/model").result()
"""


def sessions_finished(stub: Stub) -> list[tuple[str, str]]:
    """Return the session and the status of each request that finishes one, sorted."""
    paths = [asked for asked in list(stub.log) if asked.path.endswith("/finish")]
    return sorted((asked.path.split("/")[-2], asked.json()["reason"]["type"]) for asked in paths)


def test_a_silent_server_is_waited_for_by_all_sessions_together(stub: Stub) -> None:
    """One after the other they would take a second each, longer than the process may take."""
    count = int(GONE_S) + 30
    for number in range(count):
        stub.script(f"/sessions/session-{number}/finish", Answer(status=0))
    with Script(MANY + "say('made'); hear()", URL=stub.url, COUNT=str(count)) as script:
        assert script.hear() == "made"
        script.say("go on")
        ended = script.wait()
    assert (ended.code, ended.err) == (0, "")
    assert ended.took_s < GONE_S
    assert len(sessions_finished(stub)) == count


def test_a_dead_server_does_not_hold_the_process() -> None:
    with StubServer(config=FULL, latency_s=3600.0) as stub:
        script = run(stub, IN_FLIGHT)
        script.hear()
        stub.await_asked("/retrieve_future", BUSY)
    # The server has gone with its connections, so all calls under way are being retried.
    with script:
        script.say("go on")
        ended = script.wait()
    assert (ended.code, ended.err) == (0, "")
    assert ended.took_s < GONE_S


def test_ctrl_c_in_result_ends_the_script_at_once(stub: Stub) -> None:
    with run(stub, IN_FLIGHT + "say('waiting'); futures[0].result()", unhurried=True) as script:
        script.hear()
        stub.await_asked("/retrieve_future", BUSY)
        script.say("go on")
        assert script.hear() == "waiting"
        script.interrupt()
        ended = script.wait()
    assert ended.code == -2
    assert ended.err.strip().endswith("KeyboardInterrupt")
    assert ended.err.count("Traceback") == 1
    assert finishes(stub) == [("interrupted", None)]
    assert ended.took_s < GONE_S


def test_ctrl_c_twice_does_not_wait_for_a_silent_server(stub: Stub) -> None:
    stub.script(FINISH, Answer(status=0))
    with run(stub, IN_FLIGHT + "say('waiting')\nwith service: futures[0].result()") as script:
        script.hear()
        stub.await_asked("/retrieve_future", BUSY)
        script.say("go on")
        assert script.hear() == "waiting"
        script.interrupt()
        stub.await_asked(FINISH)
        script.interrupt()
        ended = script.wait()
    assert ended.code == -2
    assert finishes(stub) == [("interrupted", None)]
    assert ended.took_s < GONE_S


def test_ctrl_c_during_an_awaited_call_ends_asyncio_too(stub: Stub) -> None:
    stub.script("/get_server_capabilities", Answer(status=0))
    text = """
    import asyncio
    service = ServiceClient(base_url=os.environ["URL"], api_key="tml-x")
    asyncio.run(service.get_server_capabilities_async())
    """
    with run(stub, text) as script:
        stub.await_asked("/get_server_capabilities")
        script.interrupt()
        ended = script.wait()
    assert ended.err.strip().endswith("KeyboardInterrupt")
    assert ended.took_s < GONE_S


def test_after_ctrl_c_in_result_the_client_goes_on(stub: Stub) -> None:
    """A cell of a notebook is interrupted in `result`, and the next cell uses the same client."""
    text = """
    service = ServiceClient(base_url=os.environ["URL"], api_key="tml-x")
    sampler = service.create_sampling_client(base_model="stub/model")
    slow = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(20)]
    try:
        say("waiting")
        slow[0].result()
    except KeyboardInterrupt:
        say("interrupted")
    hear()
    say(sampler.sample(PROMPT, 1, PARAMS).result(120).sequences[0].tokens)
    trainer = service.create_lora_training_client("stub/model")
    say(trainer.optim_step(types.AdamParams()).result(120).metrics)
    say(slow[0].done())
    """
    with run(stub, text, unhurried=True) as script:
        assert script.hear() == "waiting"
        stub.await_asked("/retrieve_future", 20)
        script.interrupt()
        assert script.hear() == "interrupted"
        stub.behaviour.latency_s = 0.0
        script.say("next cell")
        ended = script.wait()
    assert ended.out[2:] == ["[6, 7]", "{'step:max': 1.0}", "False"]
    assert (ended.code, ended.err) == (0, "")
    assert finishes(stub) == [("success", None)]


def test_blocking_calls_are_interrupted_too(stub: Stub) -> None:
    stub.script("/get_server_capabilities", Answer(status=0))
    text = """
    service = ServiceClient(base_url=os.environ["URL"], api_key="tml-x")
    try:
        service.get_server_capabilities()
    except KeyboardInterrupt:
        say(service.get_server_capabilities().supported_models[0].model_name)
    """
    with run(stub, text) as script:
        stub.await_asked("/get_server_capabilities")
        script.interrupt()
        ended = script.wait()
    assert (ended.out, ended.err) == (["stub/model"], "")


@pytest.mark.parametrize(
    ("wait", "path"),
    [
        ("service.get_server_capabilities()", "/get_server_capabilities"),
        ("sampler.sample(PROMPT, 1, PARAMS).result()", "/retrieve_future"),
        ("sampler.sample(PROMPT, 1, PARAMS).exception(3000)", "/retrieve_future"),
    ],
    ids=["call", "result", "exception"],
)
def test_a_ctrl_c_that_wakes_no_thread_is_noticed(stub: Stub, wait: str, path: str) -> None:
    """The main thread, which waits, notices a Ctrl-C whose signal interrupted another thread."""
    stub.script("/get_server_capabilities", Answer(status=0))
    text = f"""
    service = ServiceClient(base_url=os.environ["URL"], api_key="tml-x")
    sampler = service.create_sampling_client(base_model="stub/model")

    def take_signals():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        threading.Event().wait()

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    threading.Thread(target=take_signals, daemon=True).start()
    try:
        {wait}
    except KeyboardInterrupt:
        say("interrupted")
        os._exit(0)
    """
    with run(stub, text) as script:
        stub.await_asked(path)
        script.interrupt()
        assert script.wait().out == ["interrupted"]


def test_a_session_of_an_interactive_prompt_ends_well(stub: Stub) -> None:
    """At an interactive prompt the session ends with "success", although an earlier line raised an error."""
    text = """
    service = ServiceClient(base_url=os.environ["URL"], api_key="tml-x")
    service.create_sampling_client(base_model="stub/model").result()
    sys.ps1, sys.last_value = ">>> ", ValueError("of an earlier line")
    """
    with run(stub, text, unhurried=True) as script:
        assert script.wait().code == 0
    assert finishes(stub) == [("success", None)]


@pytest.mark.parametrize(
    ("call", "path"),
    [("sampler.sample(PROMPT, 1, PARAMS)", "/asample"), ("trainer.optim_step(STEP)", "/optim_step")],
    ids=["sample", "optim_step"],
)
def test_ctrl_c_may_come_at_any_moment_of_a_call(stub: Stub, call: str, path: str) -> None:
    """Ctrl-C interrupts a loop at any point within a call; the client goes on with consecutive numbers."""
    stub.behaviour.latency_s = 0.0
    text = f"""
    import random
    sys.setswitchinterval(1e-5)
    STEP = types.AdamParams()
    service = ServiceClient(base_url=os.environ["URL"], api_key="tml-x")
    sampler = service.create_sampling_client(base_model="stub/model")
    trainer = service.create_lora_training_client("stub/model")
    armed, shooting, never = threading.Event(), threading.Lock(), threading.Event()
    main, draw, interrupted = threading.main_thread().ident, random.Random(7), 0

    def interrupt():
        while True:
            armed.wait()
            never.wait(draw.random() * 0.001)
            with shooting:
                if armed.is_set():
                    armed.clear()
                    signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    while interrupted < {INTERRUPTS}:
        try:
            armed.set()
            for _ in range(15):
                {call}
        except KeyboardInterrupt:
            interrupted += 1
        while True:
            try:
                with shooting:
                    armed.clear()
                {call}.result(120)
                break
            except KeyboardInterrupt:
                interrupted += 1
    say("whole")
    """
    with run(stub, text) as script:
        assert script.hear() == "whole"
        ended = script.wait()
    assert (ended.code, ended.err) == (0, "")
    numbers = sorted({asked.json()["seq_id"] for asked in stub.asked(path)})
    # The numbers have no gaps, so no number was drawn for a request that was not sent.
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
