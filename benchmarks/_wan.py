"""A network on loopback: a relay that delays bytes in each direction, and limits how many pass in a second.

    python _wan.py --to PORT --one-way-ms 40 --bytes-per-s 20000000     prints its port

All connections share one link in each direction, as behind one modem. The first bytes of a connection leave
one round trip after it was opened, because the system itself accepts the connection at once on loopback. The
relay does not read what it forwards, so TLS passes through it.

It answers each line on its standard input with its figures as JSON: the connections that clients hold at
most (`connections`) and have opened (`opened`), the round trips in line (`round_trips`), and the CPU that it
has used since it began to listen (`network_cpu_s`). A request is in line behind all answers that have reached
the client before the request was sent.

The process ends with the one that started it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _processes import allow_many_files

# While so much is on its way in one direction, or waits for a slow reader, senders have to wait.
MOST_QUEUED = 4_000_000
# A link with a limit takes small pieces, so that connections share it.
PIECE = 32 * 1024
_LOOK_EVERY_S = 1.0


class End:
    """The relay's socket to a client or to the server, and the bytes that it has not taken yet."""

    __slots__ = ("closed", "fresh", "heard_all", "level", "link", "other", "sock", "unsent")

    def __init__(self, sock: socket.socket, link: Link) -> None:
        self.sock = sock
        self.link = link
        """The direction in which bytes from this socket go."""
        self.other: End
        self.unsent = bytearray()
        self.heard_all = False
        self.closed = False
        self.fresh = True
        self.level = 0
        """The number of the round trip, counted in line, that the last bytes from a client began."""


class Link:
    """One direction: the bytes under way, in the order in which they arrive."""

    def __init__(self, delay_s: float, bytes_per_s: float) -> None:
        self.delay_s = delay_s
        self.bytes_per_s = bytes_per_s
        self.most = min(bytes_per_s * (delay_s + 0.02), MOST_QUEUED)
        """The most bytes that may be under way: what the delay holds, and a little more."""
        self.under_way: deque[tuple[float, End, bytes, int]] = deque()
        self.free_s = 0.0
        self.size = 0
        self.held: deque[End] = deque()
        """Sockets that are not read, because too much is under way."""

    def put(self, now_s: float, end: End, octets: bytes, level: int) -> None:
        self.free_s = max(now_s, self.free_s) + len(octets) / self.bytes_per_s
        self.size += len(octets)
        self.under_way.append((self.free_s + self.delay_s, end, octets, level))

    def arrived(self, now_s: float) -> Iterator[tuple[End, bytes, int]]:
        while self.under_way and self.under_way[0][0] <= now_s:
            _, end, octets, level = self.under_way.popleft()
            self.size -= len(octets)
            yield end, octets, level

    @property
    def next_s(self) -> float:
        return self.under_way[0][0] if self.under_way else math.inf


