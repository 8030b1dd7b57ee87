"""`Metrics`: counters and percentiles of the calls of a service client, for as long as it lives.

A recording keeps each request and explains one stretch of work. These figures take the same few kilobytes
after a million calls, so that a monitor can read them all the time.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from attrs import asdict, frozen

from tinker_sync._base import fork as _fork
from tinker_sync._base.displays import repr_html
from tinker_sync._base.events import CallMade, Events, ReplyReceived, RequestEncoded, RequestLost
from tinker_sync.insight.following import CallFollower, CallRecord, phases_of
from tinker_sync.runtime.polls import QueueReport

if TYPE_CHECKING:
    from tinker_sync._base.clock import Clock
    from tinker_sync.runtime.futures import APIFuture

PHASES: Final = ("encode", "queue", "upload", "server", "decode", "total")

RELATIVE_ERROR: Final = 0.02
"""The most by which a percentile differs from the exact one, as a share of it."""
_GROWTH: Final = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_PER_LOG: Final = 1 / math.log(_GROWTH)
_SHORTEST_S: Final = 1e-6
_LONGEST_S: Final = 1e7

_COUNTERS: Final = {
    "attempts": "HTTP requests other than polls",
    "retries": "those that repeat an earlier one",
    "polls": "HTTP requests for results",
    "throttled": "answers with status 429",
    "errors": "other answers with a status from 400 on",
    "lost": "HTTP requests without an answer",
    "pauses": "reports of the server that it has paused a request",
}


class Quantiles:
    """The distribution of durations, in at most 749 counters of 4 % width each. Not thread-safe.

    >>> taken = Quantiles()
    >>> for milliseconds in range(1, 1001):
    ...     taken.add(milliseconds / 1000)
    >>> abs(taken.quantile(0.5) / 0.5 - 1) < RELATIVE_ERROR, taken.longest_s
    (True, 1.0)
    """

    __slots__ = ("_buckets", "count", "longest_s", "total_s")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self.count = 0
        self.total_s = 0.0
        self.longest_s = 0.0

    def add(self, duration_s: float) -> None:
        """Count a duration. Those below a microsecond count as one microsecond in percentiles."""
        self.count += 1
        self.total_s += duration_s
        if duration_s > self.longest_s:
            self.longest_s = duration_s
        bounded_s = min(max(duration_s, _SHORTEST_S), _LONGEST_S)
        bucket = math.ceil(math.log(bounded_s) * _PER_LOG)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    def copy(self) -> Quantiles:
        """Return a distribution with the same durations."""
        same = Quantiles()
        same._buckets = dict(self._buckets)
        same.count, same.total_s, same.longest_s = self.count, self.total_s, self.longest_s
        return same

    def quantile(self, share: float) -> float:
        """Return the duration that this share of the durations does not exceed; NaN if there are none."""
        left = share * self.count
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return min(2 * _GROWTH**bucket / (_GROWTH + 1), self.longest_s)
        return math.nan

    def times(self) -> Times:
        """Return the figures of the durations so far."""
        p50_s, p95_s, p99_s = map(self.quantile, (0.5, 0.95, 0.99))
        mean_s = self.total_s / self.count if self.count else math.nan
        return Times(self.count, mean_s, p50_s, p95_s, p99_s, self.longest_s)


@frozen
class Times:
    """How often a phase took place, and how long it took, in seconds. Percentiles are exact to 2 %.

    >>> Times(2, 1.5, 1.0, 2.0, 2.0, 2.0).mean_s
    1.5
    """

    count: int
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float


class Metrics(CallFollower):
    """Counters and times of the calls of a service client since the first `service.metrics()`. Thread-safe.

    `calls` has how calls ended, `counters` the HTTP requests behind them, and `times` the mean and the
    percentiles of each phase. The phases of a call are `encode`, `queue` (for samples, this includes
    encoding), `upload`, `server`, `decode` and `total`. The times are those of calls with a result, because a
    call that is refused or cancelled at once would hide how long the others take. A call that is sent in
    several requests, such as a pass in chunks or with a custom loss, counts once for each. Calls that return
    a value in place of a future, such as `get_info`, are in the counters alone.

    >>> import tinker_sync
    >>> with tinker_sync.ServiceClient(base_url="local") as service:
    ...     metrics = service.metrics()
    ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
    ...     prompt = tinker_sync.ModelInput.from_ints([1, 2])
    ...     sampled = sampling.sample(prompt, 1, tinker_sync.SamplingParams(max_tokens=3)).result()
    >>> metrics.calls
    {'SamplingClient.sample': {'ok': 1}}
    >>> metrics.times["SamplingClient.sample"]["total"].count, metrics.counters["retries"]
    (1, 0)
    """

    def __init__(self, events: Events, clock: Clock) -> None:
        super().__init__(clock)
        self._renew()
        _fork.renew_in_child(self)
        events.listen(self, CallMade, RequestEncoded, ReplyReceived, RequestLost, QueueReport)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._counters = dict.fromkeys(_COUNTERS, 0)  # guarded by _lock
        self._calls: dict[str, Counter[str]] = {}  # guarded by _lock
        self._times: dict[str, dict[str, Quantiles]] = {}  # guarded by _lock

    def renew_after_fork(self) -> None:
        """Begin at zero in a child process, because the parent reports its own calls."""
        self._renew()
        self._under_way = {}
        self._local = threading.local()

    # ---------------------------------------------------------------------------------- for users

    @property
    def calls(self) -> dict[str, dict[str, int]]:
        """How often each call ended in which way: "ok", "cancelled", or the class of its error."""
        self._catch_up()
        with self._lock:
            return {method: dict(outcomes) for method, outcomes in sorted(self._calls.items())}

    @property
    def counters(self) -> dict[str, int]:
        """The HTTP requests, whatever they were for: attempts, retries, polls, throttled, and so on.

        `attempts` are those other than polls, and `retries` those of them that repeat an earlier one.
        `throttled` are answers with status 429, `errors` other answers from 400 on, and `lost` requests
        without an answer, polls included. `pauses` are reports of the server that it has paused a request. If
        a request is sent again at once, because a kept connection was closed, that is part of its attempt.
        """
        with self._lock:
            return dict(self._counters)

    @property
    def times(self) -> dict[str, dict[str, Times]]:
        """The times of each call by phase."""
        self._catch_up()
        with self._lock:  # copies, because the thread that ends the calls waits for this lock
            copies = {
                method: {phase: phases[phase].copy() for phase in PHASES if phase in phases}
                for method, phases in sorted(self._times.items())
            }
        return {
            method: {phase: durations.times() for phase, durations in phases.items()}
            for method, phases in copies.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as dictionaries of strings and numbers, for JSON or a logger of metrics.

        >>> from tinker_sync import ServiceClient
        >>> with ServiceClient(base_url="local") as service:
        ...     list(service.metrics().to_dict())
        ['counters', 'calls', 'times']
        """
        times = {
            method: {phase: asdict(figures) for phase, figures in phases.items()}
            for method, phases in self.times.items()
        }
        return {"counters": self.counters, "calls": self.calls, "times": times}

    def to_prometheus(self) -> str:
        """Return all figures in the text format of Prometheus, for a page that it scrapes.

        >>> from tinker_sync import ServiceClient
        >>> with ServiceClient(base_url="local") as service:
        ...     print(service.metrics().to_prometheus().splitlines()[2])
        tinker_sync_attempts_total 0
        """
        return "\n".join(self._prometheus_lines()) + "\n"

    def rows(self) -> list[dict[str, object]]:
        """Return a row for each phase of each call: its count, and its times in milliseconds."""
        return [
            {
                "call": method,
                "phase": phase,
                "count": figures.count,
                **{name: round(1000 * getattr(figures, f"{name}_s"), 3) for name in _COLUMNS},
            }
            for method, phases in self.times.items()
            for phase, figures in phases.items()
        ]

    def summary(self) -> list[str]:
        """Return lines about failures, retries and polls, as the table of times does not show them."""
        lines = [
            f"{method}: {', '.join(f'{count:,} {outcome}' for outcome, count in outcomes.items())}"
            for method, outcomes in self.calls.items()
        ]
        return [*lines, ", ".join(f"{count:,} {name}" for name, count in self.counters.items())]

    def __str__(self) -> str:
        rows = self.rows()
        width = max((len(str(row["call"])) for row in rows), default=0)
        width = max(width, len("milliseconds"))
        lines = [f"{'milliseconds':<{width}} {'phase':<7}{'count':>9}{''.join(f'{c:>10}' for c in _COLUMNS)}"]
        for row in rows:
            cells = "".join(f"{row[column]:>10,.2f}" for column in _COLUMNS)
            lines.append(f"{row['call']:<{width}} {row['phase']:<7}{row['count']:>9,}{cells}")
        return "\n".join([*(lines if rows else []), *self.summary()])

    def __repr__(self) -> str:
        return f"<Metrics of {sum(sum(each.values()) for each in self.calls.values()):,} calls>"

    _repr_html_ = repr_html

    # ---------------------------------------------------------------------------------- for the runtime

    def observe(self, event: Any) -> None:
        """Count what the event reports. The requests of a call count when its future ends."""
        if isinstance(event, CallMade):
            self._follow(event)
        elif isinstance(event, RequestEncoded):
            now = self._clock.now()
            with self._lock:
                self._phase(event.method, "encode").add(now - event.began_s)
        elif isinstance(event, (ReplyReceived, RequestLost)):
            self._count_attempt(event)
        elif event.state.paused:  # a `QueueReport`
            with self._lock:
                self._counters["pauses"] += 1

    def _count_attempt(self, event: ReplyReceived | RequestLost) -> None:
        polled = self._note_answer(event, self._clock.now())
        status = event.status if isinstance(event, ReplyReceived) else 0
        with self._lock:
            counters = self._counters
            counters["polls" if polled else "attempts"] += 1
            if event.attempt > 1 and not polled:
                counters["retries"] += 1
            if not status:
                counters["lost"] += 1
            elif status == 429:
                counters["throttled"] += 1
            elif status >= 400:
                counters["errors"] += 1

    def _ended(self, future: APIFuture[Any], record: CallRecord) -> None:
        # Claimed under the lock, so that a reader who finds no open request finds this one in the figures.
        with self._lock:
            if not self._claim(future):
                return
            outcomes = self._calls.setdefault(record.method, Counter())
            outcomes[record.outcome] += 1
            if record.outcome == "ok":
                for name, began_s, ended_s in phases_of(record):
                    self._phase(record.method, name).add(ended_s - began_s)
                self._phase(record.method, "total").add(record.completed_s - record.queued_s)

    def _phase(self, method: str, phase: str) -> Quantiles:
        """Return the distribution of a phase; the caller holds the lock."""
        phases = self._times.setdefault(method, {})
        found = phases.get(phase)
        if found is None:
            found = phases[phase] = Quantiles()
        return found

    def _prometheus_lines(self) -> Iterator[str]:
        for name, count in self.counters.items():
            full = f"tinker_sync_{name}_total"
            yield from (f"# HELP {full} {_COUNTERS[name]}", f"# TYPE {full} counter", f"{full} {count}")
        yield "# TYPE tinker_sync_calls_total counter"
        for method, outcomes in self.calls.items():
            for outcome, count in outcomes.items():
                yield f"tinker_sync_calls_total{_labels(call=method, outcome=outcome)} {count}"
        yield "# TYPE tinker_sync_phase_seconds summary"
        for method, phases in self.times.items():
            for phase, figures in phases.items():
                labels = {"call": method, "phase": phase}
                for share, value in (
                    ("0.5", figures.p50_s),
                    ("0.95", figures.p95_s),
                    ("0.99", figures.p99_s),
                ):
                    yield f"tinker_sync_phase_seconds{_labels(**labels, quantile=share)} {value:.6g}"
                total_s = figures.mean_s * figures.count
                yield f"tinker_sync_phase_seconds_sum{_labels(**labels)} {total_s:.6f}"
                yield f"tinker_sync_phase_seconds_count{_labels(**labels)} {figures.count}"


_COLUMNS: Final = ("mean", "p50", "p95", "p99", "max")


def _labels(**labels: str) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"
