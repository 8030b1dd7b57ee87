"""`FaultMiddleware`: an application that passes calls to another one, with the faults of a test's plan.

It runs on the event loop of the server. A `Scene` chooses the fault of a call, and the middleware carries the
fault out. To cut a connection, it raises `Abort`, so a reset is a real TCP reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import TYPE_CHECKING, Any, Final

import attrs

from tinker_sync._base.policy import Stage, rule_for
from tinker_sync.errors import WireError
from tinker_sync.local.server.http import Abort, Answer, Application, Request
from tinker_sync.testing.faults import Cut, FixedReply, Slow, Truncated
from tinker_sync.wire.endpoints import row_of

if TYPE_CHECKING:
    from tinker_sync.local.server.http import Write
    from tinker_sync.testing._scene import Scene
    from tinker_sync.testing.calls import RecordedCall
    from tinker_sync.testing.faults import Fault


class FaultMiddleware(Application):
    """An application that passes calls to an inner application, and carries out the faults of a plan.

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

    def keeps_body(self, request: Request) -> bool:
        return self._app.keeps_body(request)

    async def startup(self) -> None:
        await self._app.startup()

    async def shutdown(self) -> None:
        await self._app.shutdown()

    async def __call__(self, request: Request) -> Answer:
        """Answer one request."""
        decision = self._scene.enter(
            method=request.method,
            path=request.path,
            query=request.query,
            headers=request.headers.items(),
            content=request.body,
        )
        call = decision.call
        try:
            await asyncio.sleep(decision.latency_s * self._pace)
            answer = await self._act(request, call, decision.fault)
            # Recorded before it is sent: a test may read the record as soon as its client has the reply.
            call.status = answer.status
        finally:
            call.over.set()
        return answer

    async def _act(self, request: Request, call: RecordedCall, fault: Fault | None) -> Answer:
        works = fault is None or _needs_work(fault)
        made = await self._app(request) if works else Answer()
        if works and call.endpoint == "create_session" and made.status < 300:
            self._scene.note_session(json.loads(made.body)["session_id"])
        if isinstance(fault, FixedReply):
            if _uses_up_number(call, fault):
                await self._refuse(request, call)
            headers = {name.lower(): value for name, value in fault.headers_at(time.time())}
            return Answer(fault.body, fault.status, content_type="", headers=headers)
        if isinstance(fault, Cut):
            raise Abort(reset=fault.reset)
        if isinstance(fault, Truncated):
            return await _truncated(made, fault.keep)
        if isinstance(fault, Slow):
            return await _trickled(made, fault.seconds * self._pace, fault.pieces)
        return made

    async def _refuse(self, request: Request, call: RecordedCall) -> None:
        """Let the inner application refuse the call and count its sequence number as used.

        It gets the model and the number, without other required fields and with a path that is no text.
        """
        place = _place_of(call)
        if place is not None:
            headers = {name: value for name, value in request.headers.items() if name not in _OF_THE_BODY}
            body = json.dumps({**place, "path": []}).encode()
            await self._app(attrs.evolve(request, headers=headers, body=body))


async def _truncated(answer: Answer, keep: float) -> Answer:
    """Return an answer that has the length of the whole body and the share `keep` of it, and is then cut."""
    body = await _body_of(answer)

    async def stream(write: Write) -> None:
        await write(body[: int(len(body) * keep)])
        raise Abort(reset=False)

    return _streamed(answer, len(body), stream)


async def _trickled(answer: Answer, seconds: float, pieces: int) -> Answer:
    """Return an answer that is sent in pieces, over some seconds."""
    body = await _body_of(answer)
    edges = [len(body) * piece // pieces for piece in range(pieces + 1)]

    async def stream(write: Write) -> None:
        for piece in range(pieces):
            if piece:
                await asyncio.sleep(seconds / (pieces - 1))
            await write(body[edges[piece] : edges[piece + 1]])

    return _streamed(answer, len(body), stream)


async def _body_of(answer: Answer) -> bytes:
    if answer.stream is None:
        return answer.body
    pieces: list[bytes] = []

    async def write(piece: bytes) -> None:
        pieces.append(piece)

    await answer.stream(write)
    return b"".join(pieces)


def _streamed(answer: Answer, length: int, stream: Any) -> Answer:
    return attrs.evolve(answer, headers={**answer.headers, "content-length": str(length)}, stream=stream)


def _needs_work(fault: Fault) -> bool:
    """Return True if the inner application must do the work of the call before the fault."""
    return isinstance(fault, (Truncated, Slow)) or (isinstance(fault, (FixedReply, Cut)) and fault.after_work)


def _uses_up_number(call: RecordedCall, fault: FixedReply) -> bool:
    """Return True if the fault is a final refusal of a training call.

    Clients may never use the sequence number of such a call again, so the server must not wait for it.
    """
    refusal = 400 <= fault.status < 500 and not rule_for(fault.status, Stage.CALL).passes
    return refusal and not fault.after_work and row_of(call.endpoint).number == "seq_id"


_OF_THE_BODY: Final = frozenset({"content-type", "content-encoding", "content-length", "transfer-encoding"})


def _place_of(call: RecordedCall) -> dict[str, Any] | None:
    """Return the model and the sequence number in the body of a call; None if they cannot be read."""
    with contextlib.suppress(ValueError, WireError):
        body = call.body
        if isinstance(body, dict) and "model_id" in body:
            return {name: body[name] for name in ("model_id", "seq_id") if name in body}
    return None
