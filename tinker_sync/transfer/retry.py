"""Failures after which a transfer is attempted again, and the pauses between attempts. Pure."""

from __future__ import annotations

from typing import Final

from tinker_sync._policy import delay_s

# A part fails after this long without a byte: the service is down, or the file is gone.
PATIENCE_S: Final = 300.0
_MAX_REFUSALS: Final = 4


class TryAgain(Exception):
    """A failure after which another attempt may succeed.

    Args:
        message: what happened.
        after_s: the pause the server asked for.
        refused: the address is no longer valid.
    """

    def __init__(self, message: str, *, after_s: float | None = None, refused: bool = False) -> None:
        super().__init__(message)
        self.after_s = after_s
        self.refused = refused


class FileChanged(Exception):
    """The error for a file that has changed on the server or is damaged here, and is fetched again."""


class Attempts:
    """Consecutive failures to fetch one part. Belongs to the thread that fetches it.

    >>> attempts = Attempts(0.0)
    >>> refused = TryAgain("403", refused=True)
    >>> attempts.count_failure(refused, 1.0), attempts.pause_s(refused, 1.0)
    (False, 0.0)
    >>> attempts.count_failure(refused, 2.0), attempts.pause_s(refused, 1.0)
    (False, 1.0)
    """

    def __init__(self, now_s: float) -> None:
        self.progressed = False
        """True if new bytes have arrived since the last failure."""
        self._progressed_at = now_s
        self._failures = 0
        self._refusals = 0

    def count_failure(self, error: Exception, now_s: float) -> bool:
        """Count a failure, and return True when it is the last one allowed."""
        if self.progressed:
            self._progressed_at, self._failures, self._refusals, self.progressed = now_s, 0, 0, False
        else:
            self._failures += 1
        self._refusals += isinstance(error, TryAgain) and error.refused
        return self._refusals >= _MAX_REFUSALS or now_s - self._progressed_at > PATIENCE_S

    def pause_s(self, error: Exception, draw: float) -> float:
        """Return the pause before the next attempt.

        Unless the server asks for a pause, it is 0 after progress and after the first refused address.
        """
        hint_s = error.after_s if isinstance(error, TryAgain) else None
        if not hint_s and (not self._failures or (self._failures == 1 and self._refusals == 1)):
            return 0.0
        return delay_s(self._failures, hint_s=hint_s, draw=draw)
