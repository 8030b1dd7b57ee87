"""Serving until somebody says that it is enough. Runs in the thread that calls it."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinker_sync.local.server.http1 import Asgi

Stop = Callable[[], None]


def run(
    app: Asgi,
    *,
    host: str,
    port: int,
    listening: socket.socket | None = None,
    ready: Callable[[int], None],
    begun: Callable[[Stop], object] | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, or until somebody calls what `begun` was given.

    Args:
        app: the application.
        host, port: where to listen.
        listening: a socket that has an address already, instead of these.
        ready: called with the port, once requests are taken.
        begun: given what ends it; any thread may call that, at any time.
    """
    from tinker_sync.local.server.serving import serve

    async def main() -> None:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            _end_by_signal(loop, stopped)
        if begun is not None:
            begun(lambda: _from_thread(loop, stopped))
        await serve(app, stopped=stopped, host=host, port=port, ready=ready, listening=listening)

    asyncio.run(main())


def _end_by_signal(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, stopped.set)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: _from_thread(loop, stopped))


def _from_thread(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(stopped.set)
