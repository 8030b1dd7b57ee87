"""The two kinds of servers of `LocalServer`: in this process, and in a child process.

Each has an ASGI application `app`, which `LocalServer` wraps to apply faults and record calls.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tinker_sync.local.server.http import ABORT, Application
from tinker_sync.wire.http1.client import ReplyParser, request_head
from tinker_sync.wire.http1.framing import MalformedMessage

if TYPE_CHECKING:
    from tinker_sync.local.server.http import Message, Receive, Send


class ThreadBackend:
    """A server in this process: its application, with the store that it uses. Not thread-safe.

    Args:
        model: the base model, see `tinker_sync.local.engine.host`.
        key: the key that clients send.
        data_dir: the directory for the state.
        settings: settings of the server, by name, see `tinker_sync.local.server.state`.

    Raises:
        InvalidInputError: there is no such model.
        ConfigurationError: the directory or a setting cannot be used.
    """

    def __init__(self, *, model: str, key: str, data_dir: Path, settings: dict[str, Any]) -> None:
        from tinker_sync.local.engine.host import load_base_model
        from tinker_sync.local.running import assemble

        load_base_model(model)  # so that a wrong model is reported as an argument, not as a setting
        self._parts = ExitStack()
        self.app: Application = self._parts.enter_context(
            assemble(data_dir, key=key, models=[model], flags=settings)
        )

    def close(self) -> None:
        """Close the store. The server that runs `app` must have stopped."""
        self._parts.close()


class ProcessBackend:
    """A server in a child process; `app` forwards requests to it. Arguments as for `ThreadBackend`.

    Raises:
        ConfigurationError: the child process cannot be started, or an argument cannot be used.
        MissingExtraError: a package that the server needs is not installed.
    """

    def __init__(self, *, model: str, key: str, data_dir: Path, settings: dict[str, Any]) -> None:
        from tinker_sync.local.launch import ServerProcess, bind_port

        if Path(model).exists():  # the child has another working directory
            model = str(Path(model).absolute())
        listening = bind_port()
        port = listening.getsockname()[1]
        orders = {
            "port": port,
            "key": key,
            "data_dir": str(data_dir.absolute()),
            "models": [model],
            "flags": settings,
        }
        self._process = ServerProcess.start(Path(tempfile.mkdtemp(prefix="tinker-sync-")), listening, orders)
        self.app: Application = Forward(port)

    def kill(self) -> None:
        """Kill the process at once, as a crash does."""
        self._process.kill()

    def close(self) -> None:
        """End the process; kill it only if it still runs after `STOP_LIMIT_S` seconds."""
        from tinker_sync.local.launch import STOP_LIMIT_S

        self._process.end(STOP_LIMIT_S)


# ------------------------------------------------------------------------------- requests to another process


_HOST: Final = "127.0.0.1"
# These headers belong to one connection, so they are not forwarded to the next one.
_OF_THE_CONNECTION: Final = frozenset({"connection", "content-length", "transfer-encoding", "expect"})


class Forward(Application):
    """An ASGI application that forwards requests to the server on a port of this machine.

    If no server listens there, or its answer is not HTTP, the application resets the client's connection.

    Args:
        port: the port of the server.
    """

    def __init__(self, port: int) -> None:
        self._port = port

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Forward one request."""
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

    async def _request(self, scope: Message, body: bytes) -> ReplyParser:
        reader, writer = await asyncio.open_connection(_HOST, self._port)
        parser = ReplyParser(scope["method"], max_body_bytes=self.max_body_bytes)
        try:
            writer.write(_encode_head(scope, len(body)) + body)
            while not parser.done:
                data = await reader.read(parser.wants)
                if data:
                    parser.feed(data)
                else:
                    parser.eof()
            return parser
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


def _encode_head(scope: Message, length: int) -> bytes:
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    given = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
    kept = [pair for pair in given if pair[0] not in _OF_THE_CONNECTION]
    own = [("connection", "close"), ("content-length", str(length))]
    return request_head(scope["method"], target.decode("ascii"), [*kept, *own])


async def _send_reply(reply: asyncio.Future[ReplyParser], send: Send) -> None:
    try:
        parser = reply.result()
    except (OSError, MalformedMessage):
        await send({"type": ABORT, "reset": True})
        return
    content = parser.body()
    headers = [(name.lower(), value) for name, value in parser.headers]
    kept = [pair for pair in headers if pair[0] not in _OF_THE_CONNECTION]
    lines = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in kept]
    length = (b"content-length", b"%d" % len(content))
    await send({"type": "http.response.start", "status": parser.status, "headers": [*lines, length]})
    await send({"type": "http.response.body", "body": content})
