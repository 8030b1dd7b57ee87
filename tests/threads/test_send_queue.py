from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.clock import PATIENCE_S
from support.crowd import together, until
from support.sends import BlockingSender, FakeRequest, OnWorkers, entry
from support.steps import Steps

from tinker_sync.errors import EarlierCallFailedError
from tinker_sync.runtime.flows import Flows
from tinker_sync.runtime.send_queue import Entry, SendQueue
from tinker_sync.runtime.workers import Workers

THREADS = 64
CALLS = 50
# The number of rounds of the tests with a crowd of threads. A thorough run has 100.
REPETITIONS = int(os.environ.get("STRESS_REPETITIONS", "2"))


@contextmanager
def queue_of(
    send: Callable[[FakeRequest, int], object], max_threads: int = 4
) -> Iterator[SendQueue[FakeRequest]]:
    """Yield a queue whose flow runs on one thread, and whose sends are calls of `send` on other threads."""
    with Workers("fetch", 1) as reactor, Workers("send", max_threads) as pool:
        flows = Flows(OnWorkers(), reactor)  # type: ignore[arg-type]
        sender = BlockingSender(flows, pool, send)
        yield SendQueue(flows, sender.send, lambda: None, pool)
        assert pool.close(PATIENCE_S)
        assert reactor.close(PATIENCE_S)


class TestForcedInterleavings:
    def test_a_call_made_while_another_is_failing(self) -> None:
        """An operation that is appended when a send has failed, before the queue is broken, is not sent."""
        steps = Steps("fail", "append", "break")
        wire: list[int] = []

        def send(part: FakeRequest, number: int) -> None:
            wire.append(number)
            with steps("fail"):
                pass
            # The future fails first, and its callbacks run before the queue breaks.
            raise KeyError("refused")

        def hold(_: Any) -> None:
            with steps("break"):
                pass

        with queue_of(send) as queue:
            first, second = entry("a"), entry("b")
            first.future._when_done(hold)
            queue.put(first)
            with steps("append"):
                queue.put(second)
            assert isinstance(second.future.exception(PATIENCE_S), EarlierCallFailedError)
            assert isinstance(first.future.exception(PATIENCE_S), KeyError)
        assert wire == [1]


class Server:
    """A double of the server that accepts requests, and later answers them, in random order.

    Again and again its thread takes all requests that have arrived, and accepts them in random order. So
    sends end, and results arrive, in every possible order.
    """

    def __init__(self, seed: int, *, refuses: str | None = None) -> None:
        self._draw = random.Random(seed)
        self._refuses = refuses
        self._lock = threading.Lock()
        self.wire: list[tuple[int, str]] = []  # guarded by _lock; accepted, in the order they came
        self.attempts: Counter[int] = Counter()  # guarded by _lock
        self.problems: list[str] = []  # guarded by _lock
        self._sending: Counter[str] = Counter()  # guarded by _lock; operations in their send phase
        self._parked: list[tuple[FakeRequest, int, threading.Event]] = []  # guarded by _lock
        self._work = threading.Condition(self._lock)
        self._stop = False
        self._results: list[tuple[FakeRequest, int]] = []  # touched by the server's thread only
        self._thread = threading.Thread(target=self._serve, name="server", daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._work:
            self._stop = True
            self._work.notify()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def send(self, part: FakeRequest, number: int) -> None:
        """Send as a worker does: repeat the request under the same number until the server accepts it."""
        name = part.name.partition(".")[0]
        with self._lock:
            self._sending[name] += 1
            if len(self._sending) > 1:
                self.problems.append(f"{sorted(self._sending)} are sent at once")
        try:
            while not self._attempt(part, number):
                pass
        finally:
            with self._lock:
                self._sending[name] -= 1
                self._sending += Counter()  # drops zeros

    def _attempt(self, part: FakeRequest, number: int) -> bool:
        arrived = threading.Event()
        with self._work:
            self.attempts[number] += 1
            lost = self._draw.random() < 0.1
            self._parked.append((part, number, arrived))
            self._work.notify()
        assert arrived.wait(PATIENCE_S)
        if part.name == self._refuses:
            raise KeyError(part.name)
        if lost:
            return False
        with self._work:
            self.wire.append((number, part.name))
        return True

    def _serve(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._parked or self._stop, PATIENCE_S)
                parked, self._parked = self._parked, []
                stopping = self._stop and not parked
            self._draw.shuffle(parked)
            for part, number, arrived in parked:
                arrived.set()
                if part.name != self._refuses:
                    self._results.append((part, number))
            self._answer(everything=stopping)
            if stopping:
                return

    def _answer(self, *, everything: bool) -> None:
        self._draw.shuffle(self._results)
        keep = 0 if everything else len(self._results) // 2
        while len(self._results) > keep:
            part, number = self._results.pop()
            part.future.resolve((part.name, number))


class Caller:
    """The operations that one thread appends to a queue. They have one or more parts; some are cancelled."""

    def __init__(self, thread: int, repetition: int, queue: SendQueue[FakeRequest]) -> None:
        self._draw = random.Random(repetition * THREADS + thread)
        self._thread = thread
        self._queue = queue
        self.made: list[Entry[FakeRequest]] = []
        self.cancelled: list[Entry[FakeRequest]] = []

    def __call__(self) -> None:
        for call in range(CALLS):
            kind = self._draw.random()
            count = 1 if kind < 0.8 else self._draw.randint(2, 4)
            made = entry(f"{self._thread}-{call}", count, parallel=kind > 0.9)
            self.made.append(made)
            self._queue.put(made)
            if self._draw.random() < 0.05:
                chosen = self._draw.choice(self.made)
                if chosen.future.cancel() and chosen not in self.cancelled:
                    self.cancelled.append(chosen)


def crowd(
    repetition: int, *, refuses: str | None = None
) -> tuple[Server, SendQueue[FakeRequest], list[Caller]]:
    """Let 64 threads make 50 calls each, and wait until every send has ended."""
    with Server(repetition, refuses=refuses) as server, queue_of(server.send, 6) as queue:
        callers = [Caller(thread, repetition, queue) for thread in range(THREADS)]
        together(*callers, patience_s=60)
        # A queue with waiting calls may be idle for a moment, so wait until it is empty.
        until(lambda: repr(queue).startswith(("<SendQueue idle, 0 queued", "<SendQueue broken")))
    return server, queue, callers


def check_wire(server: Server, queue: SendQueue[FakeRequest], callers: list[Caller]) -> dict[str, int]:
    """Check that the numbers on the wire are consecutive and unique, and follow the calls of each thread.

    Return the number of each part, by the part's name.
    """
    assert server.problems == []
    numbers = [number for number, _ in server.wire]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))
    number_of = {name: number for number, name in server.wire}
    assert len(number_of) == len(numbers)
    for caller in callers:
        own = [[number_of.get(part.name) for part in made.requests] for made in caller.made]
        sent = [numbers for numbers in own if None not in numbers]
        flat = [number for numbers in sent for number in numbers]
        assert flat == sorted(flat)  # a thread's calls in the order it made them
        for numbers in sent:
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return number_of


