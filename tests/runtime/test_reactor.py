"""The reactor over real sockets: plain and TLS, answers in pieces, broken connections, timers and limits."""

from __future__ import annotations

import gc
import heapq
import math
import os
import queue
import select
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
from support.authority import Authority
from support.clock import PATIENCE_S, FakeClock, QuickClock
from support.crowd import until
from support.forks import in_child
from support.raising import room_for
from support.sends import HandWorkers, NoWorkers
from support.servers import AnsweringServer, Peer, ProxyServer, ScriptedServer, answer, chunked
from support.wires import http_for, post

from tinker_sync.config import Timeout
from tinker_sync.runtime.reactor import STALE_EXPIRIES, EpollReadiness, Reactor, Readiness, SelectorReadiness
from tinker_sync.runtime.workers import Workers
from tinker_sync.transport.call import OPEN_AHEAD, Call, Reply, SendFailed
from tinker_sync.transport.http import Http

Outcome = Reply | SendFailed
WAITS = 2000


class Held:
    """A reactor with its transport and workers, and a queue of the outcomes of its requests."""

    def __init__(self, url: str, *, max_open: int | None = None, threads: int = 4, **options: Any) -> None:
        self.http: Http = http_for(url, **options)
        self.workers = Workers("fetch", threads)
        self.reactor = Reactor(self.http, self.workers, max_open=max_open)
        self.outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def start(self, call: Call | None = None) -> Any:
        return self.reactor.start(call or post(), self.outcomes.put)

    def next(self) -> Outcome:
        return self.outcomes.get(timeout=PATIENCE_S)

    def reply(self) -> Reply:
        outcome = self.next()
        assert isinstance(outcome, Reply), outcome
        return outcome

    def failure(self) -> SendFailed:
        outcome = self.next()
        assert isinstance(outcome, SendFailed), outcome
        return outcome

    def close(self) -> None:
        self.reactor.close()
        self.http.close()
        assert self.workers.close(PATIENCE_S)


def keep_silent(peer: Peer) -> None:
    peer.read_request()
    peer.wait_gone()


def threads_of_reactors() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tinker-poll"]


def await_end_of_threads() -> None:
    for thread in threads_of_reactors():
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@contextmanager
def stepping(reactor: Reactor) -> Iterator[Reactor]:
    """Let this thread be that of the reactor, so that nothing runs at the same time; it calls `step`."""
    reactor._thread = threading.current_thread()
    try:
        yield reactor
    finally:
        reactor._thread = None
        reactor.close()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


# ------------------------------------------------------------------------------------------- answers
def test_an_answer_reaches_its_own_reaction() -> None:
    with AnsweringServer(lambda seen: answer(seen.body)) as server, closing(Held(server.url)) as held:
        results: dict[bytes, bytes] = {}
        done = threading.Semaphore(0)
        for number in range(50):
            body = b"%d" % number

            def keep(outcome: Outcome, body: bytes = body) -> None:
                assert isinstance(outcome, Reply)
                results[body] = outcome.body
                done.release()

            held.reactor.start(post(body=body), keep)
        for _ in range(50):
            assert done.acquire(timeout=PATIENCE_S)
    assert results == {b"%d" % number: b"%d" % number for number in range(50)}


def test_a_request_that_waits_holds_no_thread() -> None:
    answered = threading.Event()

    def script(peer: Peer) -> None:
        peer.read_request()
        answered.wait(PATIENCE_S)
        peer.send(answer(b"late"))

    with ScriptedServer(script) as server, closing(Held(server.url, threads=2)) as held:
        for _ in range(40):
            held.start()
        server.await_seen(40)
        assert held.workers.submit(lambda: 7).result(PATIENCE_S) == 7  # forty waits occupy no worker
        answered.set()
        assert [held.reply().body for _ in range(40)] == [b"late"] * 40


def test_an_answer_in_pieces_goes_back_to_the_reactor_between_them() -> None:
    more = threading.Event()

    def script(peer: Peer) -> None:
        peer.read_request()
        whole = chunked(b"first", b"second")
        peer.send(whole[:30])
        more.wait(PATIENCE_S)
        for octet in whole[30:]:
            peer.send(bytes([octet]))

    with ScriptedServer(script) as server, closing(Held(server.url, threads=1)) as held:
        held.start()
        server.await_seen(1)
        # While the rest of the answer is missing, it does not occupy the only worker.
        assert held.workers.submit(lambda: 7).result(PATIENCE_S) == 7
        more.set()
        assert held.reply().body == b"firstsecond"


