"""A session from its start to its loss: failures at the start, heartbeats, renewals, and errors of calls."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from support.clock import PATIENCE_S, FakeClock
from support.crowd import until
from support.hasty import beat_now, quick_service, set_clock
from support.scripts import Script
from support.servers import AnsweringServer, answer
from support.tinker_stub import Answer, Asked, Stub, StubServer

import tinker_sync
from tinker_sync import types
from tinker_sync._base.clock import SystemClock
from tinker_sync._base.events import (
    Event,
    HeartbeatLate,
    ModelNamed,
    SessionEnded,
    SessionLost,
    SessionStarted,
)
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.clients.service import ServiceClient
from tinker_sync.config import Settings
from tinker_sync.errors import (
    APIResponseValidationError,
    APITimeoutError,
    AuthenticationError,
    BillingError,
    CredentialError,
    NotFoundError,
    SessionLostError,
    TinkerError,
)
from tinker_sync.runtime.client import ClientRuntime
from tinker_sync.runtime.session import PERIOD_S
from tinker_sync.transport.call import Call, Reply

AT_ONCE = ("/client/config", "/client/dynamic_config", "/create_session")
FULL = {"custom_loss_server_side": False}
PROMPT, PARAMS = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=2)
DATUM = types.Datum(PROMPT, {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]})


@pytest.fixture
def quick(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceClient]:
    """Yield a client whose pauses take a hundredth of their usual time."""
    monkeypatch.setenv("TINKER_PACE", "0.01")
    with ServiceClient(base_url=stub.url, api_key="tml-x") as service:
        yield service


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(automatic=False)


class Watcher:
    """An observer that records all events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def observe(self, event: Event) -> None:
        self.events.append(event)

    def of(self, *kinds: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kinds)]


def on_clock(service: ServiceClient, clock: FakeClock) -> Watcher:
    """Give an unused service client this clock and an observer, and return the observer."""
    set_clock(service, clock)
    watcher = Watcher()
    events = service.holder.connection.events
    events.listen(watcher, SessionStarted, ModelNamed, SessionEnded, SessionLost, HeartbeatLate)
    return watcher


def beat(stub: Stub, clock: FakeClock, *answers: Answer) -> None:
    """Script the answers to the next heartbeats, and advance the clock until these have been sent."""
    stub.script("/session_heartbeat", *answers)
    for _ in answers:
        before = len(stub.asked("/session_heartbeat"))
        clock.await_waiters()
        clock.advance(PERIOD_S)
        stub.await_asked("/session_heartbeat", before + 1)
    clock.await_waiters()


# ---------------------------------------------------------------------------------------------- the start


def test_nothing_goes_out_before_it_is_needed(stub: Stub) -> None:
    services = [ServiceClient(base_url=stub.url, api_key="tml-x") for _ in range(50)]
    assert stub.paths() == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tinker-")]
    del services


def test_the_order_of_the_start(stub: Stub, service: ServiceClient) -> None:
    service.create_sampling_client(base_model="stub/model").result()
    service.create_sampling_client(base_model="stub/model").result()
    assert sorted(stub.paths()[:3]) == sorted(AT_ONCE)
    assert stub.paths()[3:] == ["/create_sampling_session"] * 2


def test_a_first_sample_waits_for_four_answers_one_after_the_other(
    stub: Stub, service: ServiceClient
) -> None:
    """With the round trip that opens the connections, it is there after five."""
    stub.behaviour.config = {"fwdbwd_max_chunk_len": 1024}  # of a server that is asked for its models too
    released = {path: stub.hold(path) for path in (*AT_ONCE, "/get_server_capabilities")}
    sample = service.create_sampling_client(base_model="stub/model").sample(PROMPT, 1, PARAMS)
    for path in AT_ONCE:  # all are there before any is answered
        stub.await_asked(path)
    for path in AT_ONCE:
        released[path].set()
    assert len(sample.result().sequences) == 1
    released["/get_server_capabilities"].set()
    ones = [path for path in stub.paths() if path != "/get_server_capabilities"]
    assert ones[3:] == ["/create_sampling_session", "/asample", "/retrieve_future"]


