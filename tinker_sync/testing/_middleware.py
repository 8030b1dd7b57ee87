"""`FaultMiddleware`: an ASGI application that passes calls to another one, with the faults of a test's plan.

It runs on the event loop of the server. A `Scene` chooses the fault of a call, and the middleware carries the
fault out. To cut a connection, it sends the server an event, so a reset is a real TCP reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field

from tinker_sync._base.policy import Stage, rule_for
from tinker_sync.errors import WireError
from tinker_sync.local.server.http import ABORT, Application
from tinker_sync.testing.faults import Cut, FixedReply, Slow, Truncated
from tinker_sync.wire.endpoints import row_of

if TYPE_CHECKING:
    from tinker_sync.local.server.http import Message, Receive, Send
    from tinker_sync.testing._scene import Decision, Scene
    from tinker_sync.testing.calls import RecordedCall
    from tinker_sync.testing.faults import Fault


@define
class _CapturedReply:
    """The reply of the inner application, kept instead of being sent."""

    status: int = 500
    headers: list[tuple[bytes, bytes]] = field(factory=list)
    body: bytearray = field(factory=bytearray)

    async def take(self, event: Message) -> None:
        """Keep an event. The inner application calls this method as its `send`."""
        if event["type"] == "http.response.start":
            self.status, self.headers = event["status"], list(event.get("headers", ()))
        elif event["type"] == "http.response.body":
            self.body += event.get("body", b"")

    def full_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the reply, with the length of the whole body as `content-length`."""
        others = [(name, value) for name, value in self.headers if name.lower() != b"content-length"]
        return [*others, (b"content-length", b"%d" % len(self.body))]


class FaultMiddleware(Application):
    """An ASGI application that passes calls to an inner application, and carries out the faults of a plan.

    Args:
        app: the inner application.
        scene: chooses the fault of each call, and records the call.
        pace: the factor by which the delays of the plan are multiplied.
    """

    def __init__(self, app: Application, scene: Scene, *, pace: float = 1.0) -> None:
        self._app = app
        self._scene = scene
        self._pace = pace
        self.max_body_bytes = app.max_body_bytes

    def keeps_body(self, scope: Message) -> bool:
        return self._app.keeps_body(scope)

    async def startup(self) -> None:
        await self._app.startup()

    async def shutdown(self) -> None:
        await self._app.shutdown()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        content = await _read_body(receive)
        decision = self._scene.enter(
            method=scope["method"],
            path=(scope.get("raw_path") or scope["path"].encode()).decode("latin-1"),
            query=scope["query_string"].decode("latin-1"),
            headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]],
            content=content,
        )
        run = _CallInProgress(self._app, scope, _replay(content, receive), send, decision.call)
        try:
            await asyncio.sleep(decision.latency_s * self._pace)
            await self._act(run, decision)
        finally:
            decision.call.over.set()

    async def _act(self, run: _CallInProgress, decision: Decision) -> None:
        fault, opens_session = decision.fault, decision.call.endpoint == "create_session"
        work_first = opens_session if fault is None else _needs_work(fault)
        if work_first:
            await run.work()
        if work_first and opens_session:
            self._note_session(run.captured())
        if isinstance(fault, FixedReply):
            if _uses_up_number(decision.call, fault):
                await run.refuse()
            await run.send_fixed(fault)
        elif isinstance(fault, Cut):
            await run.cut(reset=fault.reset)
        elif isinstance(fault, Truncated):
            await run.send_part(fault.keep)
        elif isinstance(fault, Slow):
            await run.trickle(fault.seconds * self._pace, fault.pieces)
        elif opens_session:
            await run.send_own()
        else:
            await run.pass_on()

    def _note_session(self, captured: _CapturedReply) -> None:
        if captured.status < 300:
            self._scene.note_session(json.loads(captured.body)["session_id"])