def test_tls_tickets_are_no_answer(authority: Authority) -> None:
    """Session tickets of TLS 1.3 make a socket readable, but no worker starts to wait for an answer."""
    answered = threading.Event()

    def script(peer: Peer) -> None:
        peer.read_request()
        answered.wait(PATIENCE_S)
        peer.send(answer(b"secret"))

    import requests

    with requests.Session() as session:
        session.verify = authority.ca_file
        server = ScriptedServer(script, tls=authority.server_context("localhost"), name="localhost")
        with server, closing(Held(server.url, threads=2, session=session)) as held:
            for _ in range(8):
                held.start()
            server.await_seen(8)
            assert held.workers.submit(lambda: 7).result(PATIENCE_S) == 7
            answered.set()
            assert {held.reply().body for _ in range(8)} == {b"secret"}


def test_a_proxy_is_passed_through(authority: Authority) -> None:
    import requests

    server = AnsweringServer(
        lambda seen: answer(b"ok"), tls=authority.server_context("localhost"), name="localhost"
    )
    with requests.Session() as session, server, ProxyServer(password="user:word") as proxy:
        session.verify = authority.ca_file
        session.proxies = {"https": proxy.url.replace("://", "://user:word@")}
        with closing(Held(server.url, session=session)) as held:
            held.start()
            assert held.reply().body == b"ok"
            assert [seen.method for seen in proxy.seen] == ["CONNECT"]


# ------------------------------------------------------------------------------------------- failures


def test_silence_ends_at_the_timeout_of_the_call() -> None:
    with ScriptedServer(keep_silent) as server, closing(Held(server.url)) as held:
        held.start(post(timeout=Timeout(read=0.05)))
        failed = held.failure()
    assert failed.timed_out
    assert failed.maybe_received


def test_a_failing_reaction_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    with AnsweringServer(lambda seen: answer(b"ok")) as server, closing(Held(server.url, threads=1)) as held:
        held.reactor.start(post(), lambda outcome: 1 / 0)
        held.start()
        assert held.reply().body == b"ok"
    assert "a reaction to an answer failed" in caplog.text


def test_what_is_under_way_fails_at_the_close() -> None:
    with ScriptedServer(keep_silent) as server:
        held = Held(server.url, max_open=3)
        for _ in range(10):
            held.start()
        server.await_seen(3)
        held.close()
        assert all(held.failure().final for _ in range(10))
        assert held.reactor.under_way == 0


# ------------------------------------------------------------------------------------- limits and calling off
def test_no_more_are_open_than_allowed_and_the_rest_wait_their_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = threading.Semaphore(0)

    def script(peer: Peer) -> None:
        while True:
            seen = peer.read_request()
            assert gate.acquire(timeout=PATIENCE_S)
            peer.send(answer(seen.body))

    with ScriptedServer(script) as server, closing(Held(server.url, max_open=2)) as held:
        for number in range(6):
            held.start(post(body=b"%d" % number))
        server.await_seen(2)
        assert held.reactor.under_way == 6
        assert server.connections == 2
        for _ in range(6):
            gate.release()
        assert {held.reply().body for _ in range(6)} == {b"%d" % number for number in range(6)}
        assert server.connections == 2
    [said] = caplog.messages
    assert said.startswith("2 requests are under way, and others wait for a connection; TINKER_MAX_CONN")


def test_a_request_called_off_is_closed_and_makes_room() -> None:
    gone = threading.Event()

    def first(peer: Peer) -> None:
        peer.read_request()
        peer.wait_gone()
        gone.set()

    def second(peer: Peer) -> None:
        peer.read_request()
        peer.send(answer(b"second"))

    with ScriptedServer(first, second) as server, closing(Held(server.url, max_open=1)) as held:
        ticket = held.start()
        server.await_seen(1)
        held.start()
        assert ticket.cancel()
        assert not ticket.cancel()
        assert gone.wait(PATIENCE_S)
        assert held.reply().body == b"second"
        assert held.outcomes.empty()


