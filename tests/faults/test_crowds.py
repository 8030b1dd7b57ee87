"""Many threads on one client, one send queue, one limiter and one pool of workers.

The server of the client is slow, refuses, fails and disconnects at random.

Every round has its own seed, and every fourth round has no failures. By default a few small rounds run;
`STRESS_ROUNDS=200 pytest tests/faults/test_crowds.py` runs 200 rounds of the full size.
"""

from __future__ import annotations

import math
import os
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import pytest
from support.clock import PATIENCE_S, FakeClock
from support.crowd import Steps, aside, let_others_run, together, until
from support.hasty import FLAGS, number_of
from support.isolation import our_threads
from support.sends import BlockingSender, FakeRequest, OnWorkers, entry
from support.tinker_stub import Answer, Asked, Behaviour, Stub, StubServer, _sample_output

from tinker_sync import types
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.clients.service import ServiceClient
from tinker_sync.clients.training import TrainingClient
from tinker_sync.errors import EarlierCallFailedError, TinkerError
from tinker_sync.runtime import rate_limiter
from tinker_sync.runtime.flows import Flows
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.rate_limiter import (
    FIRST_RATE,
    Gate,
    Permit,
    RateLimiter,
    SendRate,
    key_fingerprint,
    shared_rate_limiter,
)
from tinker_sync.runtime.send_queue import Entry, SendQueue
from tinker_sync.runtime.workers import Workers

THREADS = 64
ROUNDS = int(os.environ.get("STRESS_ROUNDS", "0"))
# In the suite, the rounds are small, to save time.
CALLS = 50 if ROUNDS else 5
SAMPLES = 4000 if ROUNDS else 512
SEEDS = range(ROUNDS or 2)

TRAINING = ("/forward_backward", "/optim_step", "/save_weights", "/save_weights_for_sampler")
SOON = {"retry-after-ms": "1"}


class Chaos(Stub):
    """A stub that records requests by their sequence numbers, and fails at random.

    Args:
        seed: the seed of the failures.
        trouble: the share of requests that fail, repeated ones included.
        behaviour: fields of `Behaviour`.
    """

    def __init__(self, seed: int, trouble: float, **behaviour: Any) -> None:
        super().__init__(Behaviour(**{"config": dict(FLAGS), **behaviour}))
        self.keep_log = False
        self.arrivals: list[int] = []
        """The numbers of training requests in order of arrival, each once."""
        self.bodies: dict[int, bytes] = {}
        self.broken: list[str] = []
        """Descriptions of requests that no client may send."""
        self.forgotten = 0
        self._random = random.Random(seed)
        self._trouble = trouble
        self._taken: dict[int, Any] = {}

    async def answer(self, asked: Asked) -> Answer:
        name = asked.path.removeprefix("/api/v1")
        if name in TRAINING:
            self._note(number_of(asked), asked)
        elif name == "/asample":
            self._keep(asked.json()["seq_id"], asked)
        if self._random.random() < self._trouble and name in (*TRAINING, "/asample", "/retrieve_future"):
            return await self._fail(asked, name)
        return await self._once(asked, name)

    async def _once(self, asked: Asked, name: str) -> Answer:
        """Answer a request. A repeated sequence number gets the answer to its first request."""
        number = (
            number_of(asked) if name in TRAINING else asked.json()["seq_id"] if name == "/asample" else None
        )
        if number is None:
            return await super()._answer_as_usual(asked, name)
        if number not in self._taken:
            self._taken[number] = await super()._answer_as_usual(asked, name)
        return self._taken[number]

    async def _fail(self, asked: Asked, name: str) -> Answer:
        if name == "/retrieve_future" and self._random.random() < 0.05 and not self._is_training(asked):
            self.forgotten += 1
            return Answer(410, {"detail": "gone"})
        kind = self._random.choice(["full", "down", "before", "after", "slow"])
        if kind == "after":
            await self._once(asked, name)
        if kind == "slow":
            answer = await self._once(asked, name)
            return Answer(
                answer.status,
                answer.octets(),
                answer.headers,
                answer.content_type,
                self._random.random() / 50,
            )
        made = {
            "full": Answer(429, {}, SOON),
            "down": Answer(503, {}, SOON),
            "before": Answer(abort="before"),
            "after": Answer(abort="before"),  # the work is done, and the answer is lost
        }
        return made[kind]

    def _is_training(self, asked: Asked) -> bool:
        promise = self._promises.get(asked.json()["request_id"])
        return promise is None or promise.kind != "sample"

    def _note(self, number: int, asked: Asked) -> None:
        if number not in self.bodies:
            self.arrivals.append(number)
        self._keep(number, asked)

    def _keep(self, number: int, asked: Asked) -> None:
        if self.bodies.setdefault(number, asked.body) != asked.body:
            self.broken.append(f"two bodies under number {number}")

    def on_asample(self, asked: Asked) -> Any:
        """Return a promise whose sample is the prompt, so that each thread can check its results."""
        made = super().on_asample(asked)
        prompt = [token for chunk in asked.json()["prompt"]["chunks"] for token in chunk["tokens"]]
        self._promises[made["request_id"]].payload = _sample_output([prompt], None)
        return made