def answer_to(made: Entry[FakeRequest], number_of: dict[str, int]) -> Any:
    answers = [(part.name, number_of[part.name]) for part in made.requests]
    return answers if len(answers) > 1 else answers[0]


@pytest.mark.parametrize("batch", range(min(10, REPETITIONS)))
def test_64_threads_with_50_calls_each(batch: int) -> None:
    """Numbers are consecutive, each future gets its own answer, and cancelled calls are not sent."""
    for repetition in range(batch, REPETITIONS, 10):
        server, queue, callers = crowd(repetition)
        number_of = check_wire(server, queue, callers)
        total = 0
        for caller in callers:
            for made in caller.made:
                if made in caller.cancelled:
                    assert made.future.cancelled()
                    assert not any(part.name in number_of for part in made.requests)
                else:
                    assert made.future.result(PATIENCE_S) == answer_to(made, number_of)
                    total += len(made.requests)
        assert len(server.wire) == total
        assert sum(server.attempts.values()) > total  # some were sent again, under the same number
        assert repr(queue) == f"<SendQueue idle, 0 queued, next number {total + 1}>"


def outcome_of(made: Entry[FakeRequest], refuses: str, number_of: dict[str, int]) -> str:
    """Return the outcome of an operation as a word. Check that its result or its error is a possible one."""
    if made.future.cancelled():
        assert not any(part.name in number_of for part in made.requests)
        return "cancelled"
    failure = made.future.exception(PATIENCE_S)
    if failure is None:
        assert made.future.result() == answer_to(made, number_of)
        return "answered"
    culprit = refuses.partition(".")[0]
    if isinstance(failure, EarlierCallFailedError):
        assert failure.call == culprit
        return "refused"
    assert isinstance(failure, KeyError)
    assert (failure.args, made.name) == ((refuses,), culprit)
    return "failed"


@pytest.mark.parametrize("batch", range(min(10, REPETITIONS)))
def test_a_call_that_cannot_be_sent_ends_all_later_ones(batch: int) -> None:
    """Every future ends.

    Calls before the failed one get their answers. Those after it fail, and their errors name the failed call.
    """
    for repetition in range(batch, REPETITIONS, 10):
        draw = random.Random(repetition)
        thread, call = draw.randrange(THREADS), draw.randrange(CALLS)
        # The refused part may not exist: only a fifth of the calls have a chunk 2.
        refuses = f"{thread}-{call}" + draw.choice(["", ".1", ".2"])
        server, queue, callers = crowd(repetition, refuses=refuses)
        number_of = {name: number for number, name in server.wire}
        outcomes: Counter[str] = Counter()
        for caller in callers:
            broken = False
            for made in caller.made:
                outcome = outcome_of(made, refuses, number_of)
                outcomes[outcome] += 1
                assert not (broken and outcome == "answered")  # no later call is sent
                broken = broken or outcome in ("failed", "refused")
        assert server.problems == []
        assert outcomes["failed"] <= 1
        assert (outcomes["failed"] == 1) == ("broken" in repr(queue))
        assert outcomes.total() == THREADS * CALLS
        if not outcomes["failed"]:
            assert outcomes["refused"] == 0
            check_wire(server, queue, callers)
