"""Clocks that jump, machines that sleep and processes that are stopped cost no call its answer.

`STOPPED_S=30 pytest tests/clients/test_life_time.py` stops each process for 30 seconds. By default it is
stopped for a moment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from support.clock import FakeClock
from support.crowd import until
from support.pacing import quick_service
from support.scripts import Script
from support.tinker_stub import Answer, Stub

import tinker_sync
from tinker_sync import types
from tinker_sync._base.clock import SystemClock
from tinker_sync._base.events import Event, HeartbeatLate, SessionLost
from tinker_sync.clients.service import ServiceClient
from tinker_sync.runtime.client_runtime import ClientRuntime
from tinker_sync.runtime.heartbeat import PERIOD_S
from tinker_sync.runtime.session import Session

DAY_S = 86_400.0
STOPPED_S = float(os.environ.get("STOPPED_S", "0"))
PROMPT, PARAMS = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=2)
STEP = types.AdamParams()


class JumpingClock(SystemClock):
    """The clock of this machine, with a date that a test can shift by `shift_s`."""

    def __init__(self) -> None:
        super().__init__()
        self.shift_s = 0.0

    def time(self) -> float:  # type: ignore[override]
        return SystemClock.time() + self.shift_s


class Listener:
    """An observer that collects the events of one class, and ignores others."""

    def __init__(self, kind: type) -> None:
        self.events: list[Event] = []
        self._kind = kind

    def observe(self, event: Event) -> None:
        if isinstance(event, self._kind):
            self.events.append(event)

    def close(self, limit_s: float) -> None:
        pass


@contextmanager
def client_on(stub: Stub, clock: Any) -> Iterator[ServiceClient]:
    service = ServiceClient(base_url=stub.url, api_key="tml-x")  # type: ignore[attr-defined]
    service._runtime = ClientRuntime(service.holder.settings, session=Session(), clock=clock)
    try:
        yield service
    finally:
        service.close().result(120)


@pytest.mark.parametrize("shift_s", [DAY_S, -DAY_S], ids=["forward", "back"])
def test_a_date_that_jumps_by_a_day_in_the_midst_of_calls(stub: Stub, shift_s: float) -> None:
    clock, release = JumpingClock(), threading.Event()
    with client_on(stub, clock) as service:
        lost = Listener(SessionLost)
        service.holder.lifecycle.add_observer(lost)
        sampler = service.create_sampling_client(base_model="stub/model").result(120)
        trainer = service.create_lora_training_client("stub/model").result(120)
        stub.script("/retrieve_future", *[Answer(gate=release, usual=True)] * 2)
        before = [sampler.sample(PROMPT, 1, PARAMS, deadline=120), trainer.optim_step(STEP, deadline=120)]
        stub.await_asked("/retrieve_future", 1 + 2)  # the first is that of the model
        clock.shift_s = shift_s
        stub.script("/asample", Answer(429, {}, {"retry-after": "0.01"}))
        after = [sampler.sample(PROMPT, 1, PARAMS, deadline=120), trainer.optim_step(STEP, deadline=120)]
        assert service.holder.server.session._heartbeat is not None
        service.holder.server.session._heartbeat.step()
        release.set()
        sampled = [before[0].result(120), after[0].result(120)]
        assert [each.sequences[0].tokens for each in sampled] == [[6, 7], [6, 7]]
        assert [each.result(120).metrics["step:max"] for each in (before[1], after[1])] == [1.0, 2.0]
        assert lost.events == []


def test_a_machine_that_sleeps_for_an_hour(stub: Stub) -> None:
    """After the sleep the connection of a poll is broken and a heartbeat is late, but the result arrives."""
    clock, release = FakeClock(automatic=False), threading.Event()
    with client_on(stub, clock) as service:
        late = Listener(HeartbeatLate)
        service.holder.lifecycle.add_observer(late)
        sampler = service.create_sampling_client(base_model="stub/model").result(120)
        stub.script("/retrieve_future", Answer(gate=release, abort="before"))
        sampled = sampler.sample(PROMPT, 1, PARAMS)
        stub.await_asked("/retrieve_future")
        clock.await_waiters()  # the thread of the heartbeats
        clock.advance(3600.0)
        stub.await_asked("/session_heartbeat")
        release.set()
        turn = threading.Event()
        while not sampled.done():
            clock.advance(1.0)  # ends the pause before the next poll
            turn.wait(0.002)
        assert sampled.result(120).sequences[0].tokens == [6, 7]
        [event] = late.events
        assert isinstance(event, HeartbeatLate)
        assert event.delay_s >= 3600.0 - PERIOD_S


def test_a_server_with_a_wrong_date(stub: Stub) -> None:
    """A `Retry-After` with a date is measured by the server's own clock, which is decades ahead here."""
    headers = {"date": "Fri, 02 Jan 2099 00:00:00 GMT", "retry-after": "Fri, 02 Jan 2099 00:00:01 GMT"}
    for path in ("/asample", "/optim_step", "/get_server_capabilities"):
        stub.script(path, Answer(503, {}, headers))
    with quick_service(base_url=stub.url, api_key="tml-x") as service:  # type: ignore[attr-defined]
        sampler = service.create_sampling_client(base_model="stub/model")
        trainer = service.create_lora_training_client("stub/model")
        sampled, stepped = sampler.sample(PROMPT, 1, PARAMS), trainer.optim_step(STEP)
        assert service.get_server_capabilities().supported_models
        assert sampled.result(120).sequences[0].tokens == [6, 7]
        assert stepped.result(120).metrics == {"step:max": 1.0}


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="stops processes")
def test_a_stopped_server_is_asked_again_until_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    tests = Path(__file__).parents[1]
    root = Path(tinker_sync.__file__).parents[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "support.tinker_stub", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(tests)])},
    )
    assert server.stdout is not None
    with server, server.stdout as said:
        try:
            url = f"http://127.0.0.1:{said.readline().strip()}"
            with quick_service(0.1, base_url=url, api_key="tml-x", timeout=0.5) as service:
                sampler = service.create_sampling_client(base_model="stub/model").result(120)
                trainer = service.create_lora_training_client("stub/model").result(120)
                server.send_signal(signal.SIGSTOP)
                sampled, stepped = sampler.sample(PROMPT, 1, PARAMS), trainer.optim_step(STEP)
                until(lambda: "Still trying" in caplog.text)
                threading.Event().wait(STOPPED_S)
                server.send_signal(signal.SIGCONT)
                assert sampled.result(120).sequences[0].tokens == [6, 7]
                assert stepped.result(120).metrics["step:max"] >= 1.0
        finally:
            server.kill()


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="stops processes")
def test_a_stopped_client_goes_on_where_it_was(stub: Stub) -> None:
    """The server closes its connections while the client process is stopped. Later calls succeed."""
    release = threading.Event()
    stub.script("/retrieve_future", Answer(gate=release, abort="before"))
    text = """
    service = ServiceClient(base_url=os.environ["URL"], api_key="tml-x")
    sampler = service.create_sampling_client(base_model="stub/model")
    sampled = sampler.sample(PROMPT, 1, PARAMS)
    say("asked")
    say(sampled.result(120).sequences[0].tokens)
    trainer = service.create_lora_training_client("stub/model")
    say(trainer.optim_step(types.AdamParams()).result(120).metrics)
    """
    with Script(dedent(text), URL=stub.url) as script:  # type: ignore[attr-defined]
        script.hear()
        stub.await_asked("/retrieve_future")
        script.signal(signal.SIGSTOP)
        release.set()
        threading.Event().wait(STOPPED_S)
        script.signal(signal.SIGCONT)
        assert script.hear() == "[6, 7]"
        assert script.hear() == "{'step:max': 1.0}"
        ended = script.wait()
    assert ended.code == 0
    # After a long stop, the only lines of the log are about a late heartbeat.
    assert all("it was stopped" in line for line in ended.err.splitlines())
