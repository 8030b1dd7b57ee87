"""`Forward`: an ASGI application that forwards each request to another process of this machine.

It runs on the event loop of a server, and opens a connection for each request.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from tinker_sync.local.server.http1 import ABORT

if TYPE_CHECKING:
    from tinker_sync.local.server.http1 import Message, Receive, Send

_HOST: Final = "127.0.0.1"
# These headers belong to one connection, and a forwarded request passes through two.
_OF_THE_CONNECTION: Final = frozenset({b"connection", b"content-length", b"transfer-encoding", b"expect"})


class Forward:
    """Forwards requests to a port. While that server is down, clients see a connection reset.

    Args:
        port: the port of the server.
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
        reply = asyncio.ensure_future(self._request(scope, body))
        disconnected = asyncio.ensure_future(receive())
        try:
            await asyncio.wait({reply, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if reply.done():
                await _send_reply(reply, send)
        finally:
            for task in (reply, disconnected):  # a client that disconnects ends the forwarded request too
                task.cancel()
            await asyncio.gather(reply, disconnected, return_exceptions=True)

    async def _request(self, scope: Message, body: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        reader, writer = await asyncio.open_connection(_HOST, self._port)
        try:
            writer.write(_encode_head(scope, len(body)) + body)
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


def _encode_head(scope: Message, length: int) -> bytes:
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    lines = [b"%b: %b" % pair for pair in scope["headers"] if pair[0] not in _OF_THE_CONNECTION]
    own = [b"connection: close", b"content-length: %d" % length]
    return b"\r\n".join([scope["method"].encode() + b" " + target + b" HTTP/1.1", *lines, *own, b"", b""])


async def _send_reply(
    reply: asyncio.Future[tuple[int, list[tuple[bytes, bytes]], bytes]], send: Send
) -> None:
    try:
        status, headers, content = reply.result()
    except (OSError, asyncio.IncompleteReadError):
        await send({"type": ABORT, "reset": True})
        return
    kept = [pair for pair in headers if pair[0] not in _OF_THE_CONNECTION]
    length = (b"content-length", b"%d" % len(content))
    await send({"type": "http.response.start", "status": status, "headers": [*kept, length]})
    await send({"type": "http.response.body", "body": content})
