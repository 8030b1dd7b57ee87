"""Where a call is on its way: the words in which a future tells it. Pure values; any thread."""

from __future__ import annotations

from enum import Enum

from attrs import frozen


class FutureState(str, Enum):
    """Where a call is on its way.

    Moves: queued, sending, waiting, done, in this order, of which any but the last may be left out; waiting
    and paused alternate while the server says so. From queued or, for samples, any state, a cancel leads to
    done. Done is final.

    >>> FutureState.QUEUED == "queued", str(FutureState.PAUSED)
    (True, 'paused')
    """

    QUEUED = "queued"
    """Not sent; earlier calls of the same client, a limit or a pause come first."""
    SENDING = "sending"
    """On its way to the server, possibly for the second time."""
    WAITING = "waiting"
    """The server has it."""
    PAUSED = "paused"
    """The server has it and says that it does not work on it."""
    DONE = "done"
    """There is a result, a failure, or it was cancelled."""

    __str__ = str.__str__


@frozen
class Status:
    """Where a call is, and why where there is something to say: the server's words for a pause, how it ended.

    >>> Status(FutureState.PAUSED, "the backend is short of capacity").state
    <FutureState.PAUSED: 'paused'>
    """

    state: FutureState
    reason: str | None = None


@frozen
class Timeline:
    """When a call got where, in seconds of a monotonic clock; None for what has not happened.

    >>> Timeline(queued=10.0, sending=10.5, accepted=11.0, completed=14.0).duration_s
    4.0
    """

    queued: float
    sending: float | None = None
    accepted: float | None = None
    completed: float | None = None

    @property
    def duration_s(self) -> float | None:
        """From the call to its end; None while it goes on."""
        return None if self.completed is None else self.completed - self.queued
