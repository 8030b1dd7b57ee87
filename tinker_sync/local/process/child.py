"""`main`: an embedded server in a child process, which ends with the process that started it, its owner.

The orders of the owner come through standard input, see `tinker_sync.local.process.server_process`. A line
after them tells the server to end. If that input ends without the line, the owner has died: the server then
exits at once, so that the next program, which may be the same one again, finds the directory free. The main
thread serves; the thread `tinker-owner` reads standard input.
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
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from tinker_sync.errors import TinkerError

_GRACE_S: Final = 5.0
"""The time for work in progress after the owner has told the server to end."""


def main(orders: dict[str, Any]) -> None:
    """Serve until the owner closes the pipe or ends, or until SIGTERM or SIGINT.

    Report on standard output, once, that the server listens or cannot start.

    Args:
        orders: "place" (the directory of this process, removed at the end), "fd" (the bound socket; None:
            bind "port"), "port", "key", "models", "data_dir" (None: a directory in "place") and, if wanted,
            "flags" (settings), "or_temporary" (True: use a directory in "place" if "data_dir" cannot be used)
            and "most_bytes" (the most bytes of checkpoints that are kept; the oldest ones go first).
    """
    place = Path(orders["place"])
    report = _StartReport()
    watch = _OwnerWatch(lambda: _abort(place))
    watch.start()
    try:
        _serve(orders, place, report, watch)
    except ImportError as problem:
        report.send("missing", str(problem))
    except (TinkerError, ValueError, OSError) as problem:
        report.send("failed", str(problem))
    finally:
        _remove_place(place)
    watch.mark_expected_exit()


def _serve(orders: dict[str, Any], place: Path, report: _StartReport, watch: _OwnerWatch) -> None:
    from tinker_sync.local.process.assembly import KEEP, UnusableDirectory, assemble
    from tinker_sync.local.process.running import run

    descriptor = orders["fd"]
    listening = None if descriptor is None else socket.socket(fileno=descriptor)
    options = {"key": orders["key"], "models": orders["models"], "flags": orders.get("flags")}
    with ExitStack() as parts:
        notices: list[str] = []
        data_dir = Path(orders["data_dir"] or place / "data")
        try:
            most_bytes = orders.get("most_bytes")
            app = parts.enter_context(
                assemble(data_dir, **options, most_bytes=most_bytes, note=notices.append)
            )
        except UnusableDirectory as problem:
            if not orders.get("or_temporary"):
                raise
            notices.append(
                f"the checkpoints of this program's embedded server end with it, because {problem}; "
                f"to keep them, {KEEP}"
            )
            app = parts.enter_context(assemble(place / "data", **options))
        run(
            app,
            host="127.0.0.1",
            port=orders["port"],
            listening=listening,
            ready=lambda _: report.send("ready", "; ".join(notices)),
            begun=watch.on_end,
        )


class _StartReport:
    """A writer of the one line on standard output, which reports the start to the owner.

    From the creation of the writer on, all other output of the process goes to standard error.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = os.dup(1)
        os.dup2(2, 1)

    def send(self, state: str, message: str) -> None:
        """Write the report; `state` is "ready", "missing" (a package) or "failed". Later calls do nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):  # the owner has closed the pipe
                os.write(descriptor, json.dumps({"state": state, "message": message}).encode() + b"\n")
            os.close(descriptor)


class _OwnerWatch:
    """A thread that waits for a line from the owner, and then stops the server. Thread-safe.

    Args:
        abort: called at once if the owner has died, and five seconds after its line unless
            `mark_expected_exit` is called before.
    """

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self._lock = threading.Lock()
        self._gone = False  # guarded by _lock
        self._stop: Callable[[], None] | None = None  # guarded by _lock
        self._exiting = threading.Event()

    def start(self) -> None:
        """Start the thread that reads standard input."""
        threading.Thread(target=self._wait, name="tinker-owner", daemon=True).start()

    def on_end(self, stop: Callable[[], None]) -> None:
        """Call `stop` when the owner tells the server to end, or now if that has happened."""
        with self._lock:
            self._stop, gone = stop, self._gone
        if gone:
            stop()

    def mark_expected_exit(self) -> None:
        """Record that the main thread has finished, so that `abort` is not called."""
        self._exiting.set()

    def _wait(self) -> None:
        line = b""
        with suppress(OSError):
            line = os.read(0, 1024)
        if not line:  # nobody can ask for the answers to the work in progress
            self._abort()
        with self._lock:
            self._gone, stop = True, self._stop
        if stop is not None:
            stop()
        if not self._exiting.wait(_GRACE_S):
            self._abort()


def _remove_place(place: Path) -> None:
    """Remove the directory of this process. It contains the state unless the orders have a "data_dir"."""
    with suppress(OSError):
        os.chdir(tempfile.gettempdir())
    shutil.rmtree(place, ignore_errors=True)


def _abort(place: Path) -> None:
    """Remove the directory of this process, and exit at once.

    Saved state in a "data_dir" stays whole, because every save is on the disk when it returns.
    """
    _remove_place(place)
    sys.stderr.flush()
    os._exit(1)
