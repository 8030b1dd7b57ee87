"""A recording as text (totals by method, retries, idle time, advice), and as a timeline. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from tinker_sync.insight.following import CallRecord, phases_of

if TYPE_CHECKING:
    from tinker_sync.insight.recording import Recording

PHASES: Final = ("queue", "upload", "server", "decode")
_BACKWARD: Final = "TrainingClient.forward_backward"
_STEP: Final = "TrainingClient.optim_step"
_SAMPLE: Final = "SamplingClient.sample"
# Fewer calls may be slow by chance, so there is no advice about them.
_FEW: Final = 5


def explain(recording: Recording) -> str:
    """Return the explanation of a recording, a page of plain text."""
    span_s = recording.ended_s - recording.began_s
    calls = recording.calls
    if not calls:
        return (
            f"{span_s:.1f} s recorded, and no request has ended. A recording has only what comes after "
            "`recording = service.explain()`; print it after some calls."
        )
    idle_s = _idle_s(calls, recording.began_s, recording.ended_s)
    lines = [
        (
            f"{span_s:.1f} s recorded, {len(calls):,} requests; none was under way in {idle_s:.1f} s "
            f"({idle_s / span_s:.0%})"
        ),
        "",
        *_table(recording),
        "",
        *_troubles(recording),
        "What to change:",
        *([f"- {line}" for line in advise(recording)] or ["- nothing stands out"]),
    ]
    if recording.dropped:
        lines.append(f"{recording.dropped:,} records came too late for this recording, which is full")
    return "\n".join(lines)


def _table(recording: Recording) -> list[str]:
    encode_s: defaultdict[str, float] = defaultdict(float)
    for span in recording.spans:
        if span.kind == "encode":
            encode_s[span.name] += span.ended_s - span.began_s
    by_method: defaultdict[str, list[CallRecord]] = defaultdict(list)
    for call in recording.calls:
        by_method[call.method].append(call)
    width = max(len(name) for name in by_method)
    head = "".join(f"{name:>10}" for name in ("encode", *PHASES, "in all"))
    lines = [f"{'milliseconds a request':<{width}} {'requests':>9}{head}"]
    for method, calls in sorted(by_method.items(), key=lambda entry: -_total_s(entry[1])):
        times = [encode_s[method], *(sum(_phase_s(call, phase) for call in calls) for phase in PHASES)]
        cells = "".join(f"{1000 * each / len(calls):>10,.1f}" for each in (*times, _total_s(calls)))
        lines.append(f"{method:<{width}} {len(calls):>9,}{cells}")
    lines.append(
        f"{recording.polls:,} polls for results; a queue includes the encoding of samples and, for the first "
        "calls, the start of the client"
    )
    return lines


def _troubles(recording: Recording) -> list[str]:
    lines = []
    bad = Counter(
        str(span.status)
        for span in recording.spans
        if span.kind == "wire" and (isinstance(span.status, str) or span.status >= 400)
    )
    if bad:
        lines.append(f"Attempts that failed: {_counted(bad)}")
    retried = [pause for pause in recording.pauses if pause.delay_s > 0]
    if retried:
        lines.append(
            f"Retries: {len(retried)}, after pauses of {sum(each.delay_s for each in retried):.1f} s in all"
        )
    paused = Counter(pause.reason for pause in recording.pauses if pause.delay_s == 0)
    if paused:
        lines.append(f"Pauses that the server reported: {_counted(paused)}")
    failed = Counter(call.outcome for call in recording.calls if call.outcome != "ok")
    if failed:
        lines.append(f"Requests without a result: {_counted(failed)}")
    return [*lines, ""] if lines else []


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} ({count:,})" for name, count in counts.most_common(5))


def advise(recording: Recording) -> list[str]:
    """Return the suggested changes, those that may save the most seconds first."""
    calls = [call for call in recording.calls if call.outcome == "ok"]
    found = [
        *_about_steps(calls),
        *_about_samples(calls),
        *_about_limits(recording, calls),
        *_about_codecs(recording),
        *_about_idle(recording),
    ]
    return [*_about_notes(recording), *(text for _, text in sorted(found, key=lambda entry: -entry[0]))]


def _about_notes(recording: Recording) -> Iterable[str]:
    """Yield the latest advice about the user's steps, which is about the results, so it comes first."""
    times, step, advice = recording.notes
    for text in advice:
        yield f"step {step}, and {times} of {recording.noted_steps} steps that were compared: {text}"


