"""The keeper: a small child process that sends a session's heartbeats while this process cannot.

The threads of this process send no heartbeat while one of them holds the interpreter lock in a long call of a
C library, or while the process is stopped. The keeper then sends them. If this process dies, the keeper
continues for a limited time, so that `ServiceClient.attach` finds the session alive.

This process reports each heartbeat that succeeds to the keeper through a pipe, and the keeper sends
heartbeats only after a silence. So the server gets no more heartbeats than without a keeper, unless those of
this process fail. While this process lives, it alone decides about the loss of a session. The keeper gets the
headers, and the key among them, through the pipe; its command line and its environment have no key. The
keeper writes nothing.

The keeper cannot renew tokens, and does not follow redirects.

Threads: one thread opens the session and starts the keeper; then the thread of the heartbeats uses it.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tinker_sync.errors import TinkerError
from tinker_sync.runtime import _keeper_process

# A heartbeat of the owner may be late by this part of a period before the keeper sends one.
_LATE: Final = 0.5
# The environment may hold keys, so the keeper gets only the variables that an interpreter and its TLS need.
_NEEDED: Final = (
    "PATH", "SYSTEMROOT", "TMPDIR", "TEMP", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH",
    "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip
# The system writes up to this many bytes to a pipe completely, or not at all.
_ATOMIC: Final = 4096

_log = logging.getLogger("tinker_sync.session")


class Keeper:
    """The owner's side of the keeper process of one session: starts the process, informs it and ends it.

    Args:
        headers: returns the headers of a heartbeat that is sent now; None if the client is gone.
        request: the request and its route; see `transport.http.Http.describe`.
        policy: the entries of `runtime.heartbeat.policy()`, and "always_offered" as in `Heartbeat`.
        period_s: the time between two heartbeats.
        outlive_s: how long the keeper continues after the death of this process.
    """

    def __init__(
        self,
        headers: Callable[[], dict[str, str] | None],
        request: Mapping[str, Any],
        policy: Mapping[str, Any],
        *,
        period_s: float,
        outlive_s: float,
    ) -> None:
        self._headers = headers
        times = {"period_s": period_s, "silence_s": period_s * (1 + _LATE), "outlive_s": outlive_s}
        self._orders = {**request, **policy, **times}
        self._known: dict[str, str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The id of the keeper process; None before `start`, if that failed, and after `end` or `forget`."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the keeper process. If that fails, log it: the session works without a keeper."""
        try:
            self._known = self._headers()
            self._process = subprocess.Popen(  # noqa: S603  # this interpreter, with code of this package
                [sys.executable, "-I", "-S", str(Path(_keeper_process.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd=os.path.abspath(os.sep),  # so that the keeper keeps no folder in use
                env={name: os.environ[name] for name in _NEEDED if name in os.environ},
                # Signals for the terminal or the group of the owner do not reach it.
                start_new_session=True,
            )
        except (OSError, ValueError, TinkerError) as error:
            _log.warning("the keeper could not be started, heartbeats depend on this process: %s", error)
            return
        self._write({**self._orders, "headers": self._known})
        if os.name != "nt" and self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)

    def note_beat(self) -> None:
        """Report to the keeper that this process has sent a heartbeat, with the headers if they changed.

        If the keeper has ended, log that and forget it.
        """
        process = self._process
        if process is None:
            return
        if process.poll() is not None:
            _log.warning(
                "the keeper has ended (exit code %d), heartbeats depend on this process", process.returncode
            )
            self.forget()
            return
        try:
            headers = self._headers()
        except TinkerError as error:  # the next heartbeat of this process fails with it too
            _log.debug("the keeper gets no new key: %s", error)
            headers = None
        changed = headers is not None and headers != self._known
        if changed:
            self._known = headers
        self._write({"headers": headers} if changed else {})

    def end(self) -> None:
        """Kill the keeper process, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # it has nothing to finish
            process.wait()
            _close_pipe(process)

    def forget(self) -> None:
        """Close the pipe without killing the keeper: in a forked child, or after the keeper has ended.

        When all copies of the pipe are closed, the keeper takes its owner for dead. A copy that stays open in
        a child would prevent that.
        """
        process, self._process = self._process, None
        if process is not None:
            _close_pipe(process)
            if process.returncode is None:
                process.returncode = 0  # only the owner may wait for it

    def _write(self, line: dict[str, Any]) -> None:
        octets = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if len(octets) > _ATOMIC and line.keys() == {"headers"}:
            _log.warning("the keeper cannot take the renewed key: it is too long")
            octets = b"{}\n"
        process = self._process
        assert process is not None  # noqa: S101  # the callers have checked this
        assert process.stdin is not None  # noqa: S101  # opened by `start`
        # After an error the keeper has ended, which the next heartbeat finds, or it is stopped and its pipe
        # is full.
        with suppress(OSError):
            process.stdin.write(octets)


def _close_pipe(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
