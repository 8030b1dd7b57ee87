"""Many threads use one client, against a server that is slow, refuses, fails and disconnects at random.

Every round has its own seed, and every fourth round has no failures. By default a few small rounds run;
`STRESS_ROUNDS=200 pytest tests/threads/test_clients_stress.py` runs 200 rounds of the full size.
"""

from __future__ import annotations

import os
import random
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from support.crowd import together
from support.hasty import FLAGS
from support.tinker_stub import PROTO, Answer, Asked, Behaviour, Stub, StubServer, _fields, _sample_output

from tinker_sync import types
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.clients.service import ServiceClient
from tinker_sync.clients.training import TrainingClient
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.rate_limiter import RateLimiter

THREADS = 64
ROUNDS = int(os.environ.get("STRESS_ROUNDS", "0"))
# In the suite, the rounds are small, to save time.
CALLS = 50 if ROUNDS else 5
SAMPLES = 4000 if ROUNDS else 512
SEEDS = range(ROUNDS or 2)
PATIENCE_S = 120.0

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


def number_of(asked: Asked) -> int:
    if asked.headers["content-type"] == PROTO:
        return int(dict(_fields(asked.body))[2])
    return int(asked.json()["seq_id"])


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
