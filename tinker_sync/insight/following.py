"""`CallFollower`: follows requests of calls to their ends; `CallRecord`: a request that has ended."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from attrs import frozen

from tinker_sync._base.events import CallMade, ReplyReceived, RequestLost
from tinker_sync._base.naming import current

if TYPE_CHECKING:
    from tinker_sync._base.clock import Clock
    from tinker_sync.runtime.futures import APIFuture


@frozen
class CallRecord:
    """A request that has ended, with the times of the clock at which its phases began.

    A call that is sent in several requests has several records. None stands for a phase that the request did
    not reach, or for a time that is not known.
    """

    method: str
    thread: str
    """The thread that made the request."""
    queued_s: float
    sending_s: float | None
    accepted_s: float | None
    decoding_s: float | None
    completed_s: float
    outcome: str
    """"ok", "cancelled", or the name of the failure's class."""


class CallFollower:
    """An observer that makes a record of each request of the user's calls when its future ends. Thread-safe.

    Subclasses define `_ended`, which any thread may call.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._local = threading.local()
        self._under_way: dict[APIFuture[Any], tuple[str, str]] = {}
        """The method and the thread of each request that has not ended, or has no record yet."""

    def _follow(self, event: CallMade) -> None:
        """Follow a request; runs on the thread that makes the call."""
        self._under_way[event.future] = (current(), thread_name())
        event.future._when_done(self._on_ended)

    def _note_answer(self, event: ReplyReceived | RequestLost, now: float) -> bool:
        """Return True if this ended a poll, whose answer is decoded next on this thread."""
        polled = "/retrieve_future" in event.path
        if polled:
            self._local.reply_s = now
        return polled

    def _catch_up(self) -> None:
        """Make records of requests that have ended, but whose callbacks have not run."""
        for future in [each for each in list(self._under_way) if each.done()]:
            self._on_ended(future)

    def _claim(self, future: APIFuture[Any]) -> bool:
        """Return True to the one caller that records this request."""
        return self._under_way.pop(future, None) is not None

    def _ended(self, future: APIFuture[Any], record: CallRecord) -> None:
        """Handle the end of a request; may be called twice, so the first to `_claim` it counts."""
        raise NotImplementedError

    def _on_ended(self, future: APIFuture[Any]) -> None:
        begun = self._under_way.get(future)
        if begun is not None:
            self._ended(future, self._record(*begun, future))

    def _record(self, method: str, thread: str, ended: APIFuture[Any]) -> CallRecord:
        """Return the record of a request. Runs in the thread that ended it or reads the records."""
        timeline = ended.timeline
        completed_s = timeline.completed or self._clock.now()
        reply_s = getattr(self._local, "reply_s", None)
        if reply_s is not None and reply_s < (timeline.accepted or completed_s):
            reply_s = None  # the answer to another request
        if ended.cancelled():
            outcome = "cancelled"
        else:
            failure = ended.failure
            outcome = "ok" if failure is None else type(failure).__name__
        return CallRecord(
            method or "in the background",
            thread,
            timeline.queued,
            timeline.sending,
            timeline.accepted,
            reply_s,
            completed_s,
            outcome,
        )


def phases_of(call: CallRecord) -> list[tuple[str, float, float]]:
    """Return the known phases of a call: for each its name, the time it began, and the time it ended."""
    marks = [("queue", call.queued_s), ("upload", call.sending_s), ("server", call.accepted_s)]
    marks.append(("decode", call.decoding_s))
    known = [(name, at) for name, at in marks if at is not None]
    ends = [at for _, at in known[1:]] + [call.completed_s]
    return [(name, began, max(began, ended)) for (name, began), ended in zip(known, ends, strict=True)]


def thread_name() -> str:
    """Return the name of the thread that runs."""
    return threading.current_thread().name
