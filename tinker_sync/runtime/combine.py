"""`CombinedFuture`, one result for several requests, and `ComposedFuture`, its base class.

The call of a composed future consists of other calls, whose futures are the *parts*; the composed future is
the *whole*. The whole has the request ids and the moments of its parts. When it ends, it keeps these and
drops the parts with their results.

In a combined future, a callback of each part counts down the parts that are left, so no thread waits. The
thread that resolves the last part merges the results. Rules of a combined future:

- The part that fails first fails the whole at once. The other parts go on, and their results are ignored.
- A cancel of the whole cancels the parts. A training call can be cancelled until the send queue begins with
  it; a call that consists of samples, until it ends.
- A cancel of a single part makes the whole fail with `CancelledError`.
- Status, request ids and timeline come from the parts. The whole is sending from the send of the first part
  until all parts are accepted, and paused while any part is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any, Generic, TypeVar

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync._base.numbers import numbers
from tinker_sync.runtime.futures import APIFuture, Submit
from tinker_sync.runtime.progress import FutureState, Status, Timeline

PartT = TypeVar("PartT")
WholeT = TypeVar("WholeT")


class ComposedFuture(APIFuture[WholeT], Generic[PartT, WholeT]):
    """The future of a call that consists of other calls, whose futures are its parts. Thread-safe.

    A subclass adds the parts and decides on the result.
    """

    def __init__(
        self, *, submit: Submit | None = None, soon: Submit | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        super().__init__(submit=submit, soon=soon, clock=clock)
        # Empty before the parts are known, and after the end of the whole.
        self._parts: tuple[APIFuture[PartT], ...] = ()
        self._ended_ids: tuple[str, ...] = ()
        self._when_done(_let_go_of_parts)

    def _add(self, *parts: APIFuture[PartT]) -> bool:
        """Add parts and return True. Return False, and add none, if this future has ended.

        One thread at a time calls this. It takes no lock, because Ctrl-C may come at any point.
        """
        self._parts = (*self._parts, *parts)
        if self.done():  # the thread that ended this future may have missed them
            self._parts = ()
            return False
        return True

    @property
    def request_id(self) -> str | None:
        """The first of `request_ids`; None before the server accepts a request.

        >>> CombinedFuture([APIFuture()], merge=list).request_id is None
        True
        """
        return next(iter(self.request_ids), None)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of all requests that the server accepted, in the order of the parts.

        >>> part = APIFuture()
        >>> part._mark_accepted("req-1")
        >>> CombinedFuture([part, APIFuture()], merge=list).request_ids
        ('req-1',)
        """
        parts = self._parts
        return _ids(parts) if parts else self._ended_ids

    @property
    def timeline(self) -> Timeline:
        """The moments of the call: sent when its first part is sent, accepted when its last part is accepted.

        >>> CombinedFuture([APIFuture()], merge=list).timeline.sending is None
        True
        """
        parts = self._parts
        if not parts:
            return super().timeline
        sending, accepted = self._moments(parts)
        return Timeline(self._queued_s, sending, accepted, self._completed_s)

    def _moments(self, parts: Sequence[APIFuture[PartT]]) -> tuple[float | None, float | None]:
        """Return the moments at which the first part was sent and the last part was accepted.

        The first is None if no part was sent. The second is None if one of the parts was not accepted.
        """
        timelines = [part.timeline for part in parts]
        sent = [moments.sending for moments in timelines if moments.sending is not None]
        accepted = [moments.accepted for moments in timelines if moments.accepted is not None]
        return min(sent, default=None), max(accepted, default=None) if len(accepted) == len(parts) else None

    def _cancels_parts(self) -> bool:
        """Return True if this future, which has ended, is to cancel those parts that can be cancelled."""
        return self.cancelled() or self._expired


def _let_go_of_parts(whole: ComposedFuture[PartT, WholeT]) -> None:
    parts = whole._parts
    whole._ended_ids = _ids(parts)
    whole._sending_s, whole._accepted_s = whole._moments(parts)
    whole._parts = ()
    if whole._cancels_parts():
        for part in parts:
            part.cancel()


def _ids(parts: Sequence[APIFuture[Any]]) -> tuple[str, ...]:
    return tuple(request_id for part in parts for request_id in part.request_ids)


class CombinedFuture(ComposedFuture[PartT, WholeT]):
    """A future for the merged result of several futures, its parts. Thread-safe.

    It fails as soon as a part fails.

    >>> halves = [APIFuture(), APIFuture()]
    >>> whole = CombinedFuture(halves, merge=sum)
    >>> halves[1].resolve(30), whole.done(), halves[0].resolve(12), whole.result()
    (True, False, True, 42)
    """

    def __init__(
        self,
        parts: Sequence[APIFuture[PartT]],
        merge: Callable[[list[PartT]], WholeT],
        *,
        submit: Submit | None = None,
        soon: Submit | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Make a future for the merged result of `parts`.

        Args:
            parts: the futures to wait for, in the order of the results that `merge` receives; empty if
                `follow` is called with them later.
            merge: makes one result from the results of the parts; an exception that it raises becomes the
                failure.
            submit, soon, clock: as in `APIFuture`.
        """
        super().__init__(submit=submit, soon=soon, clock=clock)
        self._merge = merge
        self._expected = 0  # the number of parts
        self._arrived = numbers(1)
        if parts:
            self.follow(parts)

    def follow(self, parts: Sequence[APIFuture[PartT]]) -> None:
        """Set the parts of a future that was made without any. Cancel them if it was cancelled or expired.

        >>> whole = CombinedFuture([], merge=sum)
        >>> whole.follow([APIFuture()]), whole.status().state
        (None, <FutureState.QUEUED: 'queued'>)
        """
        assert parts, "nothing to combine"  # noqa: S101
        self._expected = len(parts)
        added = self._add(*parts)
        for part in parts:
            if added:
                part._when_done(self._part_ended)
            elif self._cancels_parts():
                part.cancel()

    def status(self) -> Status:
        """Return the status of the call: paused if any part is paused, and queued if all parts are queued.

        In other cases it is sending until the server has accepted all parts, then waiting, and done at the
        end. While it is waiting, it has the reason of the first part that is delayed.

        >>> CombinedFuture([APIFuture()], merge=list).status().state
        <FutureState.QUEUED: 'queued'>
        """
        parts = self._parts
        if self.done() or not parts:
            return super().status()
        statuses = [part.status() for part in parts]
        states = {status.state for status in statuses}
        if FutureState.PAUSED in states:
            return next(status for status in statuses if status.state is FutureState.PAUSED)
        if states == {FutureState.QUEUED}:
            return Status(FutureState.QUEUED)
        if {FutureState.QUEUED, FutureState.SENDING} & states:
            return Status(FutureState.SENDING)
        delayed = (each for each in statuses if each.state is FutureState.WAITING and each.reason)
        return next(delayed, Status(FutureState.WAITING))

    def _part_ended(self, part: APIFuture[PartT]) -> None:
        if part.cancelled():
            self.fail(CancelledError())
            return
        failure = part.exception()
        if failure is not None:
            self.fail(failure)
            return
        # After this future has failed or was cancelled, it has no parts.
        if next(self._arrived) == self._expected and (parts := self._parts):
            self._merge_all(parts)

    def _merge_all(self, parts: tuple[APIFuture[PartT], ...]) -> None:
        try:
            whole = self._merge([part.result(timeout=0) for part in parts])
        except Exception as failure:  # noqa: BLE001  # any failure must reach the threads that wait
            self.fail(failure)
        else:
            self.resolve(whole)
