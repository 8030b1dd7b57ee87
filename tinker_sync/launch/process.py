"""The server's process: started, told what it needs through a pipe, heard, ended.

Its standard input stays open as long as it is wanted; the end of that is the end of the server, so it also
ends with a process that had no time to say so. Its standard output carries one line: that it listens, or why
not.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tinker_sync.errors import ConfigurationError, MissingExtraError, TinkerError

LOG_FILE: Final = "server.log"
_TAIL_CHARACTERS: Final = 2000
# Everything that can be imported here can be imported there, from the same places.
_BOOT: Final = (
    "import json, sys; told = json.loads(sys.stdin.buffer.readline()); sys.path[:] = told.pop('path'); "
    "from tinker_sync.local.launch.child import main; main(told)"
)


class ServerProcess:
    """A running server. Its owner sees to it that one thread at a time comes in."""

    def __init__(self, process: subprocess.Popen[bytes], place: Path) -> None:
        self._process = process
        self._place = place

    @classmethod
    def start(
        cls, place: Path, listening: socket.socket, told: dict[str, Any], limit_s: float
    ) -> ServerProcess:
        """Start one, and return when it listens.

        Args:
            place: its directory, for its log.
            listening: the port it shall have.
            told: what it shall know.
            limit_s: how long it may take.

        Raises:
            MissingExtraError, ConfigurationError: it cannot run, and says why.
        """
        started = cls(_spawned(place, listening), place)
        try:
            started._hand_over({**told, "path": [os.path.abspath(entry) for entry in sys.path]}, listening)
            started._await_ready(limit_s)
        except BaseException:  # also Ctrl-C
            started.end(0)
            raise
        return started

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def end(self, limit_s: float) -> None:
        """Let it end by itself, else end it, and remove what it leaves."""
        _close(self._process)
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._place, ignore_errors=True)

    def obituary(self) -> str:
        """How it ended by itself, and its last words."""
        code = self._process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        words = self._last_words()
        self.end(0)
        return f"the embedded server has ended ({how}); make a new client to start another{words}"

    def forget(self) -> None:
        """In a forked child: it is the parent's. A copy of the pipe would keep it running."""
        _close(self._process)
        self._process.returncode = 0  # nobody here may wait for it

    def _hand_over(self, told: dict[str, Any], listening: socket.socket) -> None:
        if os.name == "nt":  # where no descriptor can be passed on: it binds the port again
            listening.close()
        told["fd"] = None if os.name == "nt" else listening.fileno()
        pipe = self._process.stdin
        assert pipe is not None  # noqa: S101  # it was asked for
        with suppress(BrokenPipeError):  # it is dead, and will be asked why
            pipe.write(json.dumps(told).encode() + b"\n")
            pipe.flush()

    def _await_ready(self, limit_s: float) -> None:
        pipe = self._process.stdout
        assert pipe is not None  # noqa: S101  # it was asked for
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
                f"the embedded server did not start (exit code {code}){self._last_words()}"
            )
        said = json.loads(line)
        if said["state"] != "ready":
            raise _problem(said)

    def _last_words(self) -> str:
        try:
            text = (self._place / LOG_FILE).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""
        return f". It said:\n{text[-_TAIL_CHARACTERS:]}" if text else ""


def _spawned(place: Path, listening: socket.socket) -> subprocess.Popen[bytes]:
    try:
        with (place / LOG_FILE).open("wb") as log:
            return subprocess.Popen(  # noqa: S603  # our own interpreter and code
                [sys.executable, "-c", _BOOT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                cwd=place,  # nobody else can put modules there
                pass_fds=() if os.name == "nt" else (listening.fileno(),),
                # Ctrl-C in a terminal is for the program: its clients still have to say goodbye.
                start_new_session=True,
            )
    except OSError as problem:
        raise ConfigurationError(f"the embedded server could not be started: {problem}") from problem


def _problem(said: dict[str, Any]) -> TinkerError:
    if said["state"] == "missing":
        return MissingExtraError("local", feature=f"the embedded server ({said['message']})")
    return ConfigurationError(f"the embedded server could not be started: {said['message']}")


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
