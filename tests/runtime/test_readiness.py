"""Notifications that sockets are readable, by the ways of Linux and of other systems.

The watch of a socket ends with its first notification.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from support.clock import PATIENCE_S

from tinker_sync.runtime.reactor import EpollReadiness, Readiness, SelectorReadiness

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
