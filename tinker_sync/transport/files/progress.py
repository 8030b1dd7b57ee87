"""Progress of a transfer, which a callback worker reports to the user's function, the listener.

A slow listener never slows a transfer down: it gets the newest state when its last call has returned. It gets
each new stage and file without delay, and further bytes at most ten times a second. Any thread may report.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, Literal

from attrs import evolve, frozen

from tinker_sync._base.clock import Clock
from tinker_sync._base.log import Log

Stage = Literal["preparing", "downloading", "uploading", "verifying", "unpacking", "done"]

_EVERY_S: Final = 0.1
_log = Log(__name__)


@frozen(kw_only=True)
class TransferProgress:
    """The state of a download or an upload, as reported to the listener.

    >>> TransferProgress(tinker_path="tinker://r/weights/a", stage="downloading", bytes_done=5).bytes_total
    """

    tinker_path: str
    """The path of the checkpoint; empty for an upload until it ends."""
    stage: Stage
    file: str | None = None
    """The current file."""
    bytes_done: int = 0
    """Transferred bytes of all files, including those left by an earlier attempt."""
    bytes_total: int | None = None
    """Bytes of all files whose size is known; None until a size is known."""
    files_done: int = 0
    files_total: int | None = None
    bytes_resumed: int = 0
    """Bytes left by an earlier attempt."""
    interruptions: int = 0
    """The number of failed attempts that were repeated, such as after a broken connection."""


class ProgressReporter:
    """A reporter of the progress of one transfer to a listener. Thread-safe.

    Args:
        listener: the user's function, or None.
        run: runs a job on a worker.
        clock: the current time.
        start: the first state.
    """

    def __init__(
        self,
        listener: Callable[[TransferProgress], object] | None,
        run: Callable[[Callable[[], object]], object],
        clock: Clock,
        start: TransferProgress,
    ) -> None:
        self._listener = listener
        self._run = run
        self._clock = clock
        self._lock = threading.Lock()
        self._state = start  # guarded by _lock
        self._reported_at = -1.0  # guarded by _lock
        self._pending: TransferProgress | None = None  # guarded by _lock
        self._running = False  # guarded by _lock; a worker is calling the listener

    @property
    def state(self) -> TransferProgress:
        """The current state."""
        with self._lock:
            return self._state

    def move(self, count: int) -> None:
        """Add to the bytes done. The count is negative when bytes have to be sent or fetched again."""
        with self._lock:
            self._set_locked(evolve(self._state, bytes_done=self._state.bytes_done + count), now=False)
        self._report()

    def change(self, **changes: Any) -> None:
        """Set fields of the state, and report it without waiting for the next tenth of a second."""
        with self._lock:
            self._set_locked(evolve(self._state, **changes), now=True)
        self._report()

    def add(self, **counts: int) -> None:
        """Add to fields of the state, and report it without waiting for the next tenth of a second."""
        with self._lock:
            sums: dict[str, Any] = {
                name: (getattr(self._state, name) or 0) + count for name, count in counts.items()
            }
            self._set_locked(evolve(self._state, **sums), now=True)
        self._report()

    def _set_locked(self, state: TransferProgress, *, now: bool) -> None:
        self._state = state
        moment = self._clock.now()
        if self._listener is not None and (now or moment - self._reported_at >= _EVERY_S):
            self._pending, self._reported_at = state, moment

    def _report(self) -> None:
        with self._lock:
            start = self._pending is not None and not self._running
            self._running = self._running or start
        if start:
            try:
                self._run(self._call_listener)
            except RuntimeError:  # the client is closed
                _log.debug("the progress of a transfer is no longer reported: the workers are closed")

    def _call_listener(self) -> None:
        while True:
            with self._lock:
                state, self._pending = self._pending, None
                if state is None:
                    self._running = False
                    return
            try:
                assert self._listener is not None  # noqa: S101  # without a listener nothing is pending
                self._listener(state)
            except Exception:  # noqa: BLE001  # the listener is the user's code
                _log.exception("the progress listener of a transfer failed")
