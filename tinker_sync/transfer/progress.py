"""How a transfer goes, told to whoever asked, in plain values and on a worker.

A slow listener never slows a transfer down: it hears of the newest state when it is ready for one, at most
ten times a second, and of the last state in any case.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final, Literal

from attrs import evolve, frozen

from tinker_sync._clock import Clock

Stage = Literal["preparing", "downloading", "uploading", "verifying", "unpacking", "done"]

_EVERY_S: Final = 0.1
_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class TransferProgress:
    """Where a download or an upload is.

    >>> TransferProgress(tinker_path="tinker://r/weights/a", stage="downloading", bytes_done=5).bytes_total
    """

    tinker_path: str
    """Of the checkpoint; empty for one that is still to be."""
    stage: Stage
    file: str | None = None
    """The file that is being worked on."""
    bytes_done: int = 0
    """Of all files, those included that were there from an earlier try."""
    bytes_total: int | None = None
    """Of all files whose size is known by now; None before that."""
    files_done: int = 0
    files_total: int | None = None
    bytes_resumed: int = 0
    """What an earlier try had left."""
    interruptions: int = 0
    """How often a connection broke or an address had to be signed anew."""


class Teller:
    """Tells a listener of a transfer. Thread-safe.

    Args:
        listener: the user's; None for nobody.
        run: runs a job on a worker.
        clock: what time it is.
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
        self._told_at = -1.0  # guarded by _lock
        self._pending: TransferProgress | None = None  # guarded by _lock
        self._running = False  # guarded by _lock; whether a worker is telling

    @property
    def state(self) -> TransferProgress:
        """How things stand."""
        with self._lock:
            return self._state

    def moved(self, count: int) -> None:
        """So many bytes more are done; or, where some have to be done again, fewer."""
        with self._lock:
            self._set_locked(evolve(self._state, bytes_done=self._state.bytes_done + count), now=False)
        self._tell()

    def interrupted(self) -> None:
        """A connection broke, or an address was refused."""
        with self._lock:
            self._set_locked(evolve(self._state, interruptions=self._state.interruptions + 1), now=True)
        self._tell()

    def change(self, **changes: Any) -> None:
        """Something else is otherwise now."""
        with self._lock:
            self._set_locked(evolve(self._state, **changes), now=True)
        self._tell()

    def add(self, **counts: int) -> None:
        """Count something up."""
        with self._lock:
            sums: dict[str, Any] = {
                name: (getattr(self._state, name) or 0) + count for name, count in counts.items()
            }
            self._set_locked(evolve(self._state, **sums), now=True)
        self._tell()

    def _set_locked(self, state: TransferProgress, *, now: bool) -> None:
        self._state = state
        moment = self._clock.now()
        if self._listener is not None and (now or moment - self._told_at >= _EVERY_S):
            self._pending, self._told_at = state, moment

    def _tell(self) -> None:
        with self._lock:
            start = self._pending is not None and not self._running
            self._running = self._running or start
        if start:
            try:
                self._run(self._work)
            except RuntimeError:  # the workers are closed: nobody hears of it any more
                _log.debug("nobody is left to tell of a transfer")

    def _work(self) -> None:
        while True:
            with self._lock:
                state, self._pending = self._pending, None
                if state is None:
                    self._running = False
                    return
            try:
                assert self._listener is not None  # noqa: S101  # else nothing is ever pending
                self._listener(state)
            except Exception:  # noqa: BLE001  # it is the user's
                _log.exception("a listener to the progress of a transfer failed")