def test_what_waits_for_its_turn_can_be_called_off() -> None:
    gate = threading.Event()

    def script(peer: Peer) -> None:
        while True:
            seen = peer.read_request()
            gate.wait(PATIENCE_S)
            peer.send(answer(seen.body))

    with ScriptedServer(script) as server, closing(Held(server.url, max_open=1)) as held:
        held.start(post(body=b"a"))
        second = held.start(post(body=b"b"))
        held.start(post(body=b"c"))
        server.await_seen(1)
        assert second.cancel()
        gate.set()
        assert [held.reply().body, held.reply().body] == [b"a", b"c"]
        assert [seen.body for seen in server.seen] == [b"a", b"c"]


# ------------------------------------------------------------------------------------- timers, and the thread
class Nowhere:
    """A double of the transport for tests that send nothing; a request fails the test."""

    def open(self, call: Call, *, wait: bool = True) -> Any:
        raise AssertionError("nothing was to be sent")

    multiplexes = False

    def opens_at_once(self) -> bool:
        return False


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def stepped(clock: FakeClock) -> Iterator[Reactor]:
    """Yield a reactor that starts no thread. The test calls `step`."""
    with stepping(Reactor(Nowhere(), HandWorkers(), clock)) as reactor:
        yield reactor


def test_timers_fire_in_order_and_not_early(stepped: Reactor, clock: FakeClock) -> None:
    fired: list[str] = []
    stepped.after(2.0, lambda: fired.append("second"))
    stepped.after(1.0, lambda: fired.append("first"))
    clock.advance(0.99)
    assert stepped.step(0.0)
    assert fired == []
    clock.advance(0.02)
    assert stepped.step(0.0)
    assert fired == ["first"]
    clock.advance(1.0)
    stepped.step(0.0)
    assert fired == ["first", "second"]


def test_pauses_are_as_short_as_the_clock_makes_them_and_other_delays_are_not() -> None:
    clock, ended = QuickClock(), list[str]()
    with stepping(Reactor(Nowhere(), HandWorkers(), clock)) as reactor:
        reactor.pause(50, lambda: ended.append("pause"))
        reactor.after(50, lambda: ended.append("delay"))
        for pass_s in (0.499, 0.002):
            assert ended == []
            clock.advance(pass_s)
            reactor.step(0.0)
    assert ended == ["pause"]


def test_an_idle_thread_ends_and_another_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_sync.runtime.reactor.IDLE_S", 0.0)
    with AnsweringServer(lambda seen: answer(b"ok")) as server, closing(Held(server.url)) as held:
        for _ in range(30):
            held.start()
            assert held.reply().body == b"ok"
        await_end_of_threads()


def test_the_thread_stays_while_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_sync.runtime.reactor.IDLE_S", 0.001)
    asked, needed = threading.Semaphore(0), threading.Event()
    needed.set()

    def is_needed() -> bool:
        asked.release()
        return needed.is_set()

    workers = Workers("fetch", 1)
    reactor = Reactor(http_for("http://127.0.0.1:9"), workers, needed=is_needed)
    reactor.reserve()
    [thread] = threads_of_reactors()
    reactor.reserve()
    for _ in range(3):
        assert asked.acquire(timeout=PATIENCE_S)
    assert threads_of_reactors() == [thread]
    needed.clear()
    await_end_of_threads()
    reactor.close()
    reactor.reserve()
    assert threads_of_reactors() == []
    assert workers.close(PATIENCE_S)


def test_a_dead_thread_fails_calls(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    broken = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: broken.set())
    readiness = readiness_of_next(monkeypatch)
    with ScriptedServer(keep_silent) as server, closing(Held(server.url)) as held:
        held.start()
        server.await_seen(1)
        assert readiness.watched.wait(PATIENCE_S)  # later requests belong to the next thread
        readiness.meanwhile = lambda: 1 / 0
        held.reactor.after(0.0, lambda: None)  # wakes the thread
        assert held.failure().final
        assert broken.wait(PATIENCE_S)
    assert "the reactor failed" in caplog.text


def test_a_dropped_reactor_is_not_kept_alive_by_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_sync.runtime.reactor.IDLE_S", 0.0)
    with AnsweringServer(lambda seen: answer(b"ok")) as server:
        held = Held(server.url)
        held.start()
        held.reply()
        await_end_of_threads()
        held.close()
        gone = weakref.ref(held.reactor)
        del held
        gc.collect()
        assert gone() is None


