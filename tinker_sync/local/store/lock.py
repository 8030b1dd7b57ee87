"""An exclusive lock on a directory; the operating system releases it when the process ends or is killed."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from tinker_sync.local.store.errors import StoreError, translate_errors


class DirectoryLock:
    """An exclusive lock on a directory, held until `release`. Even the same process cannot lock it again.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> lock = DirectoryLock(Path(folder.name))
    >>> DirectoryLock(Path(folder.name))
    Traceback (most recent call last):
        ...
    tinker_sync.local.store.errors.StoreError: another server (process ...) uses ...
    >>> lock.release(); folder.cleanup()
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "lock"
        with translate_errors(f"{directory} cannot be used"):
            self._file = path.open("a+b")
        if not _try_lock(self._file):
            holder = _holder(self._file)
            self._file.close()
            raise StoreError(
                "locked", f"another server{holder} uses {directory}; end that one, or use another directory"
            )
        with suppress(
            OSError
        ):  # without the process id, as on a full disk, the other server's error message lacks it
            self._file.truncate(0)
            self._file.write(str(os.getpid()).encode())
            self._file.flush()

    def release(self) -> None:
        """Release the directory. Idempotent."""
        with suppress(OSError):  # an unwritten process id is flushed here
            self._file.close()


def _holder(file: BinaryIO) -> str:
    with suppress(OSError, ValueError):
        file.seek(0)
        return f" (process {int(file.read(20))})"
    return ""


if sys.platform == "win32":
    import msvcrt

    def _try_lock(file: BinaryIO) -> bool:
        # Lock a byte far beyond the end, so that other processes can read the process id.
        file.seek(1 << 30)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(file: BinaryIO) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True
