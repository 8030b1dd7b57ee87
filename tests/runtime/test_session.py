"""Sessions without clients: their owner, the numbers that they draw, and the request that finishes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.clock import FakeClock
from support.crowd import until
from support.forks import in_child
from support.tinker_stub import Answer, Stub, StubServer

from tinker_sync._base.events import SessionEnded
from tinker_sync.config import Settings
from tinker_sync.errors import APIStatusError, SessionLostError, TinkerError
from tinker_sync.runtime.client_runtime import ClientRuntime
from tinker_sync.runtime.session import Session

FULL = {"custom_loss_server_side": False}
FINISH = "/sessions/session-0/finish"


@pytest.fixture
def stub() -> Iterator[Stub]:
    with StubServer(config=FULL) as stub:
        yield stub


class Bench:
    """A runtime with one session, on a fake clock, and the events that the runtime reports."""

    def __init__(self, stub: Stub, **of_session: Any) -> None:
        self.clock = FakeClock(automatic=False)
        self.session = Session(**of_session)
        settings = Settings.resolve(base_url=stub.url, api_key="tml-x", tags=["a", "b"], environ={})
        self.runtime = ClientRuntime(settings, session=self.session, clock=self.clock)
        self.events: list[object] = []
        self.runtime.lifecycle.add_observer(self)

    def observe(self, event: object) -> None:
        self.events.append(event)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.runtime.close("success").result(120)


def numbers(session: Session) -> list[list[int]]:
    draws = (session.next_model_seq_id, session.next_sampling_session_seq_id, session.next_custom_loss_seq_id)
    return [[draw() for _ in range(3)] for draw in draws]


def test_what_a_session_is_made_with(stub: Stub) -> None:
    with Bench(stub, user_metadata={"a": "b"}, project_id="p-1", display_name="mine") as bench:
        assert bench.runtime.server.known_session_id is None
        assert bench.runtime.server.open_session() == bench.runtime.server.open_session() == "session-0"
        assert bench.runtime.server.known_session_id == "session-0"
    (asked,) = stub.asked("/create_session")
    assert asked.json() == {
        "tags": ["a", "b"],
        "user_metadata": {"a": "b"},
        "sdk_version": "0.38.0",
        "project_id": "p-1",
        "display_name": "mine",
        "type": "create_session",
    }


def test_a_joined_session_is_neither_made_nor_finished(stub: Stub) -> None:
    with Bench(stub, joined="session-0") as bench:
        assert bench.session.needs_heartbeat
        assert bench.runtime.server.open_session() == "session-0"
        assert not bench.session.needs_heartbeat
        (models, *_) = numbers(bench.session)
        assert models[0] >= 10**6
        assert models == list(range(models[0], models[0] + 3))
    assert stub.asked("/create_session") == stub.asked(FINISH) == []
    assert bench.events == []


def test_a_child_takes_the_facts_from_its_parent_and_asks_for_later_ones_itself(stub: Stub) -> None:
    stub.behaviour.dynamic_config = {"refresh_interval_sec": 60}
    with Bench(stub) as bench:
        bench.runtime.server.ready()
        release = stub.hold("/client/dynamic_config")
        bench.clock.advance(60.0)
        bench.runtime.server.refresh_if_due()
        stub.await_asked("/client/dynamic_config", 2)  # a worker of the parent waits for the answer

        def work() -> None:
            assert bench.runtime.server.dynamic.refresh_interval_sec == 60
            bench.runtime.server.ready()
            bench.clock.advance(60.0)
            bench.runtime.server.refresh_if_due()
            until(lambda: bench.runtime.server.dynamic.refresh_interval_sec == 61)
            bench.runtime.close("success").result(120)

        stub.behaviour.dynamic_config = {"refresh_interval_sec": 61}
        in_child(work)
        release.set()
    assert len(stub.asked("/client/config")) == 1


def test_a_child_that_had_no_session_makes_its_own(stub: Stub) -> None:
    with Bench(stub) as bench:

        def work() -> None:
            assert bench.runtime.server.open_session() == "session-0"
            assert numbers(bench.session)[0] == [0, 1, 2]
            bench.runtime.close("success").result(120)

        in_child(work)
    assert len(stub.asked(FINISH)) == 1


def test_a_lost_session_is_refused_with_an_error_of_ones_own(stub: Stub) -> None:
    with Bench(stub) as bench:
        bench.runtime.server.open_session()
        bench.session.on_lost(APIStatusError.from_reply(410, {}, b'{"detail": "too late"}'))
        caught = []
        for _ in range(2):
            with pytest.raises(SessionLostError, match="410 Gone: too late") as error:
                bench.session.refuse_lost()
            caught.append(error.value)
        assert caught[0] is not caught[1]
        bench.session.on_found()
        bench.session.refuse_lost()


@pytest.mark.parametrize(
    ("error", "asks"), [(404, True), (401, True), (410, True), (400, False), (500, False), (None, False)]
)
def test_which_failures_hint_at_a_loss(stub: Stub, error: int | None, asks: bool) -> None:
    failure = TinkerError("m") if error is None else APIStatusError.from_reply(error, {}, b"")
    with Bench(stub) as bench:
        bench.session.beat_if_suspicious(failure)  # without a session there is nothing to lose
        bench.runtime.server.open_session()
        bench.clock.await_waiters()
        bench.clock.advance(5.0)
        bench.session.beat_if_suspicious(failure)
        if asks:
            stub.await_asked("/session_heartbeat")
        bench.clock.await_waiters()
    assert len(stub.asked("/session_heartbeat")) == asks


def test_an_old_server_is_not_asked_to_finish(stub: Stub) -> None:
    stub.behaviour.config = None
    with Bench(stub) as bench:
        bench.runtime.server.open_session()
    assert stub.asked(FINISH) == []
    assert bench.events[-1] == SessionEnded(session_id="session-0", status="success")


def test_a_session_whose_id_fits_no_address_ends(stub: Stub, caplog: pytest.LogCaptureFixture) -> None:
    """The thread of the heartbeats died with a traceback, which would fail this test."""
    stub.script("/create_session", Answer(body={"session_id": ".."}))
    with Bench(stub) as bench:
        bench.runtime.server.open_session()
    assert bench.events[-1] == SessionEnded(session_id="..", status="success")
    assert "session .. is over: '..' cannot be part of an address" in caplog.text


def test_an_open_that_fails_halfway_is_taken_up_again(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that is open at the server, but whose heartbeats could not start, is used again.

    The next use starts the heartbeats, and opens no second session.
    """
    with Bench(stub) as bench:
        with monkeypatch.context() as patch:
            patch.setattr("tinker_sync.runtime.heartbeat.Heartbeat.start", lambda _: _no_thread())
            with pytest.raises(TinkerError, match="can't start"):
                bench.runtime.server.open_session()
        assert bench.runtime.server.open_session() == "session-0"
        assert not bench.session.needs_heartbeat
        until(lambda: bench.events)
    assert len(stub.asked("/create_session")) == 1


def _no_thread() -> None:
    raise TinkerError("no thread for this call: can't start new thread")