class Relay:
    """The relay and its figures, on one thread."""

    def __init__(self, to: tuple[str, int], one_way_s: float, bytes_per_s: float) -> None:
        self._to = to
        self._up, self._down = Link(one_way_s, bytes_per_s), Link(one_way_s, bytes_per_s)
        # All reads share one buffer, because `recv` would allocate as much for each small piece.
        self._scratch = memoryview(bytearray(PIECE if bytes_per_s < math.inf else 8 * PIECE))
        self._epoll = select.epoll()
        self._ends: dict[int, End] = {}
        self._opening: deque[tuple[float, End]] = deque()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._epoll.register(self._listener, select.EPOLLIN)
        self._epoll.register(0, select.EPOLLIN)
        self._open = self.connections = self.opened = self.round_trips = 0
        self._began_cpu_s = time.process_time()

    def run(self) -> None:
        """Forward bytes until the process that started this one has ended."""
        parent, look_at_s = os.getppid(), 0.0
        while True:
            now_s = time.monotonic()
            if now_s > look_at_s:
                if os.getppid() != parent:
                    return
                look_at_s = now_s + _LOOK_EVERY_S
            opening_s = self._opening[0][0] if self._opening else math.inf
            until_s = min(self._up.next_s, self._down.next_s, opening_s, look_at_s)
            for number, events in self._epoll.poll(max(until_s - now_s, 0.0)):
                self._handle(number, events)
            self._pass_on(time.monotonic())

    def _handle(self, number: int, events: int) -> None:
        if number == self._listener.fileno():
            self._accept()
        elif number == 0:
            self._report()
        elif number in self._ends:  # not closed by an earlier event
            end = self._ends[number]
            if events & select.EPOLLOUT:
                self._send(end, b"")
            if events & ~select.EPOLLOUT and not end.closed:
                self._read(end)

    def _report(self) -> None:
        if not sys.stdin.readline():
            self._epoll.unregister(0)
            return
        figures = {
            "connections": self.connections,
            "opened": self.opened,
            "round_trips": self.round_trips,
            "network_cpu_s": time.process_time() - self._began_cpu_s,
        }
        print(json.dumps(figures), flush=True)

    def _pass_on(self, now_s: float) -> None:
        """Pass on what has arrived by now."""
        while self._opening and self._opening[0][0] <= now_s:
            _, end = self._opening.popleft()
            self.round_trips = max(self.round_trips, end.level)
            self._watch(end)
        for link in (self._up, self._down):
            for end, octets, level in link.arrived(now_s):
                self._deliver(end, octets, level)
            while link.held and link.size < link.most:
                self._watch(link.held.popleft())

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            client, server = End(sock, self._up), End(socket.create_connection(self._to), self._down)
            client.other, server.other = server, client
            for end in (client, server):
                end.sock.setblocking(False)
                end.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._ends[end.sock.fileno()] = end
                self._epoll.register(end.sock, 0)
            self._watch(server)
            self._open += 1
            self.opened += 1
            self.connections = max(self.connections, self._open)
            client.level = self.round_trips + 1
            self._opening.append((time.monotonic() + self._up.delay_s + self._down.delay_s, client))

    def _watch(self, end: End) -> None:
        if not end.closed:
            reads = 0 if end.heard_all else select.EPOLLIN
            self._epoll.modify(end.sock, reads | (select.EPOLLOUT if end.unsent else 0))

    def _read(self, end: End) -> None:
        link = end.link
        if link.size >= link.most or len(end.other.unsent) > MOST_QUEUED:
            self._epoll.modify(end.sock, select.EPOLLOUT if end.unsent else 0)
            link.held.append(end)
            return
        try:
            octets = bytes(self._scratch[: end.sock.recv_into(self._scratch)])
        except BlockingIOError:
            return
        except OSError:
            octets = b""
        if not octets:
            end.heard_all = True
            self._watch(end)
            if link is self._up:
                self._open -= 1
        elif link is self._up:
            end.level = max(end.level + end.fresh, self.round_trips + 1)
            end.fresh = False
        link.put(time.monotonic(), end.other, octets, max(end.level, end.other.level))

    def _deliver(self, end: End, octets: bytes, level: int) -> None:
        if end.link is self._up:  # it goes to a client
            self.round_trips = max(self.round_trips, level)
        if octets:
            self._send(end, octets)
        elif not end.closed:
            with suppress(OSError):
                end.sock.shutdown(socket.SHUT_WR)
            if end.heard_all:
                self._close(end)

    def _send(self, end: End, octets: bytes) -> None:
        if end.closed:
            return
        waited = bool(end.unsent)
        if waited:
            end.unsent += octets
        try:
            sent = end.sock.send(end.unsent or octets)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close(end)
            return
        if waited:
            del end.unsent[:sent]
        elif sent < len(octets):
            end.unsent += octets[sent:]
        if waited or end.unsent:
            self._watch(end)

    def _close(self, end: End) -> None:
        for each in (end, end.other):
            if not each.closed:
                each.closed = True
                if each.link is self._up and not each.heard_all:
                    self._open -= 1
                del self._ends[each.sock.fileno()]
                each.sock.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="A network on loopback.")
    parser.add_argument("--to", type=int, required=True, help="the port of the server on this machine")
    parser.add_argument("--one-way-ms", type=float, default=0.0)
    parser.add_argument("--bytes-per-s", type=float, default=math.inf)
    options = parser.parse_args()
    allow_many_files()
    relay = Relay(("127.0.0.1", options.to), options.one_way_ms / 1e3, options.bytes_per_s)
    print(relay.port, flush=True)
    relay.run()


if __name__ == "__main__":
    main()
