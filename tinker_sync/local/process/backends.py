"""The two kinds of servers of `tinker_sync.testing.LocalServer`: in this process, and in a child process.

Each has an ASGI application `app`, which `LocalServer` wraps to apply faults and record calls.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinker_sync.local.server.http1 import Asgi


class ThreadBackend:
    """A server in this process: its application, with the store that it uses. Not thread-safe.

    Args:
        model: the base model, see `tinker_sync.local.process.models`.
        key: the key that clients send.
        data_dir: the directory for the state.
        settings: settings of the server, by name, see `tinker_sync.local.server.flags`.

    Raises:
        InvalidInputError: there is no such model.
        ConfigurationError: the directory or a setting cannot be used.
    """

    def __init__(self, *, model: str, key: str, data_dir: Path, settings: dict[str, Any]) -> None:
        from tinker_sync.local.process.assembly import assemble
        from tinker_sync.local.process.models import load_base_model

        load_base_model(model)  # so that a wrong model is reported as an argument, not as a setting
        self._parts = ExitStack()
        self.app: Asgi = self._parts.enter_context(
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
        from tinker_sync.local.process.forward import Forward
        from tinker_sync.local.process.server import bind_port
        from tinker_sync.local.process.server_process import ServerProcess

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
        self.app: Asgi = Forward(port)

    def kill(self) -> None:
        """Kill the process at once, as a crash does."""
        self._process.kill()

    def close(self) -> None:
        """End the process; kill it only if it still runs after `STOP_LIMIT_S` seconds."""
        from tinker_sync.local.process.server import STOP_LIMIT_S

        self._process.end(STOP_LIMIT_S)
