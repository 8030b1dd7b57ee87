"""`Store`: all of the durable state behind one door."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync.local.store.database import Database
from tinker_sync.local.store.errors import StoreError, translated
from tinker_sync.local.store.ledger import Ledger
from tinker_sync.local.store.lock import DirectoryLock
from tinker_sync.local.store.runs import Runs
from tinker_sync.local.store.sessions import Sessions
from tinker_sync.local.store.shelf import Shelf


class Store(Sessions, Runs, Ledger):
    """Sessions, runs, samplers, checkpoints, usage and the audit log of one directory. Thread-safe.

    Calls block until what they say is on the disk, but for `touch_session`, `touch_run`, `record_usage` and
    `audit`, which only remember. Every failure is a `StoreError`.

    Args:
        directory: where everything lies; it is made when it is not there. One process at a time may use it.
        clock: what time it is.

    Raises:
        StoreError: `locked`, `unwritable`, `full`, `damaged`, or `too_new`.

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
        with translated(f"{directory} cannot be used"):
            try:
                self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            except FileExistsError as problem:
                raise NotADirectoryError(problem.errno, "it is no directory") from problem
        self._lock = DirectoryLock(self.directory)
        try:
            self._shelf = Shelf(self.directory)
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
        """Remove what a crash has left: files that no checkpoint owns."""
        with self._database.read("checkpoints could not be listed") as connection:
            known = {row["folder"] for row in connection.execute("SELECT folder FROM checkpoints")}
        with translated(f"{self.directory} could not be swept"):
            self._shelf.sweep(known)

    def close(self) -> None:
        """Write what waits, as far as possible, and let others use the directory. Idempotent."""
        with suppress(StoreError):
            self.flush()
        self._database.close()
        self._lock.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
