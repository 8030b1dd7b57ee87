"""`Store`: the durable state of one directory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync.local.store.database import Database
from tinker_sync.local.store.errors import StoreError, translate_errors
from tinker_sync.local.store.folders import FolderStore
from tinker_sync.local.store.ledger import Ledger
from tinker_sync.local.store.lock import DirectoryLock
from tinker_sync.local.store.runs import Runs
from tinker_sync.local.store.sessions import Sessions


class Store(Sessions, Runs, Ledger):
    """Sessions, runs, samplers, checkpoints, usage and the audit log of one directory. Thread-safe.

    Writing calls return when their data is on the disk. The exceptions are `touch_session`, `touch_run`,
    `record_usage` and `audit`: they return at once, and a later write includes their data. Every failure is a
    `StoreError`.

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