def test_a_burst_opens_its_connections_before_the_first_sample_is_accepted() -> None:
    """A distant server accepts the first ones late, and the others would have to open theirs only then."""

    class Distant(Stub):
        async def on_asample(self, asked: Asked) -> Any:
            while self.connections < 150:
                await asyncio.sleep(0.001)
            return super().on_asample(asked)

    with StubServer(Distant()) as stub:
        service = ServiceClient(base_url=stub.url, api_key="tml-x")
        client = service.create_sampling_client(base_model="stub/model").result()
        futures = [client.sample(PROMPT, 1, PARAMS) for _ in range(150)]
        for future in futures:
            assert len(future.result(timeout=PATIENCE_S).sequences) == 1
        assert stub.connections < 170


def make_with_late_settings(stub: Stub, service: ServiceClient) -> SamplingClient:
    """Make a client. The server sends its settings when it has got what is asked for at the same time."""
    settings = stub.hold("/client/config")
    client = service.create_sampling_client(base_model="stub/model")
    for path in AT_ONCE:
        stub.await_asked(path)
    settings.set()
    return client.result()


def test_a_session_that_the_key_has_opened_counts_beside_the_token(
    stub: Stub, service: ServiceClient
) -> None:
    stub.behaviour.config = {**FULL, "pjwt_auth_enabled": True}
    made = make_with_late_settings(stub, service)
    assert sorted(stub.paths()[:3]) == sorted(AT_ONCE)
    assert stub.paths()[3:] == ["/auth/token", "/create_sampling_session"]
    assert made.sampling_session_id.startswith("session-0:")
    assert stub.asked("/create_sampling_session")[0].headers["x-api-key"].startswith("eyJ")


def test_what_a_server_of_tokens_refuses_to_the_key_is_asked_again_with_the_token(
    stub: Stub, service: ServiceClient
) -> None:
    stub.behaviour.config = {**FULL, "pjwt_auth_enabled": True}
    for path in AT_ONCE[1:]:
        stub.script(path, Answer(401, {"detail": "no token"}))
    make_with_late_settings(stub, service)
    for path in AT_ONCE[1:]:
        key, token = (asked.headers["x-api-key"] for asked in stub.asked(path))
        assert (key, token[:3]) == ("tml-x", "eyJ")
    assert len(stub.asked("/auth/token")) == 1


def test_a_session_that_was_opened_beside_settings_that_failed_is_used_by_the_next_try(
    stub: Stub, service: ServiceClient
) -> None:
    stub.script("/client/config", Answer(400, {"detail": "not today"}))
    opened = stub.hold("/create_session")
    with pytest.raises(TinkerError, match="not today"):
        service.create_sampling_client(base_model="stub/model").result()
    opened.set()
    client = service.create_sampling_client(base_model="stub/model").result()
    assert len(stub.asked("/create_session")) == 1
    assert client.sampling_session_id.startswith("session-0:")


def test_a_credential_command_comes_after_the_settings(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "echo tml-printed")
    settings = stub.hold("/client/config")
    with ServiceClient(base_url=stub.url) as service:
        client = service.create_sampling_client(base_model="stub/model")
        stub.await_asked("/client/config")
        assert stub.paths() == ["/client/config"]
        settings.set()
        client.result()
    assert stub.paths()[:3] == list(AT_ONCE)


@pytest.mark.parametrize(
    "path", ["/client/config", "/client/dynamic_config", "/create_session", "/create_model"]
)
def test_an_account_that_cannot_pay_hears_of_it_at_once(
    stub: Stub, service: ServiceClient, path: str
) -> None:
    stub.script(path, Answer(402, {"detail": "no card"}))
    with pytest.raises(BillingError, match="no card"):
        service.create_lora_training_client("stub/model").result()
    # The next call is sent again, and succeeds.
    assert service.create_lora_training_client("stub/model").result().model_id.startswith("session-")


def calls(service: ServiceClient, deadline: float | None) -> list[Callable[[], object]]:
    return [
        lambda: service.create_lora_training_client("m", deadline=deadline).result(),
        lambda: service.create_training_client_from_state("tinker://r/weights/a", deadline=deadline).result(),
    ]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("of", ["client", "call"])
def test_an_unreachable_server_fails_within_the_deadline(of: str, number: int) -> None:
    with socket.socket() as silent:  # accepts connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        clients, own = (0.3, None) if of == "client" else (None, 0.3)
        service = ServiceClient(base_url=address, api_key="tml-x", deadline=clients)
        began = time.monotonic()
        with pytest.raises(APITimeoutError):
            calls(service, own)[number]()
        assert time.monotonic() - began < 30  # others wait for a minute, or five
        service.close().result(120)


