"""The shared parts of a client are made once, within a time limit, and can be closed from any thread."""

from __future__ import annotations

import gc
import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.clock import FakeClock
from support.crowd import until
from support.forks import in_child
from support.isolation import our_threads
from support.raising import raising
from support.sends import HandWorkers
from support.tinker_stub import Answer, Stub

from tinker_sync._base.events import CallFailed
from tinker_sync._base.naming import named
from tinker_sync._base.policy import BLOCKED_PAUSE_S
from tinker_sync.config import Settings
from tinker_sync.errors import APIStatusError, APITimeoutError, ClientClosedError, TinkerError
from tinker_sync.runtime import client
from tinker_sync.runtime.client import ClientRuntime, PendingChanges, finish_all
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.lazy import HeldCalls
from tinker_sync.runtime.server import SHORTEST_REFRESH_S, BillingPause, Refresher
from tinker_sync.runtime.session import Session
from tinker_sync.transport.call import Call, Reply
from tinker_sync.types.service import ClientDynamicConfigResponse


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
    with pytest.raises(APITimeoutError, match="setting it up"):
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
    runtime.connection.events.listen(watcher)
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
    runtime.connection.events.listen(Watcher(KeyError("a")))
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


# --------------- Renewals begin when they are due, never overlap, and change nothing when they fail
class Bench:
    """A `Refresher` (the renewal of the token and the server's settings) under the control of a test.

    Its clock and keys are doubles, and its answers are scripted. Its jobs wait in `jobs` until the test runs
    them, in place of a worker.
    """

    def __init__(self) -> None:
        self.clock = FakeClock(automatic=False)
        self.jobs: list[Callable[[], object]] = []
        self.token_in_s: float | None = None
        self.renewed = 0
        self.answers: list[ClientDynamicConfigResponse | Exception] = []
        self.refresher = Refresher(self, self.fetch, self.jobs.append, self.clock)

    def step(self) -> None:
        self.renewed += 1

    def next_refresh_in_s(self) -> float | None:
        return self.token_in_s

    def fetch(self) -> ClientDynamicConfigResponse:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def know(self, interval_s: float) -> None:
        self.refresher.know(ClientDynamicConfigResponse(refresh_interval_sec=interval_s))

    def beat(self) -> int:
        """Begin the renewals that are due, as each heartbeat does. Return the number of new jobs."""
        before = len(self.jobs)
        self.refresher.begin_if_due()
        return len(self.jobs) - before


def settings(batch: int) -> ClientDynamicConfigResponse:
    return ClientDynamicConfigResponse(refresh_interval_sec=60, sample_cancel_max_batch_size=batch)


def test_refreshes_have_a_shortest_interval() -> None:
    bench = Bench()
    bench.know(0)
    bench.clock.advance(SHORTEST_REFRESH_S - 0.5)
    assert bench.beat() == 0
    bench.clock.advance(1)
    assert bench.beat() == 1


def test_a_bug_in_a_refresh_does_not_stop_later_ones() -> None:
    bench = Bench()
    bench.refresher.know(settings(7))
    bench.clock.advance(60)
    bench.answers = [KeyError("a"), settings(8)]
    assert bench.beat() == 1
    with pytest.raises(KeyError):
        bench.jobs.pop()()
    assert bench.beat() == 1
    bench.jobs.pop()()
    assert bench.refresher.settings == settings(8)


def test_a_closed_pool_is_no_reason_to_raise() -> None:
    bench = Bench()
    bench.token_in_s = 0.0
    refresher = Refresher(bench, bench.fetch, raising(RuntimeError("the workers are closed")), bench.clock)
    refresher.begin_if_due()
    refresher.begin_if_due()


# ---- After a 402, a client retries for the time of the server's setting, and logs a line once a minute
def test_it_pauses_for_as_long_as_the_server_allows(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    billing = BillingPause(20, clock=clock)
    paused = []
    with caplog.at_level(logging.WARNING, "tinker_sync.billing"):
        for _ in range(6):
            paused.append(billing.may_pause())
            clock.advance(BLOCKED_PAUSE_S)
    assert paused == [True, True, True, True, False, False]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "the account is blocked; waiting up to 20 s for that to change"),
        ("ERROR", "the account is still blocked after 20 s; not waiting any longer"),
        ("ERROR", "the account is still blocked after 25 s; not waiting any longer"),
    ]


def test_after_five_quiet_minutes_it_is_another_incident() -> None:
    clock = FakeClock()
    billing = BillingPause(10, clock=clock)
    assert billing.may_pause()
    clock.advance(20)
    assert not billing.may_pause()
    clock.advance(301)
    assert billing.may_pause()


# ----------- The wait for pending calls that change something, without a client and on a fake clock
class Clock:
    """A clock that returns the given times, one at each call, and then the last one again and again."""

    def __init__(self, *moments: float) -> None:
        self._moments = list(moments)

    def __call__(self) -> float:
        return self._moments.pop(0) if len(self._moments) > 1 else self._moments[0]