class _CallInProgress:
    """One call to the server, with a method for each step of a fault. For the event loop only."""

    def __init__(
        self, app: Application, scope: Message, receive: Receive, send: Send, call: RecordedCall
    ) -> None:
        self._app = app
        self._scope = scope
        self._receive = receive
        self._send = send
        self._call = call
        self._captured: _CapturedReply | None = None

    async def pass_on(self) -> None:
        """Run the inner application, and send its reply."""
        await self._app(self._scope, self._receive, self._send_recorded)

    async def work(self) -> None:
        """Run the inner application, and keep its reply."""
        self._captured = _CapturedReply()
        await self._app(self._scope, self._receive, self._captured.take)

    async def refuse(self) -> None:
        """Let the inner application refuse the call and count its sequence number as used. Drop this reply.

        It gets the model and the number, without other required fields and with a path that is no text.
        """
        place = _place_of(self._call)
        if place is None:
            return
        await self._receive()  # the whole body, in place of which the inner application gets another one
        content = json.dumps({**place, "path": []}).encode()
        headers = [pair for pair in self._scope["headers"] if pair[0].lower() not in _OF_THE_BODY]
        headers.append((b"content-length", b"%d" % len(content)))
        await self._app(
            {**self._scope, "headers": headers}, _replay(content, self._receive), _CapturedReply().take
        )

    async def send_fixed(self, fault: FixedReply) -> None:
        headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in fault.headers_at(time.time())
        ]
        await self._start(fault.status, [*headers, (b"content-length", b"%d" % len(fault.body))])
        await self._body(fault.body)

    async def cut(self, *, reset: bool) -> None:
        self._call.over.set()
        await self._send({"type": ABORT, "reset": reset})

    async def send_own(self) -> None:
        captured = self.captured()
        await self._start(captured.status, captured.full_headers())
        await self._body(bytes(captured.body))

    async def send_part(self, keep: float) -> None:
        """Send the head of the captured reply and the share `keep` of its body, then cut the connection."""
        captured = self.captured()
        await self._start(captured.status, captured.full_headers())
        await self._body(bytes(captured.body[: int(len(captured.body) * keep)]), more=True)
        await self.cut(reset=False)

    async def trickle(self, seconds: float, pieces: int) -> None:
        """Send the captured reply in pieces, over some seconds."""
        captured = self.captured()
        await self._start(captured.status, captured.full_headers())
        edges = [len(captured.body) * piece // pieces for piece in range(pieces + 1)]
        for piece in range(pieces):
            if piece:
                await asyncio.sleep(seconds / (pieces - 1))
            await self._body(bytes(captured.body[edges[piece] : edges[piece + 1]]), more=piece < pieces - 1)

    def captured(self) -> _CapturedReply:
        """Return the reply that `work` has captured. `work` must have run."""
        assert self._captured is not None  # noqa: S101
        return self._captured

    async def _send_recorded(self, event: Message) -> None:
        # Recorded before it is sent: a test may read the record as soon as its client has the reply.
        if event["type"] == "http.response.start":
            self._call.status = event["status"]
        elif not event.get("more_body", False):
            self._call.over.set()
        await self._send(event)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        await self._send_recorded({"type": "http.response.start", "status": status, "headers": headers})

    async def _body(self, body: bytes, *, more: bool = False) -> None:
        await self._send_recorded({"type": "http.response.body", "body": body, "more_body": more})


def _needs_work(fault: Fault) -> bool:
    """Return True if the inner application must do the work of the call before the fault."""
    return isinstance(fault, (Truncated, Slow)) or (isinstance(fault, (FixedReply, Cut)) and fault.after_work)


def _uses_up_number(call: RecordedCall, fault: FixedReply) -> bool:
    """Return True if the fault is a final refusal of a training call.

    Clients may never use the sequence number of such a call again, so the server must not wait for it.
    """
    refusal = 400 <= fault.status < 500 and not rule_for(fault.status, Stage.CALL).passes
    return refusal and not fault.after_work and row_of(call.endpoint).number == "seq_id"


_OF_THE_BODY: Final = frozenset(
    {b"content-type", b"content-encoding", b"content-length", b"transfer-encoding"}
)


def _place_of(call: RecordedCall) -> dict[str, Any] | None:
    """Return the model and the sequence number in the body of a call; None if they cannot be read."""
    with contextlib.suppress(ValueError, WireError):
        body = call.body
        if isinstance(body, dict) and "model_id" in body:
            return {name: body[name] for name in ("model_id", "seq_id") if name in body}
    return None


async def _read_body(receive: Receive) -> bytes:
    parts = []
    while True:
        event = await receive()
        parts.append(event.get("body", b""))
        if event["type"] != "http.request" or not event.get("more_body", False):
            return b"".join(parts)


def _replay(content: bytes, receive: Receive) -> Callable[[], Awaitable[dict[str, Any]]]:
    """Return a function in place of `receive`, whose body was read already.

    Its first call returns the body, `content`, again; later calls return the events of `receive`.
    """
    replayed = False

    async def receive_again() -> Any:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": content, "more_body": False}

    return receive_again
