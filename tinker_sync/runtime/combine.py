"""`CombinedFuture`: one result for a call that was split into several requests.

The parts are the futures of the requests. A callback of each part counts the missing ones, so no thread
waits. The worker that resolves the last part merges the results. Rules:

- The part that fails first fails the combined future, "the whole", at once. The other parts go on, and their
  results are ignored.
- A cancel of the whole cancels the parts. It is possible until the send queue begins with the call.
- A cancel of a single part makes the whole fail with `CancelledError`.
- Status, request ids and timeline come from the parts: the whole is sending when the first part is, accepted
  when the last part is, and paused when any part is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Generic, TypeVar

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync.runtime.futures import APIFuture, Submit
from tinker_sync.runtime.progress import FutureState, Status, Timeline

PartT = TypeVar("PartT")
WholeT = TypeVar("WholeT")


class CombinedFuture(APIFuture[WholeT], Generic[PartT, WholeT]):
    """The merged result of several futures. Thread-safe.

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
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Make a future for the merged result of `parts`.

        Args:
            parts: the futures to wait for, in the order of the results that `merge` receives; empty if
                `follow` is called with them later.
            merge: makes one result from the results of the parts; an exception that it raises becomes the
                failure.
            submit, clock: as in `APIFuture`.
        """
        super().__init__(submit=submit, clock=clock)
        self._lock = threading.Lock()
        self._merge = merge
        self._missing = 0  # guarded by _lock
        # guarded by _lock; empty before `follow` and after the end of the whole
        self._parts: tuple[APIFuture[PartT], ...] = ()
        self._let_go = False  # guarded by _lock; the whole has ended
        self._ended_ids: tuple[str, ...] = ()
        self.when_done(_end)
        if parts:
            self.follow(parts)

    def follow(self, parts: Sequence[APIFuture[PartT]]) -> None:
        """Set the parts of a future that was made without parts. Cancel them if the future was cancelled.

        >>> whole = CombinedFuture([], merge=sum)
        >>> whole.follow([APIFuture()]), whole.status().state
        (None, <FutureState.QUEUED: 'queued'>)
        """
        assert parts, "nothing to combine"  # noqa: S101
        with self._lock:
            ended = self._let_go
            if not ended:
                self._missing, self._parts = len(parts), tuple(parts)
        for part in parts:
            if not ended:
                part.when_done(self._part_ended)
            elif self.cancelled():
                part.cancel()

    @property
    def request_id(self) -> str | None:
        """The id of the first request; None before the server accepts one.

        >>> CombinedFuture([APIFuture()], merge=list).request_id is None
        True
        """
        return next(iter(self.request_ids), None)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of all requests that the server accepted, in the order of the parts.

        >>> part = APIFuture()
        >>> part.mark_accepted("req-1")
        >>> CombinedFuture([part, APIFuture()], merge=list).request_ids
        ('req-1',)
        """
        parts = self._parts
        return tuple(part.request_id for part in parts if part.request_id) if parts else self._ended_ids

    def status(self) -> Status:
        """Return the status of the call: paused if any part is paused, and queued if all parts are queued.

        In other cases it is sending until the server has accepted all parts, and waiting after that.

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
        behind = {FutureState.QUEUED, FutureState.SENDING} & states
        return Status(FutureState.SENDING if behind else FutureState.WAITING)

    @property
    def timeline(self) -> Timeline:
        """The moments of the call: sent when its first part is sent, accepted when its last part is accepted.

        >>> CombinedFuture([APIFuture()], merge=list).timeline.sending is None
        True
        """
        parts = self._parts
        if not parts:
            return super().timeline
        sending, accepted = _moments(parts)
        return Timeline(self._queued_s, sending, accepted, self._completed_s)

    def _part_ended(self, part: APIFuture[PartT]) -> None:
        if part.cancelled():
            self.fail(CancelledError())
            return
        failure = part.exception()
        if failure is not None:
            self.fail(failure)
            return
        with self._lock:
            self._missing -= 1
            # After this future has failed, it has no parts, and `_missing` does not reach 0.
            arrived = self._parts if self._missing == 0 else ()
        if arrived:
            self._merge_all(arrived)

    def _merge_all(self, parts: tuple[APIFuture[PartT], ...]) -> None:
        try:
            whole = self._merge([part.result(timeout=0) for part in parts])
        except Exception as failure:  # noqa: BLE001  # any failure must reach the threads that wait
            self.fail(failure)
        else:
            self.resolve(whole)

    def _let_go_of_parts(self) -> tuple[APIFuture[PartT], ...]:
        """Keep the request ids and moments of the parts, and drop the parts with their results."""
        with self._lock:
            self._let_go = True
            parts = self._parts
            self._ended_ids = tuple(part.request_id for part in parts if part.request_id)
            self._sending_s, self._accepted_s = _moments(parts)
            self._parts = ()
        return parts


def _end(whole: CombinedFuture[PartT, WholeT]) -> None:
    parts = whole._let_go_of_parts()
    if whole.cancelled():
        for part in parts:
            part.cancel()


def _moments(parts: Sequence[APIFuture[PartT]]) -> tuple[float | None, float | None]:
    """Return the moments at which the first part was sent and the last part was accepted.

    Return None in place of the first if no part was sent, and of the second if a part was not accepted.
    """
    timelines = [part.timeline for part in parts]
    sent = [moments.sending for moments in timelines if moments.sending is not None]
    accepted = [moments.accepted for moments in timelines if moments.accepted is not None]
    return min(sent, default=None), max(accepted, default=None) if len(accepted) == len(parts) else None
