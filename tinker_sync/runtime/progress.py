"""The states of a call on its way to the server and back, as its future reports them.

All are immutable values for any thread.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class FutureState(str, Enum):
    """The state of a call.

    The order is queued, sending, waiting, done. Each state but the last may be left out. Waiting and paused
    alternate as the server reports them. A cancel leads from queued to done; for samples, from any state to
    done. Done is final.

    >>> FutureState.QUEUED == "queued", str(FutureState.PAUSED)
    (True, 'paused')
    """

    QUEUED = "queued"
    """Not sent: it waits for earlier calls of the same client, a limit or a pause."""
    SENDING = "sending"
    """On its way to the server, possibly not for the first time."""
    WAITING = "waiting"
    """Accepted by the server."""
    PAUSED = "paused"
    """Accepted by the server, which reports that it is not working on the call now."""
    DONE = "done"
    """Ended with a result, a failure or a cancel."""

    __str__ = str.__str__


class Status(NamedTuple):
    """The state of a call, with a reason if there is one: why the server pauses, or how the call ended.

    >>> Status(FutureState.PAUSED, "the backend is short of capacity").state
    <FutureState.PAUSED: 'paused'>
    """

    state: FutureState
    reason: str | None = None


class Timeline(NamedTuple):
    """The times at which a call reached its states, in seconds of a monotonic clock; None if not reached.

    >>> Timeline(queued=10.0, sending=10.5, accepted=11.0, completed=14.0).duration_s
    4.0
    """

    queued: float
    sending: float | None = None
    accepted: float | None = None
    completed: float | None = None

    @property
    def duration_s(self) -> float | None:
        """The time from the call to its end; None while it goes on."""
        return None if self.completed is None else self.completed - self.queued
