"""Start and stop of a server: in a thread of this process, or on the event loop of its own process.

The coroutine `serve` starts the application (ASGI lifespan), listens, waits for the signal to stop, and shuts
down. `ServerThread` runs it in a thread, for tests and short programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tinker_sync.local.server.http1 import HttpServer

if TYPE_CHECKING:
    from tinker_sync.local.server.http1 import Asgi, Message, Receive, Send

LOOPBACK = "127.0.0.1"
START_S = 60.0
STOP_S = 30.0
BODY_LIMIT = "max_body_bytes"
"""Key of the lifespan's state under which an application puts the limit that it sets for bodies."""
KEEPS_BODY = "keeps_body"
"""Key of the lifespan's state under which an application puts a function of a request's scope. If it returns
False, the application answers without the body, and the server drops it."""
_SPARE_BYTES = 256 * 1024 * 1024
"""The most bytes by which bodies that the server receives may exceed the application's limit, so that a
client whose body is too large reads the refusal. Beyond it, the connection ends while the client sends."""


async def complete_lifespan(receive: Receive, send: Send) -> None:
    """Answer the lifespan events of ASGI for an application that does nothing at start-up and shutdown."""
    for kind in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{kind}.complete"})


class _Lifespan:
    """The start-up and shutdown of the application, by the lifespan protocol of ASGI."""

    def __init__(self, app: Asgi) -> None:
        self.state: dict[str, Any] = {}
        self._app = app
        self._asked: asyncio.Queue[Message] = asyncio.Queue()
        self._told: asyncio.Queue[Message] = asyncio.Queue()
        self._task: asyncio.Task[Any] | None = None

    async def _run(self, scope: Message) -> None:
        await self._app(scope, self._asked.get, self._told.put)

    async def _ask(self, kind: str) -> None:
        await self._asked.put({"type": f"lifespan.{kind}"})
        told = asyncio.ensure_future(self._told.get())
        assert self._task is not None  # noqa: S101
        await asyncio.wait({told, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if not told.done():
            told.cancel()
            self._task.result()  # raises the exception that ended it
            return
        event = told.result()
        if event["type"].endswith(".failed"):
            raise RuntimeError(f"the application's {kind} failed: {event.get('message', '')}")

    async def startup(self) -> None:
        scope: Message = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": self.state}
        self._task = asyncio.ensure_future(self._run(scope))
        await self._ask("startup")

    async def shutdown(self) -> None:
        await self._ask("shutdown")
        if self._task is not None:
            await self._task


async def serve(
    app: Asgi,
    *,
    stopped: asyncio.Event,
    host: str = LOOPBACK,
    port: int = 0,
    ready: Callable[[int], None] | None = None,
    listening: socket.socket | None = None,
) -> None:
    """Serve an application until `stopped` is set. Then let it answer held polls, and close the connections.

    Args:
        app: the application.
        stopped: the event that ends the server.
        host: the address to listen on.
        port: the port, or 0 for a free one.
        ready: receives the port when the server accepts requests.
        listening: a bound socket, in place of `host` and `port`.

    Raises:
        OSError: the address cannot be used.
        Exception: what the application raises at its start-up or shutdown.
    """
    lifespan = _Lifespan(app)
    await lifespan.startup()
    server = HttpServer(
        app,
        max_body_bytes=lifespan.state.get(BODY_LIMIT, 0) + _SPARE_BYTES,
        keeps_body=lifespan.state.get(KEEPS_BODY, lambda _: True),
    )
    try:
        actual = await server.start(host, port, listening)
        if ready is not None:
            ready(actual)
        await stopped.wait()
    finally:
        await lifespan.shutdown()
        await server.stop()


class ServerThread:
    """A server in a thread of this process. Thread-safe; `stop` may be called more than once.

    Args:
        app: the application.
        key: the key for clients, as an attribute for tests.
        host: the address to listen on.
        port: the port, or 0 for a free one.

    Example::

        with ServerThread(build(store, host, key="tml-test"), key="tml-test") as server:
            client = ServiceClient(base_url=server.url, api_key=server.key)
    """

    def __init__(self, app: Asgi, *, key: str = "", host: str = LOOPBACK, port: int = 0) -> None:
        self.key = key
        self.port = port
        self._app = app
        self._host = host
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="tinker-server", daemon=True)

    @property
    def url(self) -> str:
        """The base URL for clients."""
        return f"http://{self._host}:{self.port}"

    def start(self) -> ServerThread:
        """Start the server, and return when it accepts requests. Call this once.

        Raises:
            OSError: the port is taken.
            Exception: what the application raises at its start-up.
            TimeoutError: the server does not listen within `START_S`.
        """
        self._thread.start()
        if not self._ready.wait(START_S):
            raise TimeoutError("the server did not start")
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    def stop(self) -> None:
        """Stop the server: close its connections and end its thread. Wait for this at most `STOP_S`."""
        if self._loop is not None and self._stopped is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has just ended by itself
                self._loop.call_soon_threadsafe(self._stopped.set)
        if self._thread.ident is not None:
            self._thread.join(STOP_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as failure:  # noqa: BLE001  # `start` raises it
            self._failure = failure
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        await serve(self._app, stopped=self._stopped, host=self._host, port=self.port, ready=self._listening)

    def _listening(self, port: int) -> None:
        self.port = port
        self._ready.set()

    def __enter__(self) -> ServerThread:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