def test_a_burst_opens_its_connections_within_three_round_trips(authority: Authority) -> None:
    """The server goes on with none before all are there: for TCP, for TLS, and for the requests."""
    count, context = 60, authority.server_context()
    listener = socket.create_server(("127.0.0.1", 0), backlog=count)
    listener.settimeout(PATIENCE_S)
    bodies: list[bytes] = []

    def serve() -> None:
        with ExitStack() as stack:
            raw = [stack.enter_context(listener.accept()[0]) for _ in range(count)]
            for sock in raw:
                sock.settimeout(PATIENCE_S)
                assert sock.recv(1, socket.MSG_PEEK)  # the greeting of TLS
            served = [stack.enter_context(context.wrap_socket(sock, server_side=True)) for sock in raw]
            for sock in served:
                request = b""
                while not request.endswith(b"."):
                    request += sock.recv(4096)
                bodies.append(request.rpartition(b"\r\n\r\n")[2])
            for sock, body in zip(served, bodies, strict=True):
                sock.sendall(answer(body))

    thread = threading.Thread(target=serve)
    thread.start()
    url = f"https://127.0.0.1:{listener.getsockname()[1]}"
    with listener, requests.Session() as session:
        session.verify = authority.ca_file
        with closing(Held(url, threads=2, session=session)) as held:
            for number in range(count):
                held.start(post(body=b"%d." % number))
            replies = {held.reply().body for _ in range(count)}
        thread.join(PATIENCE_S)
    assert replies == {b"%d." % number for number in range(count)}


def test_requests_use_connections_that_were_opened_ahead(authority: Authority) -> None:
    """By then, a server of TLS 1.3 has sent its tickets."""
    context = authority.server_context()
    with AnsweringServer(tls=context) as server, requests.Session() as session:
        session.verify = authority.ca_file
        with closing(Held(server.url, session=session)) as held:
            assert held.reactor.room > 0
            held.start(OPEN_AHEAD)
            assert not held.failure().maybe_received  # the address has not been looked up
            held.start()
            held.reply()
            for _ in range(4):
                held.start(OPEN_AHEAD)
            for _ in range(4):
                assert held.reply().body == b""
            assert repr(held.http.pools) == "<Pools open, 5 idle, 0 busy>"
            for _ in range(5):
                held.start()
            for _ in range(5):
                held.reply()
            assert server.connections == 5
            assert held.reactor.under_way == 0


def test_a_connection_that_the_server_closed_after_it_was_opened_ahead_is_not_used() -> None:
    closed = threading.Event()

    def close_at_once(peer: Peer) -> None:
        peer.close()
        closed.set()

    def converse(peer: Peer) -> None:
        while True:
            peer.read_request()
            peer.send(answer(b"there"))

    with ScriptedServer(converse, close_at_once, converse) as server, closing(Held(server.url)) as held:
        held.start()
        held.reply()
        held.start(OPEN_AHEAD)
        held.reply()
        assert closed.wait(PATIENCE_S)
        first, second = post(repeatable=False), post(repeatable=False)
        held.start(first)
        held.start(second)
        assert [held.reply().body, held.reply().body] == [b"there"] * 2


def test_a_request_called_off_while_its_connection_opens_closes_it(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    readiness = readiness_of_next(monkeypatch)

    def listen(peer: Peer) -> None:
        greeted.set()
        peer.wait_gone()  # never answers the greeting of TLS
        gone.set()

    greeted, gone = threading.Event(), threading.Event()
    with ScriptedServer(listen) as server, requests.Session() as session:
        session.verify = authority.ca_file
        url = server.url.replace("http:", "https:")
        with closing(Held(url, session=session)) as held:
            ticket = held.start()
            assert greeted.wait(PATIENCE_S)
            assert readiness.watched.wait(PATIENCE_S)
            assert ticket.cancel()
            assert gone.wait(PATIENCE_S)
            until(lambda: held.reactor.under_way == 0)


@pytest.fixture
def _files() -> Iterator[None]:
    with room_for(2 * WAITS):  # each connection has two ends in this process
        yield


@pytest.mark.usefixtures("_files")
def test_two_thousand_waits_are_all_answered() -> None:
    """The reactor watches more sockets than `select` can, and each request gets its own answer."""
    count = WAITS
    all_here = threading.Event()
    lock = threading.Lock()
    waiting: list[tuple[socket.socket, bytes]] = []
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)

    def serve() -> None:
        while len(waiting) < count:
            connection, _ = listener.accept()
            request = b""
            while b"\r\n\r\n" not in request or not request.endswith(b"."):
                request += connection.recv(4096)
            with lock:
                waiting.append((connection, request.rpartition(b"\r\n\r\n")[2]))
        all_here.set()

    thread = threading.Thread(target=serve)
    thread.start()
    held = Held(f"http://127.0.0.1:{listener.getsockname()[1]}", max_open=count, threads=8)
    try:
        for number in range(count):
            held.start(post(body=b"%d." % number))
        assert all_here.wait(120)
        assert held.reactor.under_way == count
        for connection, body in waiting:
            connection.sendall(answer(body))
        assert {held.reply().body for _ in range(count)} == {b"%d." % number for number in range(count)}
    finally:
        held.close()
        thread.join(PATIENCE_S)
        listener.close()
        for connection, _ in waiting:
            connection.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_begins_anew() -> None:
    release = threading.Event()

    def first(peer: Peer) -> None:
        peer.read_request()
        release.wait(PATIENCE_S)
        peer.send(answer(b"parent"))

    def other(peer: Peer) -> None:
        peer.read_request()
        peer.send(answer(b"child"))

    with ScriptedServer(first, other) as server, closing(Held(server.url)) as held:
        held.start()
        server.await_seen(1)

        def work() -> None:
            held.workers.begin()
            held.reactor.renew_after_fork()
            held.http.renew_after_fork()
            assert held.reactor.under_way == 0
            held.outcomes = queue.SimpleQueue()
            held.start()
            assert held.reply().body == b"child"

        in_child(work)
        release.set()
        assert held.reply().body == b"parent"
        assert server.connections == 2