def test_a_line_after_two_seconds_and_one_warning_at_the_limit(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = PendingChanges(Clock(0.0, 2.5, 60.0))
    futures: list[APIFuture[Any]] = [APIFuture(when_done=(lambda _: None,)) for _ in range(3)]
    with named("TrainingClient.save_state"):
        changes.add(futures[0])
    for future in futures[1:]:
        changes.add(future, "optim_step")
    waiting = threading.Thread(target=changes.wait, args=(60.0,))
    with caplog.at_level(logging.WARNING):
        waiting.start()
        changes._news.set()
        while waiting.is_alive():
            changes._news.set()
    assert "waiting for save_state, 2 optim_step, 60 s at most" in capsys.readouterr().err
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages[0].endswith("may be lost: save_state, 2 optim_step")


def test_calls_may_end_while_another_thread_looks() -> None:
    changes = PendingChanges()
    keep = APIFuture[Any]()
    changes.add(keep, "save_state")
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            future = APIFuture[Any]()
            changes.add(future, "optim_step")
            future.resolve(None)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        assert all(changes.under_way() for _ in range(5000))
    finally:
        stop.set()
        thread.join(120)
    keep.resolve(None)
    assert not changes.under_way()


# ----------- Calls on a client that is not ready: their order, the failure of the client, and forks
FIRST, SECOND = TinkerError("first"), TinkerError("second")


class HeldCall:
    """A double of a call that logs its start and keeps its failure."""

    def __init__(self, log: list[str], name: str, then: Callable[[], object] = lambda: None) -> None:
        self._log, self._name, self._then = log, name, then
        self.failure: Exception | None = None

    def start(self) -> None:
        self._log.append(self._name)
        self._then()

    def fail(self, failure: Exception) -> None:
        self.failure = failure


@pytest.fixture
def workers() -> HandWorkers:
    return HandWorkers()


@pytest.fixture
def calls(workers: HandWorkers) -> HeldCalls:
    return HeldCalls(workers)  # type: ignore[arg-type]  # a double


@pytest.fixture
def log() -> list[str]:
    return []


def test_a_call_that_is_made_while_others_start_waits_behind_them(
    calls: HeldCalls, workers: HandWorkers, log: list[str]
) -> None:
    calls.hold(HeldCall(log, "a", then=lambda: calls.hold(HeldCall(log, "late"))))
    calls.hold(HeldCall(log, "b"))
    calls.release()
    assert log == ["a", "b", "late"]
    assert calls.open
    calls.hold(HeldCall(log, "c"))  # as of a thread that has looked too early
    assert not calls.open
    workers.do_all()
    assert (log[-1], calls.open) == ("c", True)


def test_a_call_that_is_added_as_the_last_one_starts_is_started_before_later_ones(
    calls: HeldCalls, workers: HandWorkers, log: list[str]
) -> None:
    seen: list[bool] = []

    class Waiting(deque[HeldCall]):
        def popleft(self) -> HeldCall:
            if not self and not seen:  # the thread that releases takes them for the last time
                calls.hold(HeldCall(log, "late"))
                seen.append(calls.open)
                raise IndexError
            return super().popleft()

    calls._waiting = Waiting()  # type: ignore[assignment]
    calls.hold(HeldCall(log, "first"))
    calls.release()
    assert (log, seen, calls.open, workers.jobs) == (["first", "late"], [False], True, [])


# ------------------------------- What `test_life_exit.py` cannot bring about in a process that ends
class Member:
    """A double of an open client, whose session the end of the process finishes.

    A `silent` one never gets an answer from its server.
    """

    def __init__(self, *, silent: bool = False, failure: BaseException | None = None) -> None:
        self.silent = silent
        self.failure = failure
        self.finished: list[tuple[str, str | None, float, bool]] = []

    def wait_for_changes(self, limit_s: float) -> None:
        self.waited_s = limit_s

    def finish(
        self, status: str, detail: str | None, limit_s: float, *, quiet: bool = False
    ) -> threading.Event | None:
        self.finished.append((status, detail, limit_s, quiet))
        if self.failure is not None:
            raise self.failure
        done = threading.Event()
        if not self.silent:
            done.set()
        return done


@pytest.fixture
def nothing_else_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_open", client._Open())


@pytest.mark.usefixtures("nothing_else_open")
def test_the_time_for_changes_is_for_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 0.0, 45.0, 70.0])  # the members take 45 s and 25 s
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: next(moments, 70.0)))
    members = [Member() for _ in range(3)]
    for member in members:
        client._open.add(member)
    finish_all()
    assert sorted(member.waited_s for member in members) == [0.0, 15.0, 60.0]


@pytest.mark.usefixtures("nothing_else_open")
@pytest.mark.parametrize("failure", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_nothing_is_raised_or_printed(failure: BaseException, capfd: pytest.CaptureFixture[str]) -> None:
    member = Member(failure=failure)
    client._open.add(member)
    finish_all()
    assert len(member.finished) == 1
    assert capfd.readouterr() == ("", "")
