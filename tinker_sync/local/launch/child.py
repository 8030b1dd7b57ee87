"""A server that belongs to the process that started it, and ends with it.

What it needs to know has come through the standard input. The end of that input is the end of the server:
then its owner has let go of it, or is no more.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tinker_sync.errors import TinkerError

_GRACE_S: Final = 5.0
"""What is under way may take so long once the owner is gone."""


def main(told: dict[str, Any]) -> None:
    """Serve, and report on the standard output: once that it listens, or why it does not."""
    place = Path(told["place"])
    report = _Report()
    owner = _Owner(lambda: _vanish(place))
    owner.watch()
    try:
        _serve(told, place, report, owner)
    except ImportError as problem:
        report.say("missing", str(problem))
    except (TinkerError, ValueError, OSError) as problem:
        report.say("failed", str(problem))
    finally:
        _tidy(place)
    owner.excuse()


def _serve(told: dict[str, Any], place: Path, report: _Report, owner: _Owner) -> None:
    from tinker_sync.local.launch.assembly import assembled
    from tinker_sync.local.launch.running import run

    descriptor = told["fd"]
    listening = None if descriptor is None else socket.socket(fileno=descriptor)
    data_dir = Path(told["data_dir"] or place / "data")
    with assembled(data_dir, key=told["key"], model=told["model"]) as app:
        run(
            app,
            host="127.0.0.1",
            port=told["port"],
            listening=listening,
            ready=lambda _: report.say("ready", ""),
            begun=owner.on_end,
        )


class _Report:
    """The one line that is said. What others print from now on goes where errors go."""

    def __init__(self) -> None:
        self._descriptor: int | None = os.dup(1)
        os.dup2(2, 1)

    def say(self, state: str, message: str) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):  # nobody listens any more
                os.write(descriptor, json.dumps({"state": state, "message": message}).encode() + b"\n")
            os.close(descriptor)


class _Owner:
    """Notices when the owner has gone. Thread-safe.

    Args:
        otherwise: what to do when everybody was told and the process is still here.
    """

    def __init__(self, otherwise: Callable[[], None]) -> None:
        self._otherwise = otherwise
        self._lock = threading.Lock()
        self._gone = False  # guarded by _lock
        self._stop: Callable[[], None] | None = None  # guarded by _lock
        self._excused = threading.Event()

    def watch(self) -> None:
        """Begin."""
        threading.Thread(target=self._wait, name="tinker-owner", daemon=True).start()

    def on_end(self, stop: Callable[[], None]) -> None:
        """Have this called when the owner goes, at once if it has gone."""
        with self._lock:
            self._stop, gone = stop, self._gone
        if gone:
            stop()

    def excuse(self) -> None:
        """The process is ending by itself."""
        self._excused.set()

    def _wait(self) -> None:
        with suppress(OSError):
            while os.read(0, 1024):
                pass
        with self._lock:
            self._gone, stop = True, self._stop
        if stop is not None:
            stop()
        if not self._excused.wait(_GRACE_S):
            self._otherwise()


def _tidy(place: Path) -> None:
    """Remove the server's own directory, with the state in it if that was nowhere else."""
    with suppress(OSError):
        os.chdir(tempfile.gettempdir())
    shutil.rmtree(place, ignore_errors=True)


def _vanish(place: Path) -> None:
    """The end, whatever is under way: what was acknowledged is safe at every moment."""
    _tidy(place)
    sys.stderr.flush()
    os._exit(1)