# ------------------------------------------------------------------------------------------- jobs
def test_a_step_that_fails_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    with AnsweringServer() as server, closing(Held(server.url)) as held:
        held.reactor.reserve()
        assert held.reactor.run_soon(lambda: sys.exit("a job"))
        held.start()
        assert held.reply().status == 200
    assert "a job" in caplog.text


# ---- The reactor step by step: the test is its thread and its workers, so nothing here runs at the same time
SILENT = SendFailed("nothing has arrived", maybe_received=True, timed_out=True)


class Request:
    """A double of a request under way, over a socket of its own. `step` returns or raises `outcome`."""

    def __init__(self, outcome: Outcome | Exception = SILENT, expires_at_s: float = math.inf) -> None:
        self.outcome = outcome
        self.expires_at_s = expires_at_s
        self.writing = False
        self.sock, self.peer = socket.socketpair()

    def fileno(self) -> int:
        return self.sock.fileno()

    def watched_by(self, watcher: object) -> bool:
        return False

    def step(self) -> Reply:
        if isinstance(self.outcome, Reply):
            self.abort()
            return self.outcome
        raise self.outcome

    def abort(self) -> None:
        self.sock.close()
        self.peer.close()

    @property
    def closed(self) -> bool:
        return self.sock.fileno() < 0


