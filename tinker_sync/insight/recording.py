"""`Recording`: the timeline of the calls of one service client."""

from __future__ import annotations

import json
import os
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
from tinker_sync.insight import report
from tinker_sync.insight.following import CallFollower, CallRecord, thread_name
from tinker_sync.runtime.polls import QueueReport

if TYPE_CHECKING:
    from typing_extensions import Self

    from tinker_sync._base.clock import Clock
    from tinker_sync.runtime.futures import APIFuture

# The most records of calls, of spans, and of pauses; further ones are counted and dropped. A record takes
# some hundred bytes of memory.
MOST_RECORDS: Final = 200_000


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


class Recording(CallFollower):
    """A recording of the time that the calls of a service client take. Thread-safe.

    `ServiceClient.explain` and `trace` make it. `str(recording)` is an explanation, also while the recording
    runs. The recording ends with its `with` block, with `close`, or with the client.
    """

    def __init__(self, events: Events, clock: Clock, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(clock)
        self._path = None if path is None else Path(path)
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
        """Record what the event reports. The requests of a call are recorded when its future ends."""
        now = self._clock.now()
        if isinstance(event, CallMade):
            self._follow(event)
        elif isinstance(event, RequestEncoded):
            self._add(self.spans, SpanRecord(event.method, "encode", thread_name(), event.began_s, now))
        elif isinstance(event, (ReplyReceived, RequestLost)):
            if self._note_answer(event, now):
                self.polls += 1
            status = event.status if isinstance(event, ReplyReceived) else event.reason
            span = SpanRecord(event.path, "wire", thread_name(), now - event.duration_s, now, status)
            self._add(self.spans, span)
        elif isinstance(event, RetryScheduled):
            self._add(self.pauses, PauseRecord(event.path, now, event.delay_s, event.reason))
        elif event.state.paused:  # a `QueueReport`
            self._add(self.pauses, PauseRecord(event.request_type, now, 0.0, event.reason or ""))

    def _ended(self, future: APIFuture[Any], record: CallRecord) -> None:
        """Add the record of a request, unless the recording has ended or is full."""
        if not self._claim(future) or self._ended_s is not None:
            return
        if len(self._calls) < MOST_RECORDS:
            self._calls.append(record)
        else:
            self.dropped += 1

    def _add(self, records: list[_Record], record: _Record) -> None:
        if len(records) < MOST_RECORDS:
            records.append(record)
        else:
            self.dropped += 1
