"""The progress of a call on its way to the server and back, as its future reports it.

States, statuses and timelines are immutable values for any thread.
"""

from __future__ import annotations

from concurrent.futures import Future
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from tinker_sync._base.clock import Clock
from tinker_sync._base.displays import repr_html
from tinker_sync._base.left_out import words_on

T = TypeVar("T")


class FutureState(str, Enum):
    """The state of a call.

    The usual order is queued, sending, waiting, done. Each state but the last may be left out. Waiting and
    paused alternate as the server reports them. A sample that the server refuses for now is paused and then
    sending again. A sample that the server has forgotten is sending again. A cancel leads from queued to
    done; for calls that can be cancelled until they end (see `APIFuture`), from any state. Done is final.

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
    """Held up by the server: accepted, but not worked on now; or, for a sample, refused for now."""
    DONE = "done"
    """Ended with a result, a failure or a cancel."""

    __str__ = str.__str__


class Status(NamedTuple):
    """The state of a call, with a reason if there is one: why it is paused, delayed, cancelled or failed.

    >>> Status(FutureState.PAUSED, "the backend is short of capacity").state
    <FutureState.PAUSED: 'paused'>
    """

    state: FutureState
    reason: str | None = None


QUEUED: Final = Status(FutureState.QUEUED)
SENDING: Final = Status(FutureState.SENDING)
WAITING: Final = Status(FutureState.WAITING)


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
        """The time from the call to its end; None while the call goes on."""
        return None if self.completed is None else self.completed - self.queued


_OF_BASE: Final = frozenset(vars(Future()))
"""The names of the fields of every future."""


class ProgressFuture(Future[T]):
    """A future that reports the progress of its call. Any thread may read; the runtime marks the progress."""

    _advice = "; call .result() first, which waits for it"

    _clock: Clock
    _outcome: Any
    _progress: Status
    _request_id: str | None
    _queued_s: float
    _sending_s: float | None
    _accepted_s: float | None
    _completed_s: float | None

    @property
    def request_id(self) -> str | None:
        """The id of the request at the server (the first of several); None before the server accepts it.

        >>> from tinker_sync import APIFuture
        >>> APIFuture().request_id is None
        True
        """
        return self._request_id

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of the requests of the call that the server has accepted.

        >>> from tinker_sync import APIFuture
        >>> APIFuture().request_ids
        ()
        """
        request_id = self.request_id
        return () if request_id is None else (request_id,)

    def status(self) -> Status:
        """Return the state of the call, with the reason if it is paused, delayed, cancelled or failed.

        >>> from tinker_sync import APIFuture
        >>> APIFuture().status()
        Status(state=<FutureState.QUEUED: 'queued'>, reason=None)
        """
        if not self.done():
            return self._progress
        if self.cancelled():
            return Status(FutureState.DONE, "cancelled")
        failure = self.failure
        return Status(FutureState.DONE, None if failure is None else f"failed: {type(failure).__name__}")

    @property
    def timeline(self) -> Timeline:
        """The moments when the call was queued, sent, accepted and completed.

        >>> from tinker_sync import APIFuture
        >>> APIFuture().timeline.completed is None
        True
        """
        return Timeline(self._queued_s, self._sending_s, self._accepted_s, self._completed_s)

    @property
    def failure(self) -> BaseException | None:
        """The failure of the call; None while the call goes on, after a success and after a cancel.

        >>> from tinker_sync import APIFuture
        >>> APIFuture().failure is None
        True
        """
        return self._outcome.failure if self.done() else None

    def _mark_sending(self) -> None:
        """Mark the call as being sent. A repeated send keeps the moment of the first."""
        if self._sending_s is None:
            self._sending_s = self._clock.now()
        self._progress = SENDING

    def _mark_accepted(self, request_id: str) -> None:
        """Mark the call as accepted by the server under this id."""
        self._request_id = request_id
        self._accepted_s = self._clock.now()
        self._progress = WAITING

    def _mark_paused(self, reason: str | None) -> None:
        """Mark the call as paused by the server, until `_mark_waiting` or the end."""
        self._progress = Status(FutureState.PAUSED, reason)

    def _mark_waiting(self, trouble: str | None = None) -> None:
        """Mark the call as accepted by the server, which is probably working on it.

        Args:
            trouble: the reason why polls for the result fail; None if they work.
        """
        self._progress = WAITING if trouble is None else Status(FutureState.WAITING, trouble)

    def _describe(self, *more: str) -> str:
        status = self.status()
        return ", ".join([str(status.state), *([status.reason] if status.reason else []), *more])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._describe(*self.request_ids[:1])}>"

    _repr_html_ = repr_html

    if not TYPE_CHECKING:  # type checkers must still report unknown attributes

        def __getattr__(self, name: str) -> Any:
            # Called for missing attributes only. A half-made future has no fields at all.
            if name in _OF_BASE and "_story" in vars(self):
                return self._make_base(name)
            kind = type(self).__name__
            advice = "" if name.startswith("_") else type(self)._advice
            message = words_on(f"{kind}.{name}") or f"{kind!r} object has no attribute {name!r}{advice}"
            raise AttributeError(message, name=name, obj=self)

        def __getitem__(self, key: Any) -> Any:
            # `list(future)` and a loop over the future call this too.
            raise TypeError(f"{type(self).__name__!r} object has no items{type(self)._advice}")