class Line:
    """A double of the transport: each call takes the next request. `on_open` is called before that."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.opened = 0
        self.on_open: Callable[[], object] = lambda: None

    def open(self, call: Call, *, wait: bool = True) -> Request:
        self.on_open()
        self.opened += 1
        return self.requests[self.opened - 1]

    multiplexes = False

    def opens_at_once(self) -> bool:
        return False


class Watched(EpollReadiness if hasattr(select, "epoll") else SelectorReadiness):  # type: ignore[misc]
    """The set of sockets of a reactor, which lets a test act while its thread sleeps or ends a watch."""

    def __init__(self) -> None:
        super().__init__()
        self.woken, self.watched = False, threading.Event()
        self.waits: list[float | None] = []
        self.is_short = False
        """True: each wait lasts for 10 ms at most."""
        self.meanwhile: Callable[[], object] | None = None
        self.on_forget: Callable[[int], object] = lambda _: None

    def wake(self) -> None:
        self.woken = True
        super().wake()

    def wait(self, timeout_s: float | None) -> list[int]:
        self.waits.append(timeout_s)
        act, self.meanwhile = self.meanwhile, None
        if act is not None:
            act()
            timeout_s = 0.0
        return super().wait(0.01 if self.is_short else timeout_s)

    def watch(self, descriptor: int, *, writing: bool = False) -> None:
        super().watch(descriptor, writing=writing)
        self.watched.set()

    def forget(self, descriptor: int) -> None:
        super().forget(descriptor)
        self.on_forget(descriptor)


def readiness_of_next(patch: pytest.MonkeyPatch) -> Watched:
    """Return the set of sockets that the next reactor uses."""
    made = Watched()
    patch.setattr("tinker_sync.runtime.reactor.make_readiness", lambda: made)
    return made


class Bench:
    """A reactor whose thread is that of the test, with its transport, its workers and the outcomes."""

    def __init__(self, clock: FakeClock, http: Any = None) -> None:
        self.line, self.workers, self.clock = Line(), HandWorkers(), clock
        self.reactor = Reactor(http or self.line, self.workers, clock, needed=lambda: True)
        self.outcomes: list[Outcome] = []

    @contextmanager
    def running(self) -> Iterator[Bench]:
        with stepping(self.reactor), pytest.MonkeyPatch.context() as patch:
            self.readiness = readiness_of_next(patch)
            self.reactor.step(0.0)
            yield self
        for request in self.line.requests:
            request.abort()

    def start(self, *requests: Request) -> Any:
        """Start calls that take these requests. Return the ticket of the last one."""
        self.line.requests += requests
        tickets = [self.reactor.start(post(), self.outcomes.append) for _ in requests]
        return tickets[-1]

    def send(self, *requests: Request) -> Any:
        """Start calls, and let the workers send them."""
        ticket = self.start(*requests)
        self.workers.do_all()
        return ticket

    def failures(self) -> list[bool]:
        """Return the `maybe_received` of each outcome; all must be failures."""
        return [outcome.maybe_received for outcome in self.outcomes if isinstance(outcome, SendFailed)]

    def is_woken_by(self, act: Callable[[], object]) -> bool:
        """Call `act()` while the thread sleeps without a limit, and return True if that wakes the thread."""
        self.readiness.meanwhile, self.readiness.woken = act, False
        self.reactor.step(None)
        return self.readiness.woken


@pytest.fixture
def bench(clock: FakeClock) -> Iterator[Bench]:
    with Bench(clock).running() as bench:
        yield bench


# ------------------------------------------------------------------------------------------- sending


def test_a_request_called_off_while_it_is_sent_is_closed(bench: Bench) -> None:
    request = Request()
    ticket = bench.start(request)
    bench.line.on_open = ticket.cancel
    bench.workers.do_all()
    bench.reactor.step(0.0)
    assert request.closed
    assert (bench.reactor.under_way, bench.outcomes) == (0, [])


def test_a_request_that_is_sent_while_the_reactor_closes_is_closed(bench: Bench) -> None:
    request = Request()
    bench.line.on_open = bench.reactor.close
    bench.send(request)
    assert request.closed
    assert (bench.reactor.under_way, bench.failures()) == (0, [True])


def test_a_request_that_no_worker_sends_fails() -> None:
    outcomes: list[Outcome] = []
    reactor = Reactor(Line(), NoWorkers())
    reactor.start(post(), outcomes.append)
    (failed,) = outcomes
    assert isinstance(failed, SendFailed)
    assert (failed.final, failed.maybe_received, reactor.under_way) == (True, False, 0)


@pytest.mark.parametrize("error", [SendFailed("broken", maybe_received=True), ValueError("odd")])
def test_a_request_that_fails_is_closed(bench: Bench, error: Exception) -> None:
    request = Request(error)
    request.peer.send(b".")
    bench.send(request)
    bench.reactor.step(0.0)
    assert request.closed
    assert bench.failures() == [True]


def test_a_socket_that_another_thread_has_closed_wakes_the_thread(bench: Bench) -> None:
    request = Request()
    request.abort()
    assert bench.is_woken_by(lambda: bench.send(request))
    bench.reactor.step(0.0)
    assert bench.outcomes == [SILENT]


# ------------------------------------------------------------------------------------------- silence
@pytest.mark.parametrize(("expires_at_s", "woken"), [(math.inf, False), (1005.0, True)])
def test_a_request_wakes_the_thread_if_it_expires_before_the_thread_wakes(
    bench: Bench, expires_at_s: float, woken: bool
) -> None:
    assert bench.is_woken_by(lambda: bench.send(Request(expires_at_s=expires_at_s))) is woken


@pytest.mark.parametrize("wake", ["after", "run_soon"])
def test_timers_and_jobs_wake_the_thread(bench: Bench, wake: str) -> None:
    reactor = bench.reactor
    ways = {"after": partial(reactor.after, 5.0, lambda: None), "run_soon": lambda: reactor.run_soon(list)}
    assert bench.is_woken_by(ways[wake])


def test_a_silent_request_is_not_watched_any_more(bench: Bench, clock: FakeClock) -> None:
    bench.send(Request(expires_at_s=1005.0))
    clock.advance(5.0)
    bench.reactor.step(0.0)
    assert bench.outcomes == [SILENT]
    bench.reactor.step(0.0)
    assert bench.readiness.waits[-1] == 0.0
    bench.readiness.meanwhile = list
    bench.reactor.step(7.0)
    assert bench.readiness.waits[-1] == 7.0  # nothing else sets the length of the wait


def test_finished_requests_leave_neither_bodies_nor_many_entries(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended requests stay behind long ones in the heap of timeouts, until there are too many of them."""
    sizes: list[int] = []
    heappush = heapq.heappush
    monkeypatch.setattr(heapq, "heappush", lambda heap, item: (heappush(heap, item), sizes.append(len(heap))))
    for _ in range(40):
        bench.send(Request(expires_at_s=1005.0))
    for count in range(1, STALE_EXPIRIES + 100):
        request = Request(Reply(200, {}, b""), expires_at_s=1005.0)
        request.peer.send(b".")
        ticket = bench.send(request)
        bench.reactor.step(0.0)
        bench.workers.jobs.clear()  # of a worker that would guard the step
        assert (ticket.call, len(bench.outcomes)) == (None, count)
    assert STALE_EXPIRIES < max(sizes) <= STALE_EXPIRIES + 1.25 * 41 + 1


