"""Pools of connections: taking, giving back, expiry, forks, closing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.clock import FakeClock
from support.servers import Peer, ScriptedServer

from tinker_sync.transport.pools import (
    MAX_IDLE_S,
    ConnectFailed,
    Connection,
    Origin,
    Pools,
    Route,
    connect,
    has_arrived,
)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(Peer.wait_gone) as made:
        yield made


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def pools(clock: FakeClock) -> Iterator[Pools]:
    made = Pools(clock, max_idle=3)
    yield made
    made.close()


@pytest.fixture
def opened(server: ScriptedServer, pools: Pools) -> Callable[..., Connection]:
    route = Route(Origin.of(server.url))

    def make(route: Route = route) -> Connection:
        connection = connect(route, 5)
        assert pools.adopt(connection)
        return connection

    return make


def test_routes_do_not_mix(pools: Pools, opened: Callable[..., Connection], server: ScriptedServer) -> None:
    connection = opened()
    pools.give_back(connection)
    assert pools.take(Route(Origin.of(server.url))) is None  # another route to the same server
    assert pools.take(connection.route) is connection
    pools.discard(connection)


def test_expired_connections_are_closed(
    pools: Pools, opened: Callable[..., Connection], clock: FakeClock
) -> None:
    first, second = opened(), opened()
    pools.give_back(first)
    clock.advance(MAX_IDLE_S + 1)
    assert pools.take(first.route) is None
    pools.give_back(second)  # also closes expired connections
    assert repr(pools) == "<Pools open, 1 idle, 0 busy>"
    assert first.sock.fileno() == -1


def test_connections_that_the_server_has_closed_are_closed_at_the_next_look(
    pools: Pools, clock: FakeClock
) -> None:
    hang_up = threading.Event()

    def close_when_told(peer: Peer) -> None:
        hang_up.wait(120)
        peer.close()

    with ScriptedServer(close_when_told, close_when_told, Peer.wait_gone) as server:
        route = Route(Origin.of(server.url))
        first, second, third = (connect(route, 5) for _ in range(3))
        for connection in (first, second, third):
            assert pools.adopt(connection)
        for connection in (first, second):
            pools.give_back(connection)
        hang_up.set()
        assert all(has_arrived(connection.sock, 120) for connection in (first, second))
        clock.advance(2)
        pools.give_back(third)
        assert repr(pools) == "<Pools open, 1 idle, 0 busy>"
        assert (first.sock.fileno(), second.sock.fileno()) == (-1, -1)
        pools.close()


def test_a_connection_stays_for_minutes(
    pools: Pools, opened: Callable[..., Connection], clock: FakeClock
) -> None:
    connection = opened()
    pools.give_back(connection)
    clock.advance(300)
    assert pools.take(connection.route) is connection
    pools.discard(connection)


def test_a_call_may_limit_the_idle_time_of_its_connection(
    pools: Pools, opened: Callable[..., Connection], clock: FakeClock
) -> None:
    connection = opened()
    pools.give_back(connection)
    clock.advance(3)
    assert pools.take(connection.route, max_idle_s=2) is None
    assert pools.take(connection.route) is connection  # the connection stays in the pool
    pools.discard(connection)


def test_a_connection_with_unrequested_bytes_is_dropped(pools: Pools) -> None:
    spoken = threading.Event()

    def goodbye(peer: object) -> None:
        peer.send(b"HTTP/1.1 408 Request Timeout\r\n\r\n")  # type: ignore[attr-defined]
        spoken.set()
        peer.wait_gone()  # type: ignore[attr-defined]

    with ScriptedServer(goodbye) as server:
        connection = connect(Route(Origin.of(server.url)), 5)
        assert pools.adopt(connection)
        pools.give_back(connection)
        assert spoken.wait(120)
        assert pools.take(connection.route) is None
    assert repr(pools) == "<Pools open, 0 idle, 0 busy>"


def test_there_is_a_limit_to_idling(pools: Pools, opened: Callable[..., Connection]) -> None:
    connections = [opened() for _ in range(5)]
    for connection in connections:
        pools.give_back(connection)
    assert repr(pools) == "<Pools open, 3 idle, 0 busy>"
    assert sum(connection.sock.fileno() == -1 for connection in connections) == 2


def test_closing(pools: Pools, opened: Callable[..., Connection]) -> None:
    idle, busy, late = opened(), opened(), opened()
    pools.give_back(idle)
    pools.close()
    pools.close()
    assert idle.sock.fileno() == -1
    assert busy.sock.recv(1) == b""  # interrupted, and still owned by the thread that took it
    pools.discard(busy)
    pools.give_back(late)
    assert late.sock.fileno() == -1
    assert pools.take(idle.route) is None
    assert not pools.adopt(busy)
    assert repr(pools) == "<Pools closed, 0 idle, 0 busy>"


def test_a_child_process_closes_its_copies_and_forgets(
    pools: Pools, opened: Callable[..., Connection]
) -> None:
    idle, busy = opened(), opened()
    pools.give_back(idle)
    pools._lock.acquire()  # as if a thread of the parent held it at the fork
    pools.renew_after_fork()
    assert repr(pools) == "<Pools open, 0 idle, 0 busy>"
    assert (idle.sock.fileno(), busy.sock.fileno()) == (-1, -1)
    pools.give_back(busy)  # a thread returns a connection after the close
    assert repr(pools) == "<Pools open, 0 idle, 0 busy>"


def test_no_two_threads_get_the_same_connection(pools: Pools, opened: Callable[..., Connection]) -> None:
    connections = [opened() for _ in range(3)]
    route = connections[0].route
    for connection in connections:
        pools.give_back(connection)
    start = threading.Barrier(8)

    def take(_: int) -> Connection | None:
        start.wait(120)
        return pools.take(route)

    with ThreadPoolExecutor(8) as executor:
        taken = [connection for connection in executor.map(take, range(8)) if connection]
    assert len(taken) == 3
    assert len({id(connection) for connection in taken}) == 3
    for connection in taken:
        pools.discard(connection)


def test_a_socket_that_cannot_be_prepared_is_closed(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[socket.socket] = []

    class Noted(socket.socket):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(socket, "socket", Noted)
    monkeypatch.setattr("tinker_sync.transport.pools._SOCKET_OPTIONS", [(socket.IPPROTO_TCP, -1, 1)])
    with pytest.raises(ConnectFailed):
        connect(Route(Origin.of(server.url)), 5)
    assert [each.fileno() for each in made] == [-1]
