"""Doubles of requests, senders, reactors, and workers whose jobs a test runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from support.clock import FakeClock

from tinker_sync.runtime.flows import Flow, Flows
from tinker_sync.runtime.futures import APIFuture, CombinedFuture
from tinker_sync.runtime.send_queue import Entry
from tinker_sync.transport.call import Call, Reply, SendFailed


class FakeRequest:
    """A request with a name instead of a body."""

    def __init__(self, name: str, *when_done: Callable[[Any], object]) -> None:
        self.name = name
        self.future: APIFuture[Any] = APIFuture(when_done=when_done)
        self.held: list[int] = []
        """The numbers under which a copy of the body was kept, for a later send."""

    def hold(self, number: int) -> None:
        self.held.append(number)

    def __repr__(self) -> str:
        return self.name


def entry(name: str, count: int = 1, *, parallel: bool = False, alone: bool = False) -> Entry[FakeRequest]:
    """Return an entry with the requests `name.1`, `name.2` and so on. A single one has the name `name`."""
    if count == 1:
        request = FakeRequest(name)
        return Entry(name, [request], request.future, alone=alone)
    requests = [FakeRequest(f"{name}.{number}") for number in range(1, count + 1)]
    whole: CombinedFuture[Any, Any] = CombinedFuture([each.future for each in requests], merge=list)
    return Entry(name, requests, whole, parallel, alone)


class NoReactor:
    """A double of a reactor without a thread. The flows run on the thread that starts or wakes them."""

    def follow(self, job: Callable[[], object]) -> bool:
        job()
        return True

    def run_soon(self, job: Callable[[], object]) -> bool:
        return False


class OnWorkers(NoReactor):
    """A double of a reactor that leaves the flows to workers."""

    def follow(self, job: Callable[[], object]) -> bool:
        return False


class BlockingSender:
    """Sends the requests of a queue on workers, by functions that return or raise when a send has ended.

    Args:
        flows: the flows of the queue.
        workers: run the functions.
        send: takes a request and its number.
    """

    def __init__(
        self,
        flows: Flows,
        workers: Any,
        send: Callable[[FakeRequest, int], object],
    ) -> None:
        self._flows = flows
        self._workers = workers
        self._send = send

    def send(self, request: FakeRequest, number: int, may_send: Callable[[], bool]) -> Flow[None]:
        def job() -> None:
            if may_send():
                request.future._mark_sending()
                self._send(request, number)

        yield from self._flows.on_worker(self._workers, job)


class Inline:
    """A double of workers that run each job at once."""

    def run(self, job: Callable[[], object]) -> None:
        job()

    run_call = run_handlers = run


class NoWorkers:
    """A double of workers for which the system starts no thread."""

    def run(self, job: Callable[[], object]) -> None:
        raise RuntimeError("can't start new thread")


class HandWorkers:
    """A double of the workers that keeps jobs. The test runs them, in an order of its choice."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], object]] = []

    def run(self, job: Callable[[], object]) -> None:
        self.jobs.append(job)

    run_call = run

    def do(self, index: int = 0) -> None:
        self.jobs.pop(index)()

    def do_all(self) -> None:
        while self.jobs:
            self.do()


# ---- A double of the reactor, which sends nothing and never waits: tests answer requests and fire timers
Outcome = Reply | SendFailed


class Started:
    """A request that a test answers, or a timer that a test fires."""

    def __init__(self, call: Call | None, action: Callable[..., object], delay_s: float = 0.0) -> None:
        self.call = call
        self.delay_s = delay_s
        self._action: Callable[..., object] | None = action

    @property
    def path(self) -> str:
        assert self.call is not None
        return self.call.path

    @property
    def body(self) -> Any:
        assert self.call is not None
        return json.loads(self.call.body or b"null")

    @property
    def headers(self) -> dict[str, str]:
        assert self.call is not None
        return dict(self.call.headers)

    def end(self, *outcome: Outcome) -> None:
        action, self._action = self._action, None
        assert action is not None, "it has been answered, or was called off"
        action(*outcome)

    def cancel(self) -> bool:
        live, self._action = self._action is not None, None
        return live

    @property
    def live(self) -> bool:
        return self._action is not None


class HandReactor:
    """A double of `Reactor` that keeps requests and timers for the test."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.requests: list[Started] = []
        self.timers: list[Started] = []
        self.room = 10**9

    def start(self, call: Call, on_done: Callable[[Outcome], object]) -> Started:
        started = Started(call, on_done)
        self.requests.append(started)
        return started

    def pause(self, pause_s: float, action: Callable[[], object]) -> Started:
        return self.after(pause_s, action)

    def after(self, delay_s: float, action: Callable[[], object]) -> Started:
        started = Started(None, action, delay_s)
        self.timers.append(started)
        return started

    def follow(self, _job: Callable[[], object]) -> bool:
        return False

    def run_soon(self, job: Callable[[], object]) -> bool:
        job()
        return True

    # ------------------------------------------------------------------------------------ for tests

    def next(self, path: str | None = None) -> Started:
        """Return the oldest unanswered request, or the oldest of this path."""
        for started in self.requests:
            if started.live and (path is None or started.path == path):
                return started
        raise AssertionError(
            f"no request waits; timers: {[timer.delay_s for timer in self.timers if timer.live]}"
        )

    @property
    def waiting(self) -> int:
        """The number of unanswered requests."""
        return sum(started.live for started in self.requests)

    def answer(self, status: int = 200, body: Any = None, path: str | None = None, **headers: str) -> None:
        """Answer the oldest unanswered request, or the oldest of this path."""
        octets = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.next(path).end(Reply(status, {"content-type": "application/json", **named}, octets))

    def lose(self, **how: Any) -> None:
        """Break the connection of the oldest unanswered request; `how` has fields of `SendFailed`."""
        self.next().end(SendFailed("the connection broke", **{"maybe_received": True, **how}))

    def pass_time(self) -> float:
        """Advance the clock to the timer with the shortest delay, fire it, and return its delay."""
        live = [timer for timer in self.timers if timer.live]
        assert live, "no timer runs"
        soonest = min(live, key=lambda timer: timer.delay_s)
        self.clock.advance(soonest.delay_s)
        soonest.end()
        return soonest.delay_s