# ------------------------------------------------------------------------------------------- the end


def test_after_the_close_no_timer_fires(bench: Bench, clock: FakeClock) -> None:
    fired: list[str] = []
    bench.reactor.after(1.0, lambda: fired.append("late"))
    bench.reactor.close()
    clock.advance(1.0)
    assert not bench.reactor.step(0.0)
    assert fired == []


def test_a_step_that_is_due_at_the_close_is_taken(bench: Bench) -> None:
    done: list[str] = []

    def close() -> None:
        assert bench.reactor.run_soon(lambda: done.append("later"))
        bench.reactor.close()

    assert bench.reactor.run_soon(close)
    assert bench.reactor.step(0.0)
    assert not bench.reactor.step(0.0)
    assert done == ["later"]


def test_steps_that_follow_run_at_once_if_no_worker_takes_them() -> None:
    class Leaving(HandWorkers):
        def run(self, job: Callable[[], object]) -> None:
            if self.jobs or done:
                raise RuntimeError("can't start new thread")
            super().run(job)

    line, workers, done = Line(), Leaving(), list[str]()
    reactor = Reactor(line, workers)

    def stop() -> None:
        assert reactor.follow(lambda: done.append("first"))
        assert reactor.follow(lambda: done.append("second"))
        raise SystemExit

    line.on_open = stop
    reactor.start(post(), print)
    with pytest.raises(SystemExit):
        workers.do()
    assert "second" in done


# ------------------------------------------------------------------------------------------- no thread


# ------------------------------------------------------------------------------------------- races
@pytest.mark.parametrize("workers", [HandWorkers(), NoWorkers()], ids=["worker", "no worker"])
def test_a_job_added_while_the_thread_ends_is_done(workers: HandWorkers | NoWorkers) -> None:
    reactor, done = Reactor(Line(), workers), []

    class Due(deque[Any]):
        def append(self, step: Any) -> None:
            assert not reactor.step(0.0)  # the thread ends between the two steps of `run_soon`
            super().append(step)

    with stepping(reactor):
        reactor._due = Due()
        assert reactor.run_soon(lambda: done.append("job"))
        if isinstance(workers, HandWorkers):
            workers.do()
        assert done == ["job"]
        assert not reactor.run_soon(done.clear)


def test_a_job_added_while_the_thread_falls_asleep_wakes_it() -> None:
    reactor, done = Reactor(Line(), HandWorkers()), []

    class Due(deque[Any]):
        def __bool__(self) -> bool:
            found = len(self) > 0
            if not done:  # after this look, the thread goes to sleep
                done.append(reactor.run_soon(lambda: done.append("job")))
            return found

    with stepping(reactor):
        reactor._due = Due()
        reactor.step(PATIENCE_S)  # without a wake, it would sleep
        reactor.step(0.0)
    assert done == [True, "job"]


