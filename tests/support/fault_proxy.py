"""`FaultProxy`: a proxy on loopback that damages some requests and answers, chosen by a seed.

The proxy reads one request, forwards it over a new connection, and returns the answer. A damage happens at
one moment of this exchange, such as before the request is forwarded. The choice of the damage depends on the
seed, on the path of the request, and on the number of earlier requests to that path. So the order in which
threads send to other paths does not matter.

One thread runs the event loop of the proxy. Any thread may start, stop and read it.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

PASSING = (
    *("refused", "reset_early", "request_cut", "late_request", "sent_twice", "lost_answer", "hung_up"),
    *("head_cut", "body_cut", "late_answer", "trickled", "silent", "overtaken", "half_closed"),
    *("idle_dropped", "answered_twice", "length_too_long", "bad_gateway", "busy"),
    *("taken_408", "taken_425", "taken_429", "taken_503"),
)
"""The kinds of damage after which every call of a client still succeeds."""

LYING = ("length_too_short", "length_left_out", "garbled_head", "garbled_body")
"""The kinds of damage after which a call may fail. The order of calls and other calls are not affected."""

LATE_S = 0.02
SILENT_S = 1.5
"""A silence that is longer than the clients of these tests wait for the first byte of an answer."""

_JSON = b"content-type: application/json\r\n"
_BAD_GATEWAY = b"HTTP/1.1 502 Bad Gateway\r\ncontent-type: text/html\r\ncontent-length: 9\r\n\r\n<p>no</p>"
_BUSY = b"HTTP/1.1 503 Busy\r\nretry-after: 1\r\n" + _JSON + b"content-length: 2\r\n\r\n{}"
_TAKEN = {
    f"taken_{status}": b"HTTP/1.1 %d No\r\n" % status + _JSON + b"content-length: 2\r\n\r\n{}"
    for status in (408, 425, 429, 503)
}
"""Answers that a gateway gives although the server has accepted the request."""


class Message:
    """A request or an answer: the head, which ends with an empty line, and the body."""

    def __init__(self, head: bytes, body: bytes) -> None:
        self.head = head
        self.body = body

    @property
    def raw(self) -> bytes:
        return self.head + self.body

    @property
    def path(self) -> str:
        """Return the path of a request, without its query."""
        return self.head.split(b" ", 2)[1].partition(b"?")[0].decode("latin-1")

    def with_length(self, length: int | None) -> bytes:
        """Return the message with another content length in its head, or without one."""
        lines = [line for line in self.head[:-4].split(b"\r\n") if not _is_framing(line)]
        lines.append(b"connection: close" if length is None else b"content-length: %d" % length)
        return b"\r\n".join([*lines, b"", b""]) + self.body


def _is_framing(line: bytes) -> bool:
    return line.lower().startswith((b"content-length:", b"transfer-encoding:", b"connection:"))


class FaultProxy:
    """A proxy in front of a server of this machine.

    Args:
        port: the port of the server.
        seed: the seed of the choice of damages.
        rate: the share of requests that are damaged; it may be set at any time.
        kinds: the damages to choose from.
        only: returns True for a path whose requests may be damaged.
    """

    def __init__(
        self,
        port: int,
        *,
        seed: int = 0,
        rate: float = 0.2,
        kinds: tuple[str, ...] = PASSING,
        only: Callable[[str], bool] = lambda _path: True,
    ) -> None:
        self.rate = rate
        self.outage: str | None = None
        """The damage that every request gets until this is None again."""
        self.struck: Counter[str] = Counter()
        """The number of times that each kind of damage happened."""
        self.requests = 0
        self.port = 0
        self._upstream = port
        self._seed = seed
        self._kinds = kinds
        self._only = only
        self._numbers: Counter[str] = Counter()
        self._passed = 0
        self._down = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)

    # -------------------------------------------------------------------------------------- for tests

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def restart(self, down_s: float = 0.05) -> None:
        """Reset every connection, and refuse new ones for a moment, as a restarted proxy does."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._go_down, down_s)

    def close_in_child(self) -> None:
        """In a forked child, close the inherited sockets, which would keep the parent's connections open."""
        for writer in list(self._writers):
            with suppress(OSError, AttributeError):
                os.close(writer.get_extra_info("socket").fileno())

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        assert self._ready.wait(120)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(120)
        assert not self._thread.is_alive()

    # -------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        listening = socket.create_server(("127.0.0.1", 0), backlog=256)
        server = await asyncio.start_server(self._accept, sock=listening, limit=1 << 26)
        self.port = listening.getsockname()[1]
        self._ready.set()
        try:
            await self._stopped.wait()
        finally:
            server.close()
            # The loop hands over a connection that it has just accepted in a task of its own.
            accepting = asyncio.all_tasks() - {asyncio.current_task()} - self._tasks
            await asyncio.gather(*accepting, return_exceptions=True)
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for writer in self._writers:
                writer.transport.abort()
            await server.wait_closed()

    def _go_down(self, down_s: float) -> None:
        self.struck["restarted"] += 1
        self._down = True
        for writer in list(self._writers):
            _reset(writer)
        self._loop.call_later(down_s, self._come_up)

    def _come_up(self) -> None:
        self._down = False

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Not a coroutine: one that is cancelled before its first step would leave its connection open.
        self._writers.add(writer)
        task = asyncio.create_task(self._live(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _live(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._down or self._decide("", ("refused",)) is not None:
                _reset(writer)
            else:
                await self._serve(reader, writer)
        except (OSError, EOFError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        one_way = False
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests += 1
            path = Message(head, b"").path
            damage = self._decide(path, self._kinds)
            if damage == "reset_early":
                _reset(writer)
                return
            request = Message(head, await _read_body(reader, head))
            if one_way:  # the client sent a request over a connection that the proxy has closed for sending
                await self._forward(request)
                return
            one_way = damage == "half_closed"
            if not await self._exchange(damage, request, writer):
                return
            self._passed += 1

    # -------------------------------------------------------------------------------------- decisions

    def _decide(self, path: str, kinds: tuple[str, ...]) -> str | None:
        self._numbers[path] += 1
        chance = random.Random(f"{self._seed} {path} {self._numbers[path]}")
        kind = self.outage
        if kind is None:
            if chance.random() >= self.rate or not self._only(path):
                return None
            kind = chance.choice(self._kinds)
        if (self.outage is None and kind not in kinds) or (kind == "refused") != (path == ""):
            return None
        self.struck[kind] += 1
        return kind

    # -------------------------------------------------------------------------------------- one exchange

    async def _exchange(self, damage: str | None, request: Message, writer: asyncio.StreamWriter) -> bool:
        """Carry out one exchange, with a damage if given. Return True if the connection stays open."""
        if damage == "request_cut":
            await self._forward_half(request)
            _reset(writer)
            return False
        if damage == "busy":
            return await _send(writer, _BUSY)
        if damage == "late_request":
            await asyncio.sleep(LATE_S)
        answer = await self._forward(request)
        if damage == "sent_twice":
            await self._forward(request)
        if damage in ("lost_answer", "hung_up"):
            if damage == "lost_answer":
                _reset(writer)
            return False
        if damage == "bad_gateway":
            return await _send(writer, _BAD_GATEWAY)
        if damage in _TAKEN:
            return await _send(writer, _TAKEN[damage])
        if damage in ("late_answer", "silent", "overtaken"):
            await self._hold(damage)
        return await self._answer(damage, answer, writer)

    async def _hold(self, damage: str) -> None:
        if damage == "overtaken":
            passed = self._passed
            for _ in range(20):
                if self._passed >= passed + 2:
                    return
                await asyncio.sleep(LATE_S / 10)
        else:
            await asyncio.sleep(LATE_S if damage == "late_answer" else SILENT_S)

    async def _answer(self, damage: str | None, answer: Message, writer: asyncio.StreamWriter) -> bool:
        if damage in _CUTS:
            await _send(writer, _CUTS[damage](answer))
            return False
        if damage in _LIES:
            return await _send(writer, _LIES[damage](answer))
        if damage == "trickled":
            return await _trickle(writer, answer.raw)
        # Send both copies at once: a client would take a copy that arrives later for the next answer.
        await _send(writer, answer.raw * 2 if damage == "answered_twice" else answer.raw)
        if damage == "half_closed":
            writer.write_eof()
        elif damage == "idle_dropped":
            await asyncio.sleep(LATE_S / 10)
            _reset(writer)
            return False
        return b"connection: close" not in answer.head.lower()

    async def _forward(self, request: Message) -> Message:
        reader, writer = await self._connect()
        try:
            writer.write(request.raw)
            head = await reader.readuntil(b"\r\n\r\n")
            return Message(head, await _read_body(reader, head))
        finally:
            writer.transport.abort()

    async def _forward_half(self, request: Message) -> None:
        _, writer = await self._connect()
        with suppress(OSError):
            writer.write(request.raw[: len(request.head) + len(request.body) // 2 - 1])
            await writer.drain()
        writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._upstream, limit=1 << 26)


async def _read_body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
    if b"chunked" in fields.get(b"transfer-encoding", b""):
        return await _read_chunks(reader)
    return await reader.readexactly(int(fields.get(b"content-length", b"0")))


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    """Read a body in chunked transfer encoding. Return its raw bytes, including the sizes of the chunks."""
    raw = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        raw += line + await reader.readexactly(size + 2)
        if not size:
            return raw


_CUTS: dict[str | None, Callable[[Message], bytes]] = {
    "head_cut": lambda one: one.head[: len(one.head) // 2],
    "body_cut": lambda one: one.head + one.body[: len(one.body) // 2],
    "length_too_long": lambda one: one.with_length(len(one.body) + 7),
    "length_left_out": lambda one: Message(one.head, one.body[: len(one.body) * 2 // 3]).with_length(None),
}
"""The bytes that each kind of damage sends before the connection ends."""
_LIES: dict[str | None, Callable[[Message], bytes]] = {
    "length_too_short": lambda one: one.with_length(len(one.body) * 2 // 3),
    "garbled_head": lambda one: b"HTTP/1.1 2x0 " + one.raw[13:],
    "garbled_body": lambda one: one.head + b"\xff" * len(one.body),
}
"""The bytes that each kind of damage sends before the connection goes on."""


async def _trickle(writer: asyncio.StreamWriter, octets: bytes) -> bool:
    size = max(len(octets) // 8, 1)
    for start in range(0, len(octets), size):
        await _send(writer, octets[start : start + size])
        await asyncio.sleep(LATE_S / 10)
    return True


async def _send(writer: asyncio.StreamWriter, octets: bytes) -> bool:
    writer.write(octets)
    await writer.drain()
    return True


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with a reset, so that the client gets an error instead of an orderly end."""
    sock: Any = writer.get_extra_info("socket")
    with suppress(OSError, AttributeError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