def trouble_of(seed: int) -> float:
    return 0.06 if seed % 4 else 0.0


def client_of(stub: Stub) -> ServiceClient:
    return ServiceClient(base_url=stub.url, api_key="tml-stress", rate_limiter=RateLimiter())  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------ training
Check = Callable[[Any], bool]


def mixed_call(trainer: TrainingClient, thread: int, index: int) -> tuple[APIFuture[Any], Check]:
    """Make the call number `index` of a thread. Return its future, and a function that checks its result."""
    mark = thread * 1000 + index
    if index % 5 == 0:
        return trainer.optim_step(types.AdamParams()), lambda answer: answer.metrics["step:max"] >= 1
    if index % 5 == 1:
        return trainer.save_state(f"n{mark}"), lambda answer: bool(answer.path.endswith(f"/weights/n{mark}"))
    if index % 5 == 2:
        saved = trainer.save_weights_for_sampler(f"n{mark}")
        return saved, lambda answer: bool(answer.path.endswith(f"/sampler_weights/n{mark}"))
    # One or two requests, because a request has at most two data.
    batch = [
        types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [mark, number]})
        for number in range(1 + index % 3)
    ]
    call = trainer.forward_backward if index % 5 == 3 else trainer.forward
    expected = [value for number in range(len(batch)) for value in (-mark / 100, -number / 100)]
    return call(batch, "cross_entropy"), lambda answer: logprobs(answer) == pytest.approx(expected)


def logprobs(output: types.ForwardBackwardOutput) -> list[float]:
    return [value for row in output.loss_fn_outputs for value in row["logprobs"].data]


@pytest.mark.parametrize("seed", SEEDS)
def test_mixed_training_calls_of_64_threads(seed: int) -> None:
    stub = Chaos(seed, trouble_of(seed), config={**FLAGS, "fwdbwd_max_chunk_len": 2})
    with StubServer(stub), client_of(stub) as client:
        trainer = client.create_lora_training_client("stub/model").result()
        made = together(*[lambda n=n: calls_of(trainer, n) for n in range(THREADS)], patience_s=PATIENCE_S)
        answers = [[(future.result(PATIENCE_S), check) for future, check in calls] for calls in made]
    assert stub.broken == []
    assert in_order(stub.arrivals) == list(range(1, len(stub.arrivals) + 1))
    for answered in answers:
        for answer, check in answered:
            assert check(answer), answer
        steps = steps_in(answered)
        assert steps == sorted(set(steps))  # a thread's calls keep their order
    everybodys = [step for answered in answers for step in steps_in(answered)]
    assert len(everybodys) == len(set(everybodys))


def steps_in(answered: list[tuple[Any, Check]]) -> list[float]:
    return [
        answer.metrics["step:max"] for answer, _ in answered if isinstance(answer, types.OptimStepResponse)
    ]


def calls_of(trainer: TrainingClient, thread: int) -> list[tuple[APIFuture[Any], Check]]:
    return [mixed_call(trainer, thread, index) for index in range(CALLS)]


def in_order(arrivals: list[int]) -> list[int]:
    """Return the arrivals in the order of the calls: of two chunks, the second one arrives first."""
    made: list[int] = []
    early: int | None = None
    for number in arrivals:
        if early is None and number == len(made) + 2:
            early = number
        else:
            made += [number] if early is None else [number, early]
            early = None
    return made