def test_the_watch_of_a_silent_request_ends_before_another_thread_can_close_its_socket(
    bench: Bench, clock: FakeClock
) -> None:
    """Once a socket is closed, its number may belong to a new socket, whose watch would end in its place."""
    due: list[int] = []
    bench.readiness.on_forget = lambda _: due.append(len(bench.reactor._due))
    bench.send(Request(expires_at_s=1005.0))
    clock.advance(5.0)
    bench.reactor.step(0.0)
    assert (due[0], bench.outcomes) == (0, [SILENT])


def test_a_connection_whose_answer_came_at_the_last_moment_is_watched_for_the_next_request(
    clock: FakeClock,
) -> None:
    late, sent = threading.Event(), threading.Event()

    def script(peer: Peer) -> None:
        peer.read_request()
        late.wait(PATIENCE_S)
        peer.send(answer(b"first"))
        sent.set()
        peer.read_request()
        peer.send(answer(b"second"))

    def let_it_arrive(number: int) -> None:
        late.set()
        assert sent.wait(PATIENCE_S)
        select.select([number], [], [], PATIENCE_S)

    with (
        ScriptedServer(script) as server,
        http_for(server, clock=clock) as http,
        Bench(clock, http).running() as bench,
    ):
        bench.readiness.on_forget = let_it_arrive
        bench.send(Request())
        bench.readiness.is_short = True  # nothing ends a wait for the server to see the request
        while not server.seen:
            bench.reactor.step(0.0)
        bench.readiness.is_short = False
        clock.advance(20.0)  # longer than the timeout of the read
        while not bench.outcomes:
            bench.reactor.step(0.0)
        bench.send(Request())
        bench.reactor.step(PATIENCE_S)
        bench.reactor.step(0.0)
    answers = [outcome.body for outcome in bench.outcomes if isinstance(outcome, Reply)]
    assert answers == [b"first", b"second"]


# ------------------------------------------------------------------------------------------- forks


# --------------- Notifications that sockets are readable, by the ways of Linux and of other systems
Pair = tuple[socket.socket, socket.socket]
KINDS = [SelectorReadiness, *([EpollReadiness] if hasattr(select, "epoll") else [])]


@pytest.fixture(params=KINDS)
def readiness(request: pytest.FixtureRequest) -> Iterator[Readiness]:
    made: Readiness = request.param()
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_a_watch_ends_with_its_notification(readiness: Readiness, pair: Pair) -> None:
    one, other = pair
    readiness.watch(one.fileno())
    assert readiness.wait(0) == []
    other.send(b"a")
    assert readiness.wait(PATIENCE_S) == [one.fileno()]
    assert readiness.wait(0) == []  # although the socket is still readable
    readiness.watch(one.fileno())
    assert readiness.wait(PATIENCE_S) == [one.fileno()]


def test_a_watch_for_room_to_write(readiness: Readiness, pair: Pair) -> None:
    one, other = pair
    one.setblocking(False)
    sent = 0
    with suppress(BlockingIOError):
        while True:
            sent += one.send(bytes(65536))
    other.send(b"a")
    readiness.watch(one.fileno(), writing=True)
    assert readiness.wait(0) == []  # although the socket can be read
    while sent:
        sent -= len(other.recv(65536))
    assert readiness.wait(PATIENCE_S) == [one.fileno()]
    readiness.watch(one.fileno())
    assert readiness.wait(PATIENCE_S) == [one.fileno()]


def test_a_number_that_a_new_socket_takes_is_watched_anew(readiness: Readiness) -> None:
    for _ in range(2):
        one, other = socket.socketpair()
        with one, other:
            readiness.watch(one.fileno())
            other.send(b"a")
            assert readiness.wait(PATIENCE_S) == [one.fileno()]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="this system does not list open files")
@pytest.mark.parametrize("kind", KINDS)
def test_closing_leaves_no_file_open(kind: type[Readiness]) -> None:
    before = os.listdir("/proc/self/fd")
    readiness = kind()
    assert os.listdir("/proc/self/fd") != before
    readiness.close()
    readiness.close()
    assert os.listdir("/proc/self/fd") == before


def test_a_watch_that_begins_during_a_wait(readiness: Readiness, pair: Pair) -> None:
    if not readiness.takes_effect_at_once:
        pytest.skip("the waiting thread must be woken here")
    one, other = pair
    other.send(b"a")
    news: list[list[int]] = []
    waiting = threading.Thread(target=lambda: news.append(readiness.wait(PATIENCE_S)))
    waiting.start()
    readiness.watch(one.fileno())
    waiting.join(PATIENCE_S)
    assert news == [[one.fileno()]]
