"""`Recording`: the timeline of the calls of one service client."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from attrs import frozen

from tinker_sync._base.events import (
    CallMade,
    Events,
    ReplyReceived,
    RequestEncoded,
    RequestLost,
    RetryScheduled,
)
from tinker_sync._base.naming import current
from tinker_sync.insight import report
from tinker_sync.runtime.polls import QueueReport

if TYPE_CHECKING:
    from typing_extensions import Self

    from tinker_sync._base.clock import Clock
    from tinker_sync.runtime.futures import APIFuture

# The most records of calls, of spans, and of pauses; further ones are counted and dropped. A record takes
# some hundred bytes of memory.
MOST_RECORDS: Final = 200_000


@frozen
class CallRecord:
    """A request that has ended, with the times of the clock at which its phases began.

    A call that is sent in several requests has several records. None stands for a phase that the request did
    not reach, or for a time that the recording does not know.
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


@frozen
class SpanRecord:
    """The work of one thread for a request: its encoding, or an attempt to send it."""

    name: str
    kind: str
    """"encode" or "wire"."""
    thread: str
    began_s: float
    ended_s: float
    status: int | str = ""
    """The status of the answer, or the reason for its absence."""


@frozen
class PauseRecord:
    """A pause before a retry, or a pause of a queue that the server reported.

    For a reported pause, `path` is the kind of request, and `delay_s` is 0.
    """

    path: str
    at_s: float
    delay_s: float
    reason: str


_Record = TypeVar("_Record", SpanRecord, PauseRecord)


class Recording:
    """A recording of the time that the calls of a service client take. Thread-safe.

    `ServiceClient.explain` and `trace` make it. `str(recording)` is an explanation, also while the recording
    runs. The recording ends with its `with` block, with `close`, or with the client.
    """

    def __init__(self, events: Events, clock: Clock, path: str | os.PathLike[str] | None = None) -> None:
        self._clock = clock
        self._path = None if path is None else Path(path)
        self._local = threading.local()
        self._ended_s: float | None = None
        self.began_s = clock.now()
        self._calls: list[CallRecord] = []
        self.spans: list[SpanRecord] = []
        self.pauses: list[PauseRecord] = []
        self.polls = 0
        self.dropped = 0
        """The number of records that were dropped because the recording was full."""
        self.noted_steps = 0
        self.notes: tuple[int, int, tuple[str, ...]] = (0, 0, ())
        """The number of steps with advice, and the number and the advice of the latest of them."""
        self._under_way: dict[APIFuture[Any], tuple[str, str]] = {}
        """The method and the thread of each request that is not recorded yet."""
        self._stop = events.listen(
            self, CallMade, RequestEncoded, ReplyReceived, RequestLost, RetryScheduled, QueueReport
        )

    @property
    def calls(self) -> list[CallRecord]:
        """The records of the requests that have ended."""
        self._catch_up()
        return self._calls

    @property
    def ended_s(self) -> float:
        """The time at which the recording ended, or the present time while it is running."""
        return self._clock.now() if self._ended_s is None else self._ended_s

    # ---------------------------------------------------------------------------------- for users

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the recording, and write its trace if it was made with a path. Idempotent."""
        if self._ended_s is not None:
            return
        self._catch_up()
        self._ended_s = self._clock.now()
        self._under_way.clear()
        self._stop()
        if self._path is not None:
            self.save(self._path)

    def note(self, step: int, advice: Sequence[str]) -> None:
        """Add advice about a step of the user's loop, such as that of `losses.divergence`; it may be empty.

        The recorder of a loop calls this. The explanation has the latest advice, and the number of steps.
        """
        if self._ended_s is None:
            self.noted_steps += 1
            if advice:
                self.notes = (self.notes[0] + 1, step, tuple(advice))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recording as a trace for https://ui.perfetto.dev or chrome://tracing.

        A missing directory of the file is created.
        """
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(report.trace_events(self)), encoding="utf-8")

    @property
    def advice(self) -> list[str]:
        """The suggested changes, the most important first; empty if there are no suggestions."""
        return report.advise(self)

    def __str__(self) -> str:
        return report.explain(self)

    def __repr__(self) -> str:
        return f"<Recording of {len(self.calls)} requests in {self.ended_s - self.began_s:.1f} s>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    # ---------------------------------------------------------------------------------- for the runtime

    def observe(self, event: Any) -> None:
        """Add a record of what the event reports; of a request of a call, when its future ends."""
        now = self._clock.now()
        if isinstance(event, CallMade):
            self._under_way[event.future] = (current(), _thread())
            event.future._when_done(self._on_ended)
        elif isinstance(event, RequestEncoded):
            self._add(self.spans, SpanRecord(event.method, "encode", _thread(), event.began_s, now))
        elif isinstance(event, (ReplyReceived, RequestLost)):
            if "/retrieve_future" in event.path:
                self.polls += 1
                self._local.reply_s = now
            status = event.status if isinstance(event, ReplyReceived) else event.reason
            span = SpanRecord(event.path, "wire", _thread(), now - event.duration_s, now, status)
            self._add(self.spans, span)
        elif isinstance(event, RetryScheduled):
            self._add(self.pauses, PauseRecord(event.path, now, event.delay_s, event.reason))
        elif event.state.paused:  # a `QueueReport`
            self._add(self.pauses, PauseRecord(event.request_type, now, 0.0, event.reason or ""))

    def _catch_up(self) -> None:
        """Add records of requests that have ended, but have no record because their callback has not run."""
        for future in [each for each in list(self._under_way) if each.done()]:
            self._on_ended(future)

    def _on_ended(self, future: APIFuture[Any]) -> None:
        begun = self._under_way.pop(future, None)
        if begun is not None:
            self._add_call(*begun, future)

    def _add_call(self, method: str, thread: str, ended: APIFuture[Any]) -> None:
        """Add the record of a request, unless the recording has ended or is full.

        Runs in the thread that ended the request or reads the recording.
        """
        if self._ended_s is not None:
            return
        if len(self._calls) >= MOST_RECORDS:
            self.dropped += 1
            return
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
        self._calls.append(
            CallRecord(
                method or "in the background",
                thread,
                timeline.queued,
                timeline.sending,
                timeline.accepted,
                reply_s,
                completed_s,
                outcome,
            )
        )

    def _add(self, records: list[_Record], record: _Record) -> None:
        if len(records) < MOST_RECORDS:
            records.append(record)
        else:
            self.dropped += 1


def _thread() -> str:
    return threading.current_thread().name
