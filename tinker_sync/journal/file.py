"""`JournalFile`: lines of JSON in a file, appended one by one. Thread-safe; one process at a time."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any, Final

from tinker_sync.errors import JournalError

_HEADER: Final = {"journal": 1}
_HEAD: Final = b'{"journal":1}\n'

Line = dict[str, Any]


class JournalFile:
    """The open file of a journal.

    An incomplete last line is removed: the process ended while it wrote the line, so it had not yet done what
    follows the line, such as sending a request. A damaged line before the last one is an error.

    Args:
        path: the file; it is created if missing, readable only by its owner.

    Raises:
        JournalError: another process uses the file, or it is not a journal.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._process = os.getpid()
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise JournalError(f"the journal {path} cannot be opened: {error.strerror}") from error
        try:
            _claim(self._descriptor, path)
            self.lines = self._read()
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, line: Line, *, sync: bool = False) -> None:
        """Append a line. When this method returns, the line survives a crash of the process.

        Args:
            line: the content of the line.
            sync: also wait until the line is on the disk.

        Raises:
            JournalError: the line cannot be written, or this process is a fork of the owner of the file.
        """
        octets = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if os.getpid() != self._process:
            raise JournalError("a forked process cannot write the journal of its parent")
        with self._lock:
            try:
                # One system call writes all or nothing when the process crashes. A partial write means a full
                # disk.
                written = os.write(self._descriptor, octets)
                if sync:
                    os.fsync(self._descriptor)
            except OSError as error:
                raise JournalError(f"the journal {self.path} cannot be written: {error}") from error
        if written != len(octets):
            raise JournalError(f"the journal {self.path} cannot be written: the disk is full")

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def renew_after_fork(self) -> None:
        """Close the child's copy of the descriptor, which would hold the lock after the parent's end."""
        self._lock = threading.Lock()
        self.close()

    def _read(self) -> list[Line]:
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            raise JournalError(f"{self.path} is no file")
        raw = self.path.read_bytes()
        whole, _, torn = raw.rpartition(b"\n")
        if not (raw + b"\n").startswith(_HEAD) and not _HEAD.startswith(raw):
            raise JournalError(f"{self.path} is no journal, or one of a newer version")
        lines = [self._parse(number, text) for number, text in enumerate(whole.split(b"\n"), 1) if text]
        if torn:
            os.ftruncate(self._descriptor, len(raw) - len(torn))
        if not lines:
            self.append(_HEADER, sync=True)
        return lines[1:]

    def _parse(self, number: int, text: bytes) -> Line:
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            raise JournalError(f"line {number} of the journal {self.path} is damaged")
        return line


def _claim(descriptor: int, path: Path) -> None:
    """Lock the file until it is closed or the process ends.

    Raises:
        JournalError: another process has the lock.
    """
    try:
        import fcntl
    except ImportError:  # this system has no such locks
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise JournalError(f"another process uses the journal {path}") from error
