"""Opening connections without waiting: addresses, deadlines, tunnels, and TLS sessions that are resumed."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
from support.authority import Authority
from support.clock import PATIENCE_S, FakeClock
from support.servers import AnsweringServer, Peer, ProxyServer, ScriptedServer, answer, unused_port
from support.wires import get, http_for, post

from tinker_sync.config import Timeout
from tinker_sync.transport.call import SendFailed
from tinker_sync.transport.pools import ConnectFailed, Dial, Origin, Route, connect, has_arrived


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(Peer.wait_gone) as made:
        yield made


@contextmanager
def deaf_port() -> Iterator[int]:
    """Yield a port whose connections never open, because as many wait to be accepted as the system keeps."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


class Names:
    """A resolver that knows one name, the addresses of which are ports of this machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ports: int) -> None:
        self.ports = ports
        self.lookups = 0
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)
        self.route = Route(Origin("http", "server.invalid", 80))

    def _look_up(self, *_: Any, **__: Any) -> list[Any]:
        self.lookups += 1
        return [
            (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", port))
            for port in self.ports
        ]


def go_on(dial: Dial) -> Any:
    while (connection := dial.step()) is None:
        assert has_arrived(dial.sock, PATIENCE_S, writing=dial.writing)
    return connection


# ----------------------------------------------------------------------------------------- addresses


def test_an_address_that_refuses_gives_way_and_is_the_last_one_from_then_on(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unused_port() as dead:
        pass
    names = Names(monkeypatch, dead, server.port)
    for _ in range(2):
        with closing(connect(names.route, 60)) as connection:
            assert connection.sock.getpeername() == server.address
        assert [address[1] for _, address in names.route.known.addresses] == [server.port, dead]
    assert names.lookups == 1


def test_an_address_that_is_silent_gives_way_soon_and_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    with deaf_port() as first, deaf_port() as second:
        names = Names(monkeypatch, first, second)
        dial = Dial(names.route, 10.0, now=clock.now)
        for limit_s in (0.3, 10.0, 10.0):
            assert dial.step() is None
            assert dial.expires_at_s - clock.now() == pytest.approx(limit_s)
            clock.advance(limit_s)
        with pytest.raises(ConnectFailed) as caught:
            dial.step()
    assert caught.value.timed_out
    assert dial.sock.fileno() == -1


def test_no_address_is_tried_after_the_time_to_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    with deaf_port() as first, deaf_port() as second:
        dial = Dial(Names(monkeypatch, first, second).route, 10.0, clock.now() + 1.0, clock.now)
        assert dial.step() is None
        clock.advance(0.3)
        assert dial.step() is None
        assert dial.expires_at_s == pytest.approx(clock.now() + 0.7)
        clock.advance(0.7)
        with pytest.raises(ConnectFailed):
            dial.step()


def test_a_name_is_looked_up_again_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with unused_port() as dead:
        pass
    names = Names(monkeypatch, dead)
    for count in (1, 2):
        with pytest.raises(ConnectFailed, match="refused"):
            connect(names.route, 60)
        assert names.lookups == count


def test_a_lookup_counts_for_some_seconds(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(time, "monotonic", clock.now)
    names = Names(monkeypatch, server.port)
    for pause_s, lookups in ((0.0, 1), (9.0, 1), (2.0, 2)):
        clock.advance(pause_s)
        go_on(Dial(names.route, 60, now=clock.now)).close()
        assert names.lookups == lookups


def test_a_number_needs_no_lookup(server: ScriptedServer) -> None:
    with http_for(server) as http:
        assert not http.opens_at_once()
        http.open(get(), wait=False).abort()
        assert not http.pools.has_idle()
        assert http.opens_at_once()


# ----------------------------------------------------------------------------------------- exchanges


def test_a_connection_that_does_not_open_in_time() -> None:
    clock = FakeClock()
    with deaf_port() as port:
        http = http_for(f"http://127.0.0.1:{port}", clock=clock, timeout=Timeout(connect=5, read=45))
        exchange = http.open(post(), wait=False)
        assert exchange.writing
        assert exchange.expires_at_s == clock.now() + 5
        assert exchange.step() is None
        clock.advance(5)
        with pytest.raises(SendFailed) as caught:
            exchange.step()
        assert (caught.value.timed_out, caught.value.maybe_received) == (True, False)
        assert exchange.fileno() == -1
        http.close()


@pytest.mark.parametrize("through_a_proxy", [False, True])
def test_an_exchange_that_was_begun_without_waiting_can_be_waited_for(
    through_a_proxy: bool, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    with (
        AnsweringServer(lambda seen: answer(seen.body), tls=authority.server_context()) as server,
        ProxyServer() as proxy,
        requests.Session() as session,
    ):
        session.verify = authority.ca_file
        if through_a_proxy:
            session.proxies = {"https": f"http://127.0.0.1:{proxy.port}"}
        http = http_for(server, session=session)
        assert http.open(post(body=b"here"), wait=False).finish().body == b"here"
        assert len(proxy.seen) == through_a_proxy
        http.close()


def test_giving_up_closes_a_connection_that_is_being_opened(tmp_path: Path) -> None:
    gone = threading.Event()

    def listen(peer: Peer) -> None:
        peer.wait_gone()  # never answers the greeting of TLS
        gone.set()

    authority = Authority(tmp_path)
    with ScriptedServer(listen) as server, requests.Session() as session:
        session.verify = authority.ca_file
        http = http_for(server.url.replace("http:", "https:"), session=session)
        http.open(post(), wait=False).abort()
        assert gone.wait(PATIENCE_S)
        http.close()


@pytest.mark.parametrize("said", [b"", b"SSH-2.0-here\r\n\r\n", b"HTTP/1.1 200 " + b"x" * 70_000])
def test_a_proxy_that_does_not_speak_http(said: bytes, tmp_path: Path) -> None:
    def script(peer: Peer) -> None:
        peer.read_request()
        peer.send(said)
        peer.close()

    with ScriptedServer(script) as proxy:
        tls = ssl.create_default_context()
        route = Route(Origin("https", "server.invalid", 443), tls, Origin.of(proxy.url))
        with pytest.raises(ConnectFailed, match="tunnel") as caught:
            connect(route, 60)
        assert not caught.value.final


def test_a_server_behind_a_proxy_that_breaks_off_is_named_and_not_the_proxy_alone() -> None:
    def script(peer: Peer) -> None:
        peer.read_request()
        peer.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
        peer.sock.recv(1)  # the greeting of TLS
        peer.close()

    with ScriptedServer(script) as proxy:
        route = Route(
            Origin("https", "server.invalid", 443), ssl.create_default_context(), Origin.of(proxy.url)
        )
        with pytest.raises(ConnectFailed, match=r"connect to https://server\.invalid through the proxy"):
            connect(route, 60)


# ----------------------------------------------------------------------------------------- TLS


def answer_once(resumed: list[bool], peer: Peer) -> None:
    """Note whether a connection resumes a session, answer its request, and close it."""
    resumed.append(peer.sock.session_reused)  # type: ignore[attr-defined]
    peer.read_request()
    peer.send(answer(b"ok", headers={"Connection": "close"}))
    peer.close()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_later_connections_resume_the_session_of_an_earlier_one(
    version: ssl.TLSVersion, tmp_path: Path
) -> None:
    resumed: list[bool] = []
    authority = Authority(tmp_path)
    context = authority.server_context()
    context.maximum_version = version
    with ScriptedServer(partial(answer_once, resumed), tls=context) as server, requests.Session() as session:
        session.verify = authority.ca_file
        http = http_for(server, session=session)
        for _ in range(3):
            assert http.send(post()).body == b"ok"
        http.close()
    assert resumed == [False, True, True]


def test_the_connections_of_a_burst_copy_one_session_for_those_that_follow(tmp_path: Path) -> None:
    resumed: list[bool] = []
    known = []
    authority = Authority(tmp_path)
    script, context = partial(answer_once, resumed), authority.server_context()
    with ScriptedServer(script, tls=context) as server, requests.Session() as session:
        session.verify = authority.ca_file
        http = http_for(server, session=session)
        for size in (1, 4, 4):
            for exchange in [http.open(post()) for _ in range(size)]:
                assert exchange.finish().body == b"ok"
                known.append(http.route().known.session)
        http.close()
    assert resumed == [False, *[True] * 8]
    assert len({id(each) for each in known}) == 3  # a copy costs half the CPU of a handshake
