"""A recording as a timeline in the trace event format of Perfetto and chrome://tracing. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tinker_sync.insight.recording import CallRecord, Recording

_CALLS: Final = 1
_THREADS: Final = 2


def trace_events(recording: Recording) -> dict[str, Any]:
    """Return the trace, with a row of spans for each method and each thread."""
    return {"displayTimeUnit": "ms", "traceEvents": list(_events(recording))}


def _events(recording: Recording) -> Iterator[dict[str, Any]]:
    yield _named("process_name", _CALLS, 0, "calls, from their queue to their result")
    yield _named("process_name", _THREADS, 0, "threads of the client")
    zero = recording.began_s
    for number, call in enumerate(recording.calls):
        yield from _phases(call, number, zero)
    rows: dict[str, int] = {}
    for span in recording.spans:
        row = rows.setdefault(span.thread, len(rows) + 1)
        yield {
            "ph": "X",
            "pid": _THREADS,
            "tid": row,
            "name": f"encode {span.name}" if span.kind == "encode" else span.name,
            "cat": span.kind,
            "ts": _micros(span.began_s - zero),
            "dur": _micros(span.ended_s - span.began_s),
            "args": {"status": span.status} if span.kind == "wire" else {},
        }
    for thread, row in rows.items():
        yield _named("thread_name", _THREADS, row, thread)
    for pause in recording.pauses:
        yield {
            "ph": "i",
            "s": "g",
            "pid": _THREADS,
            "tid": 0,
            "name": f"pause of {pause.delay_s:.2f} s: {pause.reason}" if pause.delay_s else pause.reason,
            "cat": "pause",
            "ts": _micros(pause.at_s - zero),
        }


def _phases(call: CallRecord, number: int, zero: float) -> Iterator[dict[str, Any]]:
    """Yield a call as a span on its own track, which contains the spans of its phases."""
    yield from _span(call.method, call.queued_s, call.completed_s, call, number, zero)
    for name, began, ended in phases_of(call):
        yield from _span(name, began, ended, call, number, zero)


def phases_of(call: CallRecord) -> list[tuple[str, float, float]]:
    """Return the known phases of a call: the name of each, its begin and its end."""
    marks = [("queue", call.queued_s), ("upload", call.sending_s), ("server", call.accepted_s)]
    marks.append(("decode", call.decoding_s))
    known = [(name, at) for name, at in marks if at is not None]
    ends = [at for _, at in known[1:]] + [call.completed_s]
    return [(name, began, max(began, ended)) for (name, began), ended in zip(known, ends, strict=True)]


def _span(
    name: str, began: float, ended: float, call: CallRecord, number: int, zero: float
) -> Iterator[dict[str, Any]]:
    common = {"pid": _CALLS, "tid": 1, "cat": call.method, "id": number, "name": name}
    yield {**common, "ph": "b", "ts": _micros(began - zero), "args": {"outcome": call.outcome}}
    yield {**common, "ph": "e", "ts": _micros(ended - zero)}


def _named(what: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": row, "args": {"name": name}}


def _micros(duration_s: float) -> float:
    return round(duration_s * 1e6, 1)