def _about_steps(calls: Sequence[CallRecord]) -> Iterable[tuple[float, str]]:
    """Yield the seconds that advice may save, and the advice, about steps called after their pass has ended.

    The server is idle between such a pass and its step.
    """
    waits, late = 0, 0.0
    last_pass: dict[str, CallRecord] = {}
    steps = 0
    for call in sorted(calls, key=lambda each: each.queued_s):
        if call.method == _BACKWARD:
            last_pass[call.thread] = call
        elif call.method == _STEP:
            steps += 1
            before = last_pass.pop(call.thread, None)
            if before is not None and call.queued_s >= before.completed_s:
                waits += 1
                late += _total_s([call])
    if waits >= _FEW and waits > steps / 2:
        yield (
            late,
            (
                f"you wait for forward_backward before optim_step, {waits} times of {steps}: one server "
                f"cycle lost a step, up to {late:.1f} s in all; call both, then wait for both"
            ),
        )


def _about_samples(calls: Sequence[CallRecord]) -> Iterable[tuple[float, str]]:
    """Yield advice about samples that are requested one after the other."""
    samples = sorted((call for call in calls if call.method == _SAMPLE), key=lambda each: each.queued_s)
    if len(samples) < 2 * _FEW:
        return
    alone = sum(later.queued_s >= earlier.completed_s for earlier, later in pairwise(samples))
    if alone > 0.8 * len(samples):
        total_s = _total_s(samples)
        yield (
            total_s * 0.9,
            (
                f"you wait for each sample before you ask for the next, {alone} times of {len(samples)}: "
                f"{total_s:.1f} s in all; ask for all of them first and read the results then, with "
                "sampling.map or a list of futures"
            ),
        )


def _about_limits(recording: Recording, calls: Sequence[CallRecord]) -> Iterable[tuple[float, str]]:
    """Yield advice about refused samples, or else about samples that wait mainly in the client's queue."""
    samples = [call for call in calls if call.method == _SAMPLE]
    queue_s = sum(_phase_s(call, "queue") for call in samples)
    server_s = sum(_phase_s(call, "server") for call in samples)
    refused = sum(span.status == 429 for span in recording.spans)
    if refused:
        yield (
            queue_s / max(len(samples), 1),
            (
                f"the server refused {refused} attempts with 429 and asked for pauses: it is at its limit, "
                "more requests at once will not help"
            ),
        )
    elif len(samples) >= 2 * _FEW and queue_s > 2 * server_s:
        yield (
            0.0,
            (
                f"samples wait {queue_s / len(samples):.2f} s in the queue here and "
                f"{server_s / len(samples):.2f} s at the server: more are asked for than may be under way, "
                "which costs memory and no time"
            ),
        )


def _about_codecs(recording: Recording) -> Iterable[tuple[float, str]]:
    """Yield advice about slow encoding and decoding, which share the interpreter with the program."""
    span_s = recording.ended_s - recording.began_s
    encode_s = sum(span.ended_s - span.began_s for span in recording.spans if span.kind == "encode")
    decode_s = sum(_phase_s(call, "decode") for call in recording.calls)
    if encode_s + decode_s > 0.25 * span_s and encode_s + decode_s > 0.5:
        cure = "pass numpy arrays instead of lists"
        if find_spec("orjson") is None:
            cure += ", and pip install orjson"
        yield (
            encode_s + decode_s,
            f"encoding takes {encode_s:.1f} s and decoding {decode_s:.1f} s of {span_s:.1f} s; {cure}",
        )


def _about_idle(recording: Recording) -> Iterable[tuple[float, str]]:
    span_s = recording.ended_s - recording.began_s
    idle_s = _idle_s(recording.calls, recording.began_s, recording.ended_s)
    if len(recording.calls) >= _FEW and idle_s > 0.2 * span_s and idle_s > 0.5:
        yield (
            idle_s,
            (
                f"no request was under way in {idle_s:.1f} s of {span_s:.1f} s: your own code ran "
                "between the calls; prepare the next batch while a call is under way"
            ),
        )


def _idle_s(calls: Sequence[CallRecord], began_s: float, ended_s: float) -> float:
    """Return the seconds from `began_s` to `ended_s` in which no call was under way."""
    busy_s, reached = 0.0, began_s
    for call in sorted(calls, key=lambda each: each.queued_s):
        begin = max(call.queued_s, reached)
        if call.completed_s > begin:
            busy_s += call.completed_s - begin
            reached = call.completed_s
    return max(0.0, ended_s - began_s - busy_s)


def _phase_s(call: CallRecord, phase: str) -> float:
    return sum(ended - began for name, began, ended in phases_of(call) if name == phase)


def _total_s(calls: Sequence[CallRecord]) -> float:
    return sum(call.completed_s - call.queued_s for call in calls)


_CALLS: Final = 1
_THREADS: Final = 2


def trace_events(recording: Recording) -> dict[str, Any]:
    """Return a trace for Perfetto and chrome://tracing, with a track for each request and for each thread."""
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
