"""The embedded server in a process of its own, and the way to it: what a test can kill.

Faults and the memory of calls stay in the test's process: it takes the requests, and hands each on over a
connection of its own. The process is told everything through its standard input, and ends with that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tinker_sync.errors import ConfigurationError

if TYPE_CHECKING:
    from tinker_sync.local.server.http1 import Asgi

# Everything that can be imported here can be imported there, from the same places.
_BOOT: Final = (
    "import json, sys; told = json.loads(sys.stdin.buffer.readline()); sys.path[:] = told.pop('path'); "
    "from tinker_sync.testing._process import main; main(told)"
)
_END_S: Final = 10.0


class Separate:
    """A server process; its application hands requests on. Arguments as for `Embedded`. For one owner."""

    def __init__(self, *, model: str, key: str, data_dir: Path, settings: dict[str, Any]) -> None:
        from tinker_sync.testing._forward import Forward

        self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and code
            [sys.executable, "-c", _BOOT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        told = {"model": model, "key": key, "data_dir": str(data_dir), "settings": settings}
        path = [os.path.abspath(entry) for entry in sys.path]
        try:
            self.app: Asgi = Forward(self._hand_over({**told, "path": path}))
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def _hand_over(self, told: dict[str, Any]) -> int:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None  # noqa: S101  # both were asked for
        assert stdout is not None  # noqa: S101
        stdin.write(json.dumps(told).encode() + b"\n")
        line = stdout.readline()
        if not line:
            raise ConfigurationError(
                "the server's process did not start; its own words are on standard error"
            )
        return int(line)

    def kill(self) -> None:
        """End it at once, as a crash does."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """End it in order."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main(told: dict[str, Any]) -> None:
    """Serve until the standard input ends; the port is the one line on the standard output."""
    import threading

    from tinker_sync.local.server.serving import ServerThread
    from tinker_sync.testing._embedded import Embedded

    embedded = Embedded(**{**told, "data_dir": Path(told["data_dir"])})
    with ServerThread(embedded.app, key=told["key"]) as server:
        sys.stdout.write(f"{server.port}\n")
        sys.stdout.flush()
        # On a thread that nothing waits for: an interpreter cannot end while it reads.
        ended = threading.Event()
        threading.Thread(target=_await_end, args=(ended,), daemon=True).start()
        ended.wait()
    embedded.close()


def _await_end(ended: Any) -> None:
    try:
        while os.read(0, 1024):
            pass
    finally:
        ended.set()
