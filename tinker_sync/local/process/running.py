"""`run`: serve an ASGI application until a signal or another thread stops it.

The event loop runs in the thread that calls `run`.
"""

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
    """Serve an application until SIGTERM, Ctrl-C, or a call of the function that `begun` receives.

    Signals stop the application only if the main thread calls this function.

    Args:
        app: the application.
        host, port: the address to listen on.
        listening: a bound socket to use instead of `host` and `port`.
        ready: called with the port when the server accepts requests.
        begun: called before the server listens, with a function that stops the server. Any thread may call
            that function at any time.

    Raises:
        OSError: the address cannot be used.
    """
    from tinker_sync.local.server.serving import serve

    async def main() -> None:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            _stop_on_signals(loop, stopped)
        if begun is not None:
            begun(lambda: _stop_from_thread(loop, stopped))
        await serve(app, stopped=stopped, host=host, port=port, ready=ready, listening=listening)

    asyncio.run(main())


def _stop_on_signals(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, stopped.set)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: _stop_from_thread(loop, stopped))


def _stop_from_thread(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(stopped.set)