# ------------------------------------------------------------------------------------ sampling
@pytest.mark.parametrize("seed", SEEDS)
def test_samples_of_64_threads(seed: int) -> None:
    config = {**FLAGS, "sample_use_retrieve_futures": seed % 2 == 1}
    stub = Chaos(seed, trouble_of(seed), config=config, latency_s=0.002)
    with StubServer(stub), client_of(stub) as client:
        sampler = client.create_sampling_client(base_model="stub/model").result()
        jobs = [lambda n=n: samples_of(sampler, n) for n in range(THREADS)]
        wrong = [each for found in together(*jobs, patience_s=PATIENCE_S) for each in found]
    assert wrong == []
    assert stub.broken == []
    assert sorted(stub.bodies) == list(range(THREADS * (SAMPLES // THREADS) + stub.forgotten))


def samples_of(sampler: SamplingClient, thread: int) -> list[Any]:
    """Take the samples of a thread concurrently. Return pairs of prompt and sample where the two differ."""
    params = types.SamplingParams(max_tokens=2)
    prompts = [[thread, index] for index in range(SAMPLES // THREADS)]
    futures = [sampler.sample(types.ModelInput.from_ints(prompt), 1, params) for prompt in prompts]
    answers = [future.result(PATIENCE_S).sequences[0].tokens for future in futures]
    return [(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True) if prompt != answer]


# ------------------------------------------------------------------------------------ both
def test_callbacks_of_a_crowd_run_once_each_and_never_on_the_reactor() -> None:
    seen: dict[str, int] = defaultdict(int)
    lock = threading.Lock()

    def note(_: object) -> None:
        with lock:
            seen[threading.current_thread().name.rstrip("0123456789")] += 1

    stub = Chaos(0, 0.02)
    with StubServer(stub), client_of(stub) as client:
        sampler = client.create_sampling_client(base_model="stub/model").result()
        params = types.SamplingParams(max_tokens=1)
        futures = [sampler.sample(types.ModelInput.from_ints([n]), 1, params) for n in range(300)]
        for future in futures:
            future.add_done_callback(note)
        for future in futures:
            future.result(PATIENCE_S)
    assert sum(seen.values()) == 300
    assert "tinker-poll" not in seen


# --------------------------------------------------------------------------------------- send queue
CALLS_OF_A_THREAD = 50
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
            request, second = FakeRequest("a", hold), entry("b")
            first = Entry("a", [request], request.future)
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
        for call in range(CALLS_OF_A_THREAD):
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
        thread, call = draw.randrange(THREADS), draw.randrange(CALLS_OF_A_THREAD)
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
        assert outcomes.total() == THREADS * CALLS_OF_A_THREAD
        if not outcomes["failed"]:
            assert outcomes["refused"] == 0
            check_wire(server, queue, callers)


# ------------------------------------------------------------------------------------- rate limiter
def closed_limiter(delay_s: float = 5) -> tuple[FakeClock, RateLimiter, Gate]:
    clock = FakeClock(now_s=0.0, automatic=False)
    limiter = RateLimiter(clock=clock)
    limiter.close_for(delay_s)
    return clock, limiter, limiter.gate()


class Crowd:
    """Threads that each acquire a permit. `permits` has the permits so far."""

    def __init__(self, size: int, gate: Gate) -> None:
        self._lock = threading.Lock()
        self.permits: list[object] = []
        self._threads = [threading.Thread(target=self._enter, args=(gate,), daemon=True) for _ in range(size)]

    def start(self, clock: FakeClock) -> None:
        """Start the threads one after the other."""
        for number, thread in enumerate(self._threads):
            thread.start()
            clock.await_waiters(number + 1)

    def _enter(self, gate: Gate) -> None:
        permit = gate.acquire()
        with self._lock:
            self.permits.append(permit)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_64_threads_get_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(RateLimiter):
        """A limiter whose constructor lets other threads run, so that they find no limiter yet."""

        def __init__(self, **options: Any) -> None:
            let_others_run()
            super().__init__(**options)

    monkeypatch.setattr(rate_limiter, "RateLimiter", Slow)
    for number in range(20):
        fingerprint = key_fingerprint(f"tml-{number}")
        limiters = together(*[lambda f=fingerprint: shared_rate_limiter("https://host", f)] * 64)
        assert len({id(limiter) for limiter in limiters}) == 1


CROWD = 12


def test_a_closed_gate_holds_its_waiters_and_an_open_one_lets_them_go_one_by_one() -> None:
    clock, limiter, gate = closed_limiter(5)
    crowd = Crowd(CROWD, gate)
    crowd.start(clock)
    clock.advance(4.9)
    assert crowd.permits == []
    clock.advance(0.1)
    for count in range(1, CROWD + 1):
        until(lambda count=count: len(crowd.permits) == count)
        clock.await_waiters(CROWD - count)
        assert len(crowd.permits) == count
        clock.advance(1.01 / FIRST_RATE)
    crowd.join()
    assert limiter.state() == "reopening"


def test_a_close_wakes_those_of_its_gate_only() -> None:
    clock, limiter, gate = closed_limiter(5)
    other = limiter.gate()

    def enter() -> str:
        with pytest.raises(TinkerError) as caught:
            gate.acquire()
        return str(caught.value)

    with aside(*[enter] * 5) as heard:
        clock.await_waiters(5)
        crowd = Crowd(1, other)
        crowd._threads[0].start()
        clock.await_waiters(6)
        gate.close(TinkerError("closed"))
        clock.await_waiters(1)
    assert heard == ["closed"] * 5
    assert crowd.permits == []
    clock.advance(5)
    crowd.join()
    assert len(crowd.permits) == 1


class PassingClock(FakeClock):
    """A clock on which a wait with a timeout ends at once. A wait without a timeout takes real time."""

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        if timeout_s < math.inf:
            return super().wait(event, timeout_s)
        assert event.wait(PATIENCE_S), "nobody let this one in"
        return True


class WatchedRate(SendRate):
    """A rate that records at each permit the time since the end of the pause."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.since_closed_s: list[float] = []  # guarded by the lock of the limiter

    def count(self) -> Permit:
        self.since_closed_s.append(self._clock.now() - self.closed_until_s)
        return super().count()


def test_a_crowd_passes_and_nobody_during_a_pause() -> None:
    """32 threads send to a server that refuses one in three requests."""
    clock = PassingClock()
    limiter = RateLimiter(clock=clock)
    limiter._rate = rate = WatchedRate(clock)
    gate = limiter.gate()

    def send(draw: random.Random) -> bool:
        permit = gate.acquire()
        assert permit is not None
        let_others_run()
        if draw.random() < 1 / 3:
            gate.throttled(permit, delay_s=draw.random())
            return False
        gate.succeeded(permit)
        return True

    def work(seed: int) -> int:
        draw = random.Random(seed)
        sent = 0
        while sent < 20:
            sent += send(draw)
        return sent

    # An open limiter does not count its permits, so close it once.
    limiter.close_for(1)
    assert together(*[partial(work, seed) for seed in range(32)], patience_s=60) == [20] * 32
    assert min(rate.since_closed_s) >= 0


# ------------------------------------------------------------------------------------------ workers
def test_nothing_is_lost_when_threads_come_and_go() -> None:
    """Every job is done, although threads start and end often, because an idle one ends at once."""
    for _ in range(20):
        pool = Workers("send", max_threads=4, idle_s=0)

        def use(offset: int, pool: Workers = pool) -> list[int]:
            futures = [pool.submit(lambda value: value, offset + number) for number in range(50)]
            return [future.result(PATIENCE_S) for future in futures]

        results = together(*[lambda offset=offset: use(offset) for offset in range(0, 400, 50)])
        assert sorted(chain.from_iterable(results)) == list(range(400))
        assert pool.close(PATIENCE_S)
        until(lambda: our_threads() == set())


def test_submitting_races_with_closing() -> None:
    """Each job that is submitted during a close is either refused or carried out."""
    for _ in range(50):
        pool, refused = Workers("send", max_threads=2), threading.Event()

        def submit(pool: Workers = pool, refused: threading.Event = refused) -> int:
            done = 0
            try:
                for _ in range(20):
                    done += pool.submit(lambda: 1).result(PATIENCE_S)
            except RuntimeError:
                refused.set()
            return done

        with aside(submit, submit) as counts:
            assert pool.close(PATIENCE_S)
        assert refused.is_set() == (sum(counts) < 40)
