"""`ServerProcess`: the child process of an embedded server, started and ended.

The child reads its orders from standard input: one line of JSON, so that no key appears in a command line.
The owner then keeps the pipe open. When the pipe closes, the server ends, so it also ends if its owner is
killed. The child writes at most one line to standard output: the report that the server listens, or the
reason why it does not.

One thread at a time may use a `ServerProcess`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tinker_sync.errors import ConfigurationError, MissingExtraError, TinkerError

LOG_FILE: Final = "server.log"
FAREWELL: Final = b"end\n"
"""What the owner writes before it closes the pipe, so that the child can tell this from the owner's death."""
START_LIMIT_S: Final = 60.0
_TAIL_CHARACTERS: Final = 2000


def interpreter_command(module: str) -> list[str]:
    """Return a command that runs `main(orders)` of a module in a new interpreter.

    The orders come as the first line of its standard input, see `encode_orders`. The new interpreter imports
    modules from the same places as this one.

    >>> interpreter_command("tinker_sync.local.process.child")[1]
    '-c'
    """
    code = (
        "import json, sys; orders = json.loads(sys.stdin.buffer.readline()); "
        f"sys.path[:] = orders.pop('path'); from {module} import main; main(orders)"
    )
    return [sys.executable, "-c", code]


def encode_orders(orders: dict[str, Any]) -> bytes:
    """Return the line of standard input for a command of `interpreter_command`.

    It has the orders and the places from which this process imports modules, as JSON.

    >>> encode_orders({"port": 1}).endswith(b"\\n")
    True
    """
    path = [os.path.abspath(entry) for entry in sys.path]
    return json.dumps({**orders, "path": path}).encode() + b"\n"


class ServerProcess:
    """The child process in which an embedded server runs. Not thread-safe."""

    def __init__(self, process: subprocess.Popen[bytes], place: Path) -> None:
        self._process = process
        self._place = place
        self.notice = ""
        """What the user must know of the directory: that it cannot be used, or what was deleted in it."""

    @classmethod
    def start(
        cls,
        place: Path,
        listening: socket.socket,
        orders: dict[str, Any],
        limit_s: float = START_LIMIT_S,
        *,
        inherited: Sequence[int] = (),
    ) -> ServerProcess:
        """Start a child process and return when it listens.

        Args:
            place: an existing directory for the child's log, and for its state if the orders name no
                "data_dir"; `end` removes it, and so does a start that fails.
            listening: the bound socket that the child takes over. This method closes it.
            orders: the arguments of `tinker_sync.local.process.child.main`, without "place" and "fd".
            limit_s: the longest time for the start.
            inherited: descriptors that the child keeps open, except on Windows.

        Raises:
            MissingExtraError: a package that the server needs is not installed.
            ConfigurationError: the child cannot be started, cannot serve, or does not listen within
                `limit_s`; the text has the reason.
        """
        # Close the socket here: otherwise connections would still be accepted after the end of the child.
        with listening:
            try:
                child = cls(_spawn(place, listening, inherited), place)
            except BaseException:
                shutil.rmtree(place, ignore_errors=True)
                raise
            try:
                child._hand_over({**orders, "place": str(place)}, listening)
                child._await_ready(limit_s)
            except BaseException:  # also Ctrl-C
                child.end(0)
                raise
        return child

    @property
    def alive(self) -> bool:
        """True while the child process runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """The id of the child process."""
        return self._process.pid

    def end(self, limit_s: float) -> None:
        """Tell the child to end, wait for its end, and remove its directory.

        A child that still runs after `limit_s` seconds is killed.
        """
        with suppress(OSError, ValueError):  # the child has ended, or the pipe is closed
            if self._process.stdin is not None:
                self._process.stdin.write(FAREWELL)
        _close_pipes(self._process)
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._place, ignore_errors=True)

    def kill(self) -> None:
        """Kill the child at once, as a crash does, and remove its directory."""
        self._process.kill()
        self.end(0)

    def summarize_exit(self) -> str:
        """Return the error message for a child that has ended by itself, and remove its directory.

        The message has the exit code and the tail of the log.
        """
        code = self._process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        tail = self._read_log_tail()
        self.end(0)
        return f"the embedded server has ended ({how}); make a new client to start another{tail}"

    def forget(self) -> None:
        """Drop the child in a forked process. Close the copied pipe, which would keep the child alive."""
        _close_pipes(self._process)
        self._process.returncode = 0  # only the parent may wait for it

    def _hand_over(self, orders: dict[str, Any], listening: socket.socket) -> None:
        if os.name == "nt":  # Windows cannot pass descriptors to a child, so the child binds the port again
            listening.close()
        orders["fd"] = None if os.name == "nt" else listening.fileno()
        pipe = self._process.stdin
        assert pipe is not None  # noqa: S101  # opened by _spawn
        with suppress(BrokenPipeError):  # the child has ended; _await_ready finds out why
            pipe.write(encode_orders(orders))
            pipe.flush()

    def _await_ready(self, limit_s: float) -> None:
        pipe = self._process.stdout
        assert pipe is not None  # noqa: S101  # opened by _spawn
        watchdog = threading.Timer(limit_s, self._process.kill)
        watchdog.name, watchdog.daemon = "tinker-launch", True
        watchdog.start()
        try:
            line = pipe.readline()
        finally:
            watchdog.cancel()
            watchdog.join()
        if not line:
            self._process.kill()
            code = self._process.wait()
            raise ConfigurationError(
                f"the embedded server did not start (exit code {code}){self._read_log_tail()}"
            )
        report = json.loads(line)
        if report["state"] != "ready":
            raise _make_error(report)
        self.notice = report["message"]

    def _read_log_tail(self) -> str:
        try:
            text = (self._place / LOG_FILE).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""
        return f". The end of its log:\n{text[-_TAIL_CHARACTERS:]}" if text else ""


def _spawn(place: Path, listening: socket.socket, inherited: Sequence[int]) -> subprocess.Popen[bytes]:
    try:
        with (place / LOG_FILE).open("wb") as log:
            return subprocess.Popen(  # noqa: S603  # this interpreter, with code of this package
                interpreter_command("tinker_sync.local.process.child"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                cwd=place,  # other users cannot put modules there
                pass_fds=() if os.name == "nt" else (listening.fileno(), *inherited),
                # So that Ctrl-C in a terminal reaches only the program, whose clients need the server to end
                # their sessions.
                start_new_session=True,
            )
    except OSError as problem:
        raise ConfigurationError(f"the embedded server could not be started: {problem}") from problem


def _make_error(report: dict[str, Any]) -> TinkerError:
    if report["state"] == "missing":
        return MissingExtraError("local", feature=f"the embedded server ({report['message']})")
    return ConfigurationError(f"the embedded server could not be started: {report['message']}")


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
