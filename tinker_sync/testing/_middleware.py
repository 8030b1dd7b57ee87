"""The part of a server under test that lets calls go wrong: an ASGI application around another.

It runs on the server's loop. What is to go wrong is decided by the scene; here it is done. A connection is
cut by the server's own event for that, so a reset is a real one.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field

from tinker_sync.local.server.http1 import ABORT
from tinker_sync.local.server.ordered import ORDERED
from tinker_sync.testing.faults import Answered, Cut, Slow, Truncated

if TYPE_CHECKING:
    from tinker_sync.local.server.http1 import Asgi, Message, Receive, Send
    from tinker_sync.testing._scene import Decision, Scene
    from tinker_sync.testing.calls import RecordedCall
    from tinker_sync.testing.faults import Fault

_COME_AGAIN: Final = frozenset({402, 408, 409, 425, 429})
"""Refusals after which a client sends the same call once more."""


@define
class _Captured:
    """The server's own answer, kept back."""

    status: int = 500
    headers: list[tuple[bytes, bytes]] = field(factory=list)
    body: bytearray = field(factory=bytearray)

    async def take(self, event: Message) -> None:
        """Stands in for `send`."""
        if event["type"] == "http.response.start":
            self.status, self.headers = event["status"], list(event.get("headers", ()))
        elif event["type"] == "http.response.body":
            self.body += event.get("body", b"")

    def full_headers(self) -> list[tuple[bytes, bytes]]:
        """Its headers, with the length of the whole body."""
        others = [(name, value) for name, value in self.headers if name.lower() != b"content-length"]
        return [*others, (b"content-length", b"%d" % len(self.body))]


class Faults:
    """An application that does what a scene says, and else what the application inside does.

    Args:
        app: the application inside.
        scene: decides, and writes down.
        pace: times of the plan are multiplied by this.
    """

    def __init__(self, app: Asgi, scene: Scene, *, pace: float = 1.0) -> None:
        self._app = app
        self._scene = scene
        self._pace = pace

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        content = await _whole_body(receive)
        decision = self._scene.enter(
            method=scope["method"],
            path=(scope.get("raw_path") or scope["path"].encode()).decode("latin-1"),
            query=scope["query_string"].decode("latin-1"),
            headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]],
            content=content,
        )
        run = _Run(self._app, scope, _again(content, receive), send, decision.call)
        try:
            await asyncio.sleep(decision.latency_s * self._pace)
            await self._act(run, decision)
        finally:
            decision.call.over.set()

    async def _act(self, run: _Run, decision: Decision) -> None:
        fault, opens = decision.fault, decision.call.endpoint == "create_session"
        work_first = opens if fault is None else _needs_work(fault)
        if work_first:
            await run.work()
        if work_first and opens:
            self._note_session(run.kept())
        if isinstance(fault, Answered):
            if _uses_up_number(decision.call, fault):
                await run.refuse()
            await run.answer(fault)
        elif isinstance(fault, Cut):
            await run.cut(reset=fault.reset)
        elif isinstance(fault, Truncated):
            await run.send_part(fault.keep)
        elif isinstance(fault, Slow):
            await run.trickle(fault.seconds * self._pace, fault.pieces)
        elif opens:
            await run.send_own()
        else:
            await run.through()

    def _note_session(self, captured: _Captured) -> None:
        if captured.status < 300:
            self._scene.opened(json.loads(captured.body)["session_id"])


class _Run:
    """One call on its way: what can be done with it."""

    def __init__(self, app: Asgi, scope: Message, receive: Receive, send: Send, call: RecordedCall) -> None:
        self._app = app
        self._scope = scope
        self._receive = receive
        self._send = send
        self._call = call
        self._captured: _Captured | None = None

    async def through(self) -> None:
        """Nothing goes wrong."""
        await self._app(self._scope, self._receive, self._watched)

    async def work(self) -> None:
        """Have the work done, and keep the answer back."""
        self._captured = _Captured()
        await self._app(self._scope, self._receive, self._captured.take)

    async def refuse(self) -> None:
        """Have the server refuse the call too, so that it counts the number in it as used."""
        headers = [pair for pair in self._scope["headers"] if pair[0].lower() != b"x-api-key"]
        await self._app({**self._scope, "headers": headers}, self._receive, _Captured().take)

    async def answer(self, fault: Answered) -> None:
        """Another answer."""
        headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in fault.headers_at(time.time())
        ]
        await self._start(fault.status, [*headers, (b"content-length", b"%d" % len(fault.body))])
        await self._body(fault.body)

    async def cut(self, *, reset: bool) -> None:
        """No answer."""
        self._call.over.set()
        await self._send({"type": ABORT, "reset": reset})

    async def send_own(self) -> None:
        """The answer that was kept back."""
        captured = self.kept()
        await self._start(captured.status, captured.full_headers())
        await self._body(bytes(captured.body))

    async def send_part(self, keep: float) -> None:
        """The head of the answer that was kept back, the beginning of its body, and no more."""
        captured = self.kept()
        await self._start(captured.status, captured.full_headers())
        await self._body(bytes(captured.body[: int(len(captured.body) * keep)]), more=True)
        await self.cut(reset=False)

    async def trickle(self, seconds: float, pieces: int) -> None:
        """The answer that was kept back, bit by bit."""
        captured = self.kept()
        await self._start(captured.status, captured.full_headers())
        edges = [len(captured.body) * piece // pieces for piece in range(pieces + 1)]
        for piece in range(pieces):
            if piece:
                await asyncio.sleep(seconds / (pieces - 1))
            await self._body(bytes(captured.body[edges[piece] : edges[piece + 1]]), more=piece < pieces - 1)

    def kept(self) -> _Captured:
        """What the application inside said."""
        assert self._captured is not None  # noqa: S101  # `work` comes first
        return self._captured

    async def _watched(self, event: Message) -> None:
        # Written down before it is sent: a client that has the answer may be asked about at once.
        if event["type"] == "http.response.start":
            self._call.status = event["status"]
        elif not event.get("more_body", False):
            self._call.over.set()
        await self._send(event)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        await self._watched({"type": "http.response.start", "status": status, "headers": headers})

    async def _body(self, body: bytes, *, more: bool = False) -> None:
        await self._watched({"type": "http.response.body", "body": body, "more_body": more})


def _needs_work(fault: Fault) -> bool:
    """Whether the server does what was asked before this goes wrong."""
    return isinstance(fault, (Truncated, Slow)) or (isinstance(fault, (Answered, Cut)) and fault.after_work)


def _uses_up_number(call: RecordedCall, fault: Answered) -> bool:
    """Whether a planned answer is a refusal, after which the number of the call is not waited for."""
    refusal = 400 <= fault.status < 500 and fault.status not in _COME_AGAIN
    return refusal and not fault.after_work and call.endpoint in ORDERED


async def _whole_body(receive: Receive) -> bytes:
    parts = []
    while True:
        event = await receive()
        parts.append(event.get("body", b""))
        if event["type"] != "http.request" or not event.get("more_body", False):
            return b"".join(parts)


def _again(content: bytes, receive: Receive) -> Callable[[], Awaitable[dict[str, Any]]]:
    """A `receive` that gives the body once more, and then what else comes."""
    given = False

    async def replay() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": content, "more_body": False}

    return replay