def test_messages_of_the_server_are_logged(
    stub: Stub, service: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"session_id": "s-1", "info_message": "new", "warning_message": "old", "error_message": "bad"}
    stub.script("/create_session", Answer(body=body))
    with caplog.at_level(logging.INFO, "tinker_sync.session"):
        service.create_sampling_client(base_model="stub/model").result()
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert found == [("INFO", "new"), ("WARNING", "old"), ("ERROR", "bad")]


# ---------------------------------------------------------------------------------------------- billing


def test_a_402_in_the_midst_of_work_is_waited_out(stub: Stub, quick: ServiceClient) -> None:
    """Blocking calls, training calls, samples and polls wait while the server answers 402."""
    service = quick
    trainer = service.create_lora_training_client("stub/model").result()
    blocked = Answer(402, {"detail": "no card"})
    for path in (
        "/get_info",
        "/optim_step",
        "/retrieve_future",
        "/create_sampling_session",
        "/get_server_capabilities",
    ):
        stub.script(path, blocked, blocked)
    assert trainer.get_info().model_id == trainer.model_id
    assert trainer.optim_step(types.AdamParams()).result(120).metrics == {"step:max": 1.0}
    sampler = service.create_sampling_client(base_model="stub/model").result()
    assert service.get_server_capabilities().supported_models
    stub.script("/asample", blocked)
    assert sampler.sample(PROMPT, 1, PARAMS).result(120).sequences[0].tokens == [6, 7]


def test_after_the_pause_a_402_leaves_the_rest_of_the_deadline() -> None:
    clock = FakeClock()
    with StubServer(config=FULL) as stub:
        runtime = ClientRuntime(Settings.resolve(base_url=stub.url, api_key="tml-x", environ={}), clock=clock)  # type: ignore[attr-defined]
        runtime.server.start()
        left: list[float | None] = []

        def answer(call: Call, _read: object) -> Reply:
            left.append(call.deadline_s)
            clock.advance(3.0)
            raise BillingError("no card", status_code=402)

        runtime.connection.caller.read = answer  # type: ignore[assignment, method-assign]
        with pytest.raises(BillingError):
            runtime.server.call("get_server_capabilities", deadline_at=clock.now() + 20.0)
        runtime.close().result(120)
    # Each try takes 3 s and each pause 5 s.
    assert left == pytest.approx([20.0, 12.0, 4.0])


# ---------------------------------------------------------------------------------------------- heartbeats


def test_a_session_is_kept_alive(stub: Stub, service: ServiceClient, clock: FakeClock) -> None:
    watcher = on_clock(service, clock)
    service.create_sampling_client(base_model="stub/model").result()
    beat(stub, clock, *[Answer(usual=True)] * 3)
    bodies = {asked.body for asked in stub.asked("/session_heartbeat")}
    assert bodies == {b'{"session_id":"session-0","type":"session_heartbeat"}'}
    service.close("errored").result(120)
    assert watcher.events == [
        SessionStarted(session_id="session-0"),
        ModelNamed(model="session-0:sample:0", base_model="stub/model"),
        SessionEnded(session_id="session-0", status="errored"),
    ]


