"""An application that hands every request on to another process of this machine. Runs on a server's loop."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from tinker_sync.local.server.http1 import ABORT

if TYPE_CHECKING:
    from tinker_sync.local.server.http1 import Message, Receive, Send

_HOST: Final = "127.0.0.1"
# They belong to one connection, and each of the two has its own.
_OF_THE_CONNECTION: Final = frozenset({b"connection", b"content-length", b"transfer-encoding", b"expect"})


class Forward:
    """Hands requests on, each over a connection of its own. A server that is not there is a reset.

    Args:
        port: where the server listens.
    """

    def __init__(self, port: int) -> None:
        self._port = port

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        body = (await receive()).get("body", b"")
        asked = asyncio.ensure_future(self._exchange(scope, body))
        gone = asyncio.ensure_future(receive())
        try:
            await asyncio.wait({asked, gone}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                await _answer(asked, send)
        finally:
            for task in (asked, gone):  # who asked is gone: so are we, for the server there
                task.cancel()
            await asyncio.gather(asked, gone, return_exceptions=True)

    async def _exchange(self, scope: Message, body: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        reader, writer = await asyncio.open_connection(_HOST, self._port)
        try:
            writer.write(_head(scope, len(body)) + body)
            lines = (await reader.readuntil(b"\r\n\r\n")).rstrip(b"\r\n").split(b"\r\n")
            headers = [
                (name.lower(), value.strip())
                for name, _, value in (line.partition(b":") for line in lines[1:])
            ]
            length = dict(headers).get(b"content-length")
            content = await (reader.read() if length is None else reader.readexactly(int(length)))
            return int(lines[0].split(b" ")[1]), headers, content
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


def _head(scope: Message, length: int) -> bytes:
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    lines = [b"%b: %b" % pair for pair in scope["headers"] if pair[0] not in _OF_THE_CONNECTION]
    own = [b"connection: close", b"content-length: %d" % length]
    return b"\r\n".join([scope["method"].encode() + b" " + target + b" HTTP/1.1", *lines, *own, b"", b""])


async def _answer(asked: asyncio.Future[tuple[int, list[tuple[bytes, bytes]], bytes]], send: Send) -> None:
    try:
        status, headers, content = asked.result()
    except (OSError, asyncio.IncompleteReadError):
        await send({"type": ABORT, "reset": True})
        return
    kept = [pair for pair in headers if pair[0] not in _OF_THE_CONNECTION]
    length = (b"content-length", b"%d" % len(content))
    await send({"type": "http.response.start", "status": status, "headers": [*kept, length]})
    await send({"type": "http.response.body", "body": content})
