"""Trying again: why, how long after, and when no more."""

from __future__ import annotations

from typing import Final

from tinker_sync.transport.backoff import delay_s

# Without a byte for so long, we give up: the service has been down for that long, or the file is not there.
PATIENCE_S: Final = 300.0
_MAX_REFUSALS: Final = 4


class Again(Exception):
    """The try has failed; another may not.

    Args:
        message: what happened.
        after_s: the pause the server asked for.
        refused: the address is good no more.
    """

    def __init__(self, message: str, *, after_s: float | None = None, refused: bool = False) -> None:
        super().__init__(message)
        self.after_s = after_s
        self.refused = refused


class Changed(Exception):
    """What the server has now is another file, or what we have is damaged: begin again."""


class Tries:
    """How often in a row a part could not be fetched. Belongs to who fetches it.

    >>> tries = Tries(0.0)
    >>> refused = Again("403", refused=True)
    >>> tries.are_over(refused, 1.0), tries.pause_s(refused, 1.0)
    (False, 0.0)
    >>> tries.are_over(refused, 2.0), tries.pause_s(refused, 1.0)
    (False, 1.0)
    """

    def __init__(self, now_s: float) -> None:
        self.moved = False
        """Whether anything has come since the last failure."""
        self._moved_at = now_s
        self._failures = 0
        self._refusals = 0

    def are_over(self, error: Exception, now_s: float) -> bool:
        """Count a failure; whether it was the last."""
        if self.moved:
            self._moved_at, self._failures, self._refusals, self.moved = now_s, 0, 0, False
        else:
            self._failures += 1
        self._refusals += isinstance(error, Again) and error.refused
        return self._refusals >= _MAX_REFUSALS or now_s - self._moved_at > PATIENCE_S

    def pause_s(self, error: Exception, draw: float) -> float:
        """How long to wait: not at all where something had come, or a new address may be all it takes."""
        hint_s = error.after_s if isinstance(error, Again) else None
        if not hint_s and (not self._failures or (self._failures == 1 and self._refusals == 1)):
            return 0.0
        return delay_s(self._failures, hint_s=hint_s, draw=draw)
