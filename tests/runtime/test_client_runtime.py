"""The shared parts of a client are made once, within a time limit, and can be closed from any thread."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.clock import FakeClock
from support.crowd import until
from support.forks import in_child
from support.isolation import our_threads
from support.raising import raising
from support.tinker_stub import Answer, Stub, StubServer

from tinker_sync._base.events import CallFailed
from tinker_sync.config import Settings
from tinker_sync.errors import APIStatusError, APITimeoutError, ClientClosedError, TinkerError
from tinker_sync.runtime.client_runtime import ClientRuntime
from tinker_sync.runtime.session import Session
from tinker_sync.transport.call import Call, Reply

FULL = {"custom_loss_server_side": False}


@pytest.fixture
def stub() -> Iterator[Stub]:
    with StubServer(config=FULL) as stub:
        yield stub


def runtime_of(stub: Stub, *, clock: Any = None, **settings: Any) -> ClientRuntime:
    found = Settings.resolve(base_url=stub.url, api_key="tml-x", environ={}, **settings)
    return ClientRuntime(found, session=Session(), **({"clock": clock} if clock else {}))


class Watcher:
    def __init__(self, failure: Exception | None = None) -> None:
        self.failures: list[str] = []
        self._failure = failure

    def observe(self, event: object) -> None:
        if isinstance(event, CallFailed):
            self.failures.append(type(event.error).__name__)
        if self._failure is not None:
            raise self._failure


# ---------------------------------------------------------------------------------------------- deadlines
@pytest.mark.parametrize(
    ("own", "clients", "usual", "expected"),
    [
        (5.0, 7.0, 9.0, 5.0),
        (9.0, 7.0, 5.0, 9.0),
        (None, 7.0, 9.0, 7.0),
        (None, None, 9.0, 9.0),
        (None, None, None, None),
    ],
)
def test_the_deadline_of_the_call_comes_before_that_of_the_client(
    stub: Stub,
    monkeypatch: pytest.MonkeyPatch,
    own: float | None,
    clients: float | None,
    usual: float | None,
    expected: float | None,
) -> None:
    runtime = runtime_of(stub, clock=FakeClock(automatic=False), deadline_s=clients)
    runtime.server.start()
    asked: list[Call] = []

    def answer(call: Call, read: Callable[[Reply], Any]) -> Any:
        asked.append(call)
        return read(Reply(200, {}, b'{"supported_models": []}'))

    monkeypatch.setattr(runtime.connection.caller, "read", answer)
    now, usual_s = runtime.clock.now(), math.inf if usual is None else usual
    deadline_at = math.inf if own is None else now + own
    runtime.server.call("get_server_capabilities", deadline_at=deadline_at, usual_s=usual_s)
    assert [call.deadline_s for call in asked] == [expected]
    assert runtime.server.give_up_at(own, usual_s) == (math.inf if expected is None else now + expected)
    runtime.close().result(120)


def test_a_start_under_way_is_waited_for_within_the_deadline(stub: Stub) -> None:
    release = threading.Event()
    stub.script("/client/config", Answer(gate=release, usual=True))
    runtime = runtime_of(stub)
    starting = threading.Thread(target=runtime.server.start)
    starting.start()
    stub.await_asked("/client/config")
    with pytest.raises(APITimeoutError, match="another thread was still setting it up"):
        runtime.server.start(runtime.clock.now() + 0.05)
    release.set()
    starting.join(120)
    runtime.server.start()
    assert len(stub.asked("/client/config")) == 1
    runtime.close().result(120)


# ---------------------------------------------------------------------------------------------- watching
def test_failures_are_reported_once_where_they_reach_the_user(stub: Stub) -> None:
    runtime = runtime_of(stub)
    watcher = Watcher()
    runtime.lifecycle.add_observer(watcher)
    stub.script("/client/config", Answer(403))
    with pytest.raises(TinkerError):
        runtime.server.start()
    stub.script("/get_server_capabilities", Answer(400, {"detail": "no"}))
    with pytest.raises(TinkerError):
        runtime.server.call("get_server_capabilities")
    future = runtime.lifecycle.make_future()
    future.fail(APIStatusError.from_reply(404, {}, b""))
    runtime.lifecycle.make_future().cancel()
    runtime.lifecycle.make_future().resolve(1)
    pending = runtime.lifecycle.make_future()
    runtime.close().result(120)
    assert isinstance(pending.exception(0), ClientClosedError)
    # Failures because of the close are not reported.
    assert watcher.failures == ["PermissionDeniedError", "BadRequestError", "NotFoundError"]


def test_an_observer_that_raises_harms_nothing(stub: Stub) -> None:
    runtime = runtime_of(stub)
    runtime.lifecycle.add_observer(Watcher(KeyError("a")))
    runtime.server.open_session()
    runtime.lifecycle.make_future().fail(KeyError("b"))
    runtime.close().result(120)
    assert len(stub.asked("/sessions/session-0/finish")) == 1


# ---------------------------------------------------------------------------------------------- the end


def test_a_client_may_be_dropped_while_any_lock_is_held(stub: Stub) -> None:
    """Freeing a client takes no lock, because the garbage collector may run while a thread holds any lock."""
    runtime = runtime_of(stub)
    runtime.server.open_session()
    locks = [
        runtime.reactor._lock,
        runtime.pools.fetch._membership,
    ]
    held = weakref.ref(runtime)
    for lock in locks:
        lock.acquire()
    try:
        del runtime
        gc.collect()
        assert held() is None
    finally:
        for lock in locks:
            lock.release()
    until(lambda: our_threads() == set())


def test_closing_works_when_there_are_no_more_threads(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no thread can start, as at the end of a process in Python 3.12, the calling thread closes."""
    runtime = runtime_of(stub)
    runtime.server.open_session()

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
        assert runtime.close("success").done()
    assert len(stub.asked("/sessions/session-0/finish")) == 1


def test_a_child_forked_while_the_parent_closes_need_not_wait(stub: Stub) -> None:
    release = threading.Event()
    stub.script("/sessions/session-0/finish", Answer(gate=release, usual=True))
    runtime = runtime_of(stub)
    runtime.server.open_session()
    closing = runtime.close()
    stub.await_asked("/sessions/session-0/finish")

    def work() -> None:
        assert runtime.close().done()  # a new future of the child

    in_child(work)
    release.set()
    closing.result(120)