def test_the_loss_of_a_session_reaches_the_callers(
    stub: Stub, service: ServiceClient, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    watcher = on_clock(service, clock)
    trainer = service.create_lora_training_client("stub/model").result()
    sampler = service.create_sampling_client(base_model="stub/model").result()
    beat(stub, clock, Answer(410, {"detail": "session expired"}))
    until(lambda: watcher.of(SessionLost))
    asked = len(stub.log)
    new_calls: list[Callable[[], Any]] = [
        lambda: trainer.optim_step(types.AdamParams()),
        lambda: trainer.forward_backward([DATUM], "cross_entropy"),
        lambda: sampler.sample(PROMPT, 1, PARAMS),
        lambda: service.create_lora_training_client("stub/model").result(),
        lambda: service.create_sampling_client(base_model="stub/model").result(),
        trainer.save_weights_and_get_sampling_client,
    ]
    for call in new_calls:
        with pytest.raises(SessionLostError, match="session-0: 410") as caught:
            call()
        assert "Make a new ServiceClient" in str(caught.value)
        assert caught.value.session_id == "session-0"
    assert len(stub.log) == asked  # the client sends no request that cannot succeed
    assert "the server no longer keeps session session-0" in caplog.text
    # Calls that need no session go on.
    assert service.get_server_capabilities().supported_models
    service.close().result(120)
    assert stub.asked("/sessions/session-0/finish") == []


def test_a_failed_call_that_hints_at_the_loss_brings_the_heartbeat_forward(
    stub: Stub, service: ServiceClient, clock: FakeClock
) -> None:
    watcher = on_clock(service, clock)
    trainer = service.create_lora_training_client("stub/model").result()
    clock.await_waiters()
    clock.advance(5.0)  # half way to the next one
    stub.script("/session_heartbeat", Answer(410))
    stub.script("/optim_step", Answer(404, {"detail": "no such model"}))
    with pytest.raises(TinkerError, match="no such model"):
        trainer.optim_step(types.AdamParams()).result(120)
    until(lambda: watcher.of(SessionLost))
    with pytest.raises(SessionLostError):
        trainer.optim_step(types.AdamParams())


def test_a_session_that_comes_back_is_used_again(
    stub: Stub, service: ServiceClient, clock: FakeClock
) -> None:
    watcher = on_clock(service, clock)
    sampler = service.create_sampling_client(base_model="stub/model").result()
    beat(stub, clock, Answer(usual=True), Answer(404), Answer(404))
    until(lambda: watcher.of(SessionLost))
    with pytest.raises(SessionLostError, match="404"):
        sampler.sample(PROMPT, 1, PARAMS)
    beat(stub, clock, Answer(usual=True))

    def accepted() -> bool:
        with suppress(SessionLostError):
            return bool(sampler.sample(PROMPT, 1, PARAMS))
        return False

    until(accepted)


def test_a_key_that_is_no_longer_accepted_is_reported(
    stub: Stub, service: ServiceClient, clock: FakeClock
) -> None:
    watcher = on_clock(service, clock)
    service.create_sampling_client(base_model="stub/model").result()
    beat(stub, clock, Answer(401, {"detail": "revoked"}), Answer(401, {"detail": "revoked"}))
    until(lambda: watcher.of(SessionLost))
    with pytest.raises(SessionLostError, match="401 Unauthorized: revoked") as caught:
        service.create_sampling_client(base_model="stub/model").result()
    assert isinstance(caught.value.__cause__, AuthenticationError)


# ---------------------------------------------------------------------------------------------- renewals


def test_settings_that_change_are_fetched_between_heartbeats(
    stub: Stub, service: ServiceClient, clock: FakeClock
) -> None:
    stub.behaviour.dynamic_config = {"refresh_interval_sec": 30}
    on_clock(service, clock)
    service.create_sampling_client(base_model="stub/model").result()
    runtime = service.holder
    assert not runtime.server.dynamic.sample_cancel_enabled
    stub.behaviour.dynamic_config = {"refresh_interval_sec": 30, "sample_cancel_enabled": True}
    beat(stub, clock, *[Answer(usual=True)] * 2)
    assert len(stub.asked("/client/dynamic_config")) == 1
    beat(stub, clock, Answer(usual=True))
    until(lambda: runtime.server.dynamic.sample_cancel_enabled)
    # A failed renewal, also with 402, changes no setting and delays no heartbeat.
    stub.script("/client/dynamic_config", Answer(402), Answer(500))
    beat(stub, clock, *[Answer(usual=True)] * 6)
    assert runtime.server.dynamic.sample_cancel_enabled
    assert len(stub.asked("/session_heartbeat")) == 9


def test_a_token_is_renewed_between_heartbeats(stub: Stub, clock: FakeClock) -> None:
    stub.behaviour.config = {**FULL, "pjwt_auth_enabled": True}
    tokens = iter(range(100))
    stub.script("/auth/token", *[lambda _: Answer(body={"jwt": f"token-{next(tokens)}"})] * 50)
    service = ServiceClient(base_url=stub.url, api_key="tml-x")
    on_clock(service, clock)
    service.create_sampling_client(base_model="stub/model").result()
    assert len(stub.asked("/auth/token")) == 1
    # The client assumes that an opaque token is valid for a minute.
    for _ in range(6):
        beat(stub, clock, Answer(usual=True))
    stub.await_asked("/auth/token", 2)
    until(lambda: service.holder.connection.keys.credential() == "token-1")
    service.close().result(120)


def test_a_slow_renewal_holds_up_no_heartbeat(stub: Stub, service: ServiceClient, clock: FakeClock) -> None:
    stub.behaviour.dynamic_config = {"refresh_interval_sec": 10}
    on_clock(service, clock)
    service.create_sampling_client(base_model="stub/model").result()
    release = stub.hold("/client/dynamic_config")
    beat(stub, clock, *[Answer(usual=True)] * 4)
    stub.await_asked("/client/dynamic_config", 2)  # the client has requested it, and has no answer yet
    release.set()


def test_a_sample_fails_with_the_error_of_a_token_that_cannot_be_renewed(
    stub: Stub, clock: FakeClock
) -> None:
    stub.behaviour.config = {**FULL, "pjwt_auth_enabled": True}
    stub.script(
        "/auth/token", Answer(body={"jwt": "token-0"}), *[Answer(403, body={"detail": "no longer"})] * 50
    )
    with client_on(stub, clock) as service:
        sampler = service.create_sampling_client(base_model="stub/model").result()
        clock.advance(1e7)  # longer than any token lasts
        with pytest.raises(CredentialError, match="no longer"):
            sampler.sample(PROMPT, 1, PARAMS).result(120)


@pytest.mark.parametrize("name", ["baseurl", "apikey", "time_out", "Project_id"])
def test_a_mistyped_parameter_is_told_from_one_of_another_version(name: str) -> None:
    with pytest.raises(TypeError, match=f"no parameter '{name}'; did you mean"):
        ServiceClient(**{name: "local"})
    with pytest.warns(FutureWarning, match="http2"):
        ServiceClient(base_url="http://127.0.0.1:9", api_key="tml-x", http2=True)


@pytest.mark.parametrize("status", [200, 404])
def test_another_web_server_is_not_taken_for_one_of_another_version(status: int) -> None:
    page = answer(b"<title>Welcome</title>", status=status, headers={"Content-Type": "text/html"})
    with (
        AnsweringServer(lambda _: page) as server,
        quick_service(base_url=server.url, api_key="tml-x") as service,
    ):
        with pytest.raises((APIResponseValidationError, NotFoundError), match="Welcome") as caught:
            service.get_server_capabilities()
        assert "answers with text/html, as no Tinker server does: check the base URL" in str(caught.value)
        asked = [seen for seen in server.seen if seen.target.endswith("/client/config")]
        assert len(asked) <= 3  # a proxy on the way may have answered


def test_an_address_with_the_path_of_calls_is_kept_and_warned_of(stub: Stub) -> None:
    with (
        pytest.warns(UserWarning, match="/api/v1"),
        ServiceClient(base_url=f"{stub.url}/api/v1/", api_key="tml-x") as service,
    ):
        assert service.holder.settings.base_url == f"{stub.url}/api/v1"


# ----- Clocks that jump, machines that sleep and processes that are stopped cost no call its answer
DAY_S = 86_400.0
STOPPED_S = float(os.environ.get("STOPPED_S", "0"))
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
    set_clock(service, clock)
    try:
        yield service
    finally:
        service.close().result(120)


@pytest.mark.parametrize("shift_s", [DAY_S, -DAY_S], ids=["forward", "back"])
def test_a_date_that_jumps_by_a_day_in_the_midst_of_calls(stub: Stub, shift_s: float) -> None:
    clock, release = JumpingClock(), threading.Event()
    with client_on(stub, clock) as service:
        lost = Listener(SessionLost)
        service.holder.connection.events.listen(lost)
        sampler = service.create_sampling_client(base_model="stub/model").result(120)
        trainer = service.create_lora_training_client("stub/model").result(120)
        stub.script("/retrieve_future", *[Answer(gate=release, usual=True)] * 2)
        before = [sampler.sample(PROMPT, 1, PARAMS, deadline=120), trainer.optim_step(STEP, deadline=120)]
        stub.await_asked("/retrieve_future", 1 + 2)  # the first is that of the model
        clock.shift_s = shift_s
        stub.script("/asample", Answer(429, {}, {"retry-after": "0.01"}))
        after = [sampler.sample(PROMPT, 1, PARAMS, deadline=120), trainer.optim_step(STEP, deadline=120)]
        beat_now(service)
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
        service.holder.connection.events.listen(late)
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
