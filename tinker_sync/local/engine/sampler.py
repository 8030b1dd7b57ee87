"""The sampler: requests of everybody continued together, one token of each at every step.

`step` first computes prompts that wait, as far as there is room, then continues all samples by one token. Not
thread-safe: one thread owns it. Each sample has draws of its own, so what a request gets depends on the
request alone, but for rounding: the last bits of a row of a product depend on where BLAS finds it among the
others, and a token changes by that where its draw lies so close to the edge between two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from tinker_sync.local.engine import head, ops
from tinker_sync.local.engine._arrays import Array
from tinker_sync.local.engine.choose import Draws, choose, top
from tinker_sync.local.engine.decoder import hidden_states
from tinker_sync.local.engine.kv_cache import KVCache, Seat
from tinker_sync.local.engine.lora import LoraParams
from tinker_sync.local.engine.model import Weights
from tinker_sync.local.engine.prefill import Prefilled, Prompt, prefill, routes_of
from tinker_sync.local.engine.prefix import PrefixStore
from tinker_sync.local.engine.sample_spec import (
    Sampled,
    SampleResult,
    SampleSpec,
    TopK,
    check_spec,
)

if TYPE_CHECKING:
    from typing import TypeAlias

Decode: TypeAlias = Callable[[list[int]], str]

PROMPT_ROWS = 2048
"""Prompt positions computed in one step, so that those who are being continued need not wait long."""

_BYTES_A_CHARACTER = 4


@attrs.define(eq=False)
class _Job:
    """One request under way."""

    ticket: int
    spec: SampleSpec
    known: int = 0
    prefilled: Prefilled | None = None
    done: dict[int, Sampled] = attrs.Factory(dict)
    cancelled: bool = False


@attrs.define(eq=False)
class _Row:
    """One sample under way; `tokens[-1]` is not yet in the cache."""

    job: _Job
    number: int
    draws: Draws
    tokens: list[int] = attrs.Factory(list)
    logprobs: list[float] = attrs.Factory(list)
    topk: list[tuple[Array, Array]] = attrs.Factory(list)
    seat: Seat | None = None


class Sampler:
    """Samples from one base model and any adapters over it.

    Args:
        weights: The base model.
        decode: Turns token ids into text; needed only for stop texts.
        max_rows: How many samples are continued at once; more wait.
        prefix_positions: How many positions of earlier prompts are kept.

    >>> from tinker_sync.local.engine.model import ModelConfig, random_weights
    >>> size = {"vocab_size": 9, "hidden_size": 8, "layers": 1, "mlp_size": 8}
    >>> config = ModelConfig(heads=2, kv_heads=1, head_dim=4, **size)
    >>> sampler = Sampler(random_weights(config, seed=0))
    >>> spec = SampleSpec(prompt=np.array([1, 2, 3]), seed=5, max_tokens=4, num_samples=2)
    >>> [len(sample.tokens) for sample in sampler.run([spec])[0].samples]
    [4, 4]
    """

    def __init__(
        self,
        weights: Weights,
        *,
        decode: Decode | None = None,
        max_rows: int = 256,
        prefix_positions: int = 1 << 16,
    ) -> None:
        self._weights = weights
        self._decode = decode
        self._max_rows = max_rows
        self._cache = KVCache(weights.config, weights.dtype)
        self._prefixes = PrefixStore(prefix_positions)
        self._jobs: dict[int, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._ready: deque[_Row] = deque()
        self._finished: list[_Job] = []
        self._tickets = 0

    @property
    def busy(self) -> bool:
        """Whether another step would do anything."""
        return bool(self._jobs)

    def add(self, spec: SampleSpec) -> int:
        """Take a request in.

        Returns:
            Its ticket, under which `step` will hand out the result.

        Raises:
            ValueError: it cannot be computed; names the field.
        """
        check_spec(spec, self._weights.config)
        if spec.stop_texts and self._decode is None:
            raise ValueError("stop: texts need a tokenizer, and there is none")
        self._tickets += 1
        job = _Job(self._tickets, spec)
        self._jobs[job.ticket] = job
        self._waiting.append(job)
        return job.ticket

    def cancel(self, ticket: int) -> None:
        """Drop a request; nothing happens if it is unknown or already answered."""
        job = self._jobs.pop(ticket, None)
        if job is None:
            return
        job.cancelled = True
        self._waiting = deque(other for other in self._waiting if other is not job)
        self._ready = deque(row for row in self._ready if row.job is not job)
        for seat in self._cache.seats():
            if seat.owner.job is job:
                self._cache.remove(seat.owner.seat)

    def forget(self, params: LoraParams | None) -> None:
        """Drop what is kept of an adapter that will not be sampled any more."""
        self._prefixes.forget(params)

    def run(self, specs: Sequence[SampleSpec]) -> list[SampleResult]:
        """Take requests in and step until all of them are answered; others under way go on as well, and their
        results are lost: for callers that have the sampler to themselves."""
        tickets = [self.add(spec) for spec in specs]
        results: dict[int, SampleResult] = {}
        while self.busy:
            results.update(self.step())
        return [results[ticket] for ticket in tickets]

    def step(self) -> list[tuple[int, SampleResult]]:
        """Compute waiting prompts, then one token of every sample.

        Returns:
            Tickets and results of the requests that are complete now.
        """
        self._prefill()
        self._start()
        self._continue()
        finished, self._finished = self._finished, []
        return [(job.ticket, _result(job)) for job in finished]

    # ----------------------------------------------------------------------------------------- prompts

    def _prefill(self) -> None:
        jobs: list[_Job] = []
        prompts: list[Prompt] = []
        room = self._max_rows - len(self._cache.seats()) - len(self._ready)
        rows = 0
        seen: set[tuple[int, bytes]] = set()
        twins: list[_Job] = []
        while self._waiting and room > 0 and rows < PROMPT_ROWS:
            job = self._waiting.popleft()
            spec = job.spec
            name = id(spec.params), spec.prompt.tobytes()
            if name in seen and self._prefixes.keeps(len(spec.prompt)):
                twins.append(job)  # in the next step nearly all of it is known
                continue
            seen.add(name)
            past = self._prefixes.find(spec.params, spec.prompt, spec.first_scored)
            prompts.append(Prompt(spec, past))
            jobs.append(job)
            rows += prompts[-1].rows
            room -= spec.num_samples
        self._waiting.extendleft(reversed(twins))
        if not jobs:
            return
        for job, prompt, prefilled in zip(jobs, prompts, prefill(self._weights, prompts), strict=True):
            job.known, job.prefilled = prompt.known, prefilled
            self._prefixes.remember(job.spec.params, job.spec.prompt, prefilled.past)
            self._ready += (
                _Row(job, number, Draws(job.spec.seed, number)) for number in range(job.spec.num_samples)
            )

    def _start(self) -> None:
        """Give samples that are ready their first token and, if they go on, a seat."""
        room = self._max_rows - len(self._cache.seats())
        rows = [self._ready.popleft() for _ in range(min(room, len(self._ready)))]
        if not rows:
            return
        logits = np.stack([row.job.prefilled.logits for row in rows if row.job.prefilled is not None])
        for row in self._accepted(rows, logits):
            assert row.job.prefilled is not None  # noqa: S101
            row.seat = self._cache.add(row, *row.job.prefilled.past)

    # ------------------------------------------------------------------------------------ continuation

    def _continue(self) -> None:
        for seat in self._cache.seats():
            seat.owner.seat = self._cache.grown(seat)
        rows: list[_Row] = [seat.owner for seat in self._cache.seats()]
        if not rows:
            return
        tokens = np.array([row.tokens[-1] for row in rows])
        positions = np.array([seat.filled for seat in self._cache.seats()])
        routes = routes_of([row.job.spec.params for row in rows])
        turn = ops.rotation(self._weights.config, positions, self._weights.dtype)
        hidden = hidden_states(self._weights, tokens, turn, routes, self._cache.continuation())
        logits = head.logits(self._weights, hidden, routes)
        going = {id(row) for row in self._accepted(rows, logits)}
        for row in rows:
            if id(row) not in going and row.seat is not None:
                self._cache.remove(row.seat)

    def _accepted(self, rows: list[_Row], logits: Array) -> list[_Row]:
        """Choose a token for each row; those that go on after it."""
        chosen = choose(logits, [row.job.spec.settings for row in rows], [row.draws.next() for row in rows])
        going = []
        for place, (row, token, logprob) in enumerate(
            zip(rows, chosen.tokens.tolist(), chosen.logprobs.tolist(), strict=True)
        ):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if row.job.spec.topk_logprobs:
                best = top(logits[place], row.job.spec.topk_logprobs)
                row.topk.append((best, logits[place, best] - chosen.totals[place]))
            reason = self._ended(row)
            if reason is None:
                going.append(row)
            else:
                self._finish(row, reason)
        return going

    def _ended(self, row: _Row) -> str | None:
        spec = row.job.spec
        if row.tokens[-1] in spec.stop_tokens:
            return "stop"
        if spec.stop_texts and self._decode is not None:
            # Each token is at least a byte of text, and earlier text was looked at before.
            reach = _BYTES_A_CHARACTER * (max(map(len, spec.stop_texts)) + 1)
            text = self._decode(row.tokens[-reach:])
            if any(stop in text for stop in spec.stop_texts):
                return "stop"
        return "length" if len(row.tokens) >= spec.max_tokens else None

    def _finish(self, row: _Row, reason: str) -> None:
        job = row.job
        topk = None
        if row.topk:
            ids, logprobs = (np.stack(column) for column in zip(*row.topk, strict=True))
            topk = TopK(ids.astype(np.int32), logprobs.astype(np.float32))
        tokens, logprobs = np.array(row.tokens, dtype=np.int32), np.array(row.logprobs, dtype=np.float32)
        job.done[row.number] = Sampled(tokens, logprobs, reason, topk)
        if len(job.done) == job.spec.num_samples:
            self._finished.append(self._jobs.pop(job.ticket))


def _result(job: _Job) -> SampleResult:
    assert job.prefilled is not None  # noqa: S101
    samples = [job.done[number] for number in range(job.spec.num_samples)]
    return SampleResult(samples, job.prefilled.scores, job.known)
