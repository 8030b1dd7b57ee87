"""`Store`: the durable state of one directory, and the lock that keeps it to one process.

The operating system releases the lock when the process ends or is killed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync.local.locks import try_lock
from tinker_sync.local.store.database import Database
from tinker_sync.local.store.errors import StoreError, translate_errors
from tinker_sync.local.store.folders import FolderStore
from tinker_sync.local.store.ledger import Ledger
from tinker_sync.local.store.runs import Runs
from tinker_sync.local.store.sessions import Sessions


class DirectoryLock:
    """An exclusive lock on a directory, held until `release`. Even the same process cannot lock it again.

    Raises:
        StoreError: of the kind `locked`, or a failure of the disk.

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
        if not try_lock(self._file):
            holder = _holder(self._file)
            self._file.close()
            raise StoreError(
                "locked", f"another server{holder} uses {directory}; end that one, or use another directory"
            )
        # If this write fails, as on a full disk, another server's error message lacks the process id.
        with suppress(OSError):
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


class Store(Sessions, Runs, Ledger):
    """Sessions, runs, samplers, checkpoints, usage and the audit log of one directory. Thread-safe.

    Writing calls return when their data is on the disk. The exceptions are `touch_session`, `touch_run`,
    `record_usage` and `audit`: they return at once, and a later write includes their data. Failures of the
    disk and of the database are `StoreError`s.

    Args:
        directory: the data directory, created if it is missing. One process at a time may use it.
        clock: the source of the present time.

    Raises:
        StoreError: of the kind `locked`, `unwritable`, `full`, `damaged`, or `too_new`.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with Store(Path(folder.name) / "data") as store:
    ...     store.add_session("s-1", tags=["night"]).tags
    ('night',)
    >>> with Store(Path(folder.name) / "data") as store:
    ...     [row.session_id for row in store.list_sessions(10, 0)[0]]
    ['s-1']
    >>> folder.cleanup()
    """

    def __init__(self, directory: Path, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.directory = Path(directory)
        with translate_errors(f"{directory} cannot be used"):
            try:
                self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            except FileExistsError as problem:
                raise NotADirectoryError(problem.errno, "it is not a directory") from problem
        self._lock = DirectoryLock(self.directory)
        try:
            self._folders = FolderStore(self.directory)
            super().__init__(Database(self.directory / "state.sqlite"), clock)
            try:
                self._sweep_unknown()
            except BaseException:
                self._database.close()
                raise
        except BaseException:
            self._lock.release()
            raise

    def _sweep_unknown(self) -> None:
        """Remove the folders without a checkpoint, which a crash may have left."""
        with self._database.read("checkpoints could not be listed") as connection:
            known = {row["folder"] for row in connection.execute("SELECT folder FROM checkpoints")}
        with translate_errors(f"{self.directory} could not be swept"):
            self._folders.sweep(known)

    def close(self) -> None:
        """Write pending data if the disk allows it, and release the directory. Idempotent."""
        with suppress(StoreError):
            self.flush()
        self._database.close()
        self._lock.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
