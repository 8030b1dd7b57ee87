"""`Sampler`: computes all sample requests for a base model together, one token of each sample at a step.

`step` first computes waiting prompts, as far as there is room, and the first token of each new sample; then
it adds a token to every sample. One thread owns a sampler. Each sample has its own random numbers, so its
tokens depend on its request alone, except for rounding: the last bits of a product depend on the row's
position in the batch. If a random number is so close to the boundary between two tokens that these bits
decide, either token may be drawn.
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
from tinker_sync.local.engine.prefill import Prefilled, PrefixStore, Prompt, group_by_adapter, prefill
from tinker_sync.local.engine.sample_spec import Sampled, SampleResult, SampleSpec, TopK, check_spec

if TYPE_CHECKING:
    from typing import TypeAlias

Decode: TypeAlias = Callable[[list[int]], str]

PROMPT_ROWS = 2048
"""A step takes no further prompt beyond this number of positions; this bounds the delay of other samples."""

_BYTES_A_CHARACTER = 4


@attrs.define(eq=False)
class _ActiveRequest:
    """One request in progress."""

    ticket: int
    spec: SampleSpec
    known: int = 0
    prefilled: Prefilled | None = None
    done: dict[int, Sampled] = attrs.Factory(dict)
    cancelled: bool = False


@attrs.define(eq=False)
class _SampleRow:
    """One sample in progress; the keys and values of `tokens[-1]` are not yet in the `KVCache`."""

    job: _ActiveRequest
    number: int
    draws: Draws
    tokens: list[int] = attrs.Factory(list)
    logprobs: list[float] = attrs.Factory(list)
    topk: list[tuple[Array, Array]] = attrs.Factory(list)
    seat: Seat | None = None


class Sampler:
    """The computation of all sample requests for one base model, with any of its adapters. Not thread-safe.

    Args:
        weights: The base model.
        decode: A function from token ids to text; needed only for stop texts.
        max_rows: The largest number of samples in progress at once; others wait.
        prefix_positions: The largest number of cached positions of earlier prompts.

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
        self._jobs: dict[int, _ActiveRequest] = {}
        self._waiting: deque[_ActiveRequest] = deque()
        self._ready: deque[_SampleRow] = deque()
        self._finished: list[_ActiveRequest] = []
        self._tickets = 0

    @property
    def busy(self) -> bool:
        """True while there are unanswered requests."""
        return bool(self._jobs)

    def add(self, spec: SampleSpec) -> int:
        """Add a request.

        Returns:
            Its ticket, which `step` returns with the result.

        Raises:
            ValueError: the request cannot be computed; the message names the field.
        """
        check_spec(spec, self._weights.config)
        if spec.stop_texts:
            self._check_decoder()
        self._tickets += 1
        job = _ActiveRequest(self._tickets, spec)
        self._jobs[job.ticket] = job
        self._waiting.append(job)
        return job.ticket

    def _check_decoder(self) -> None:
        """Raise a ValueError if text cannot be decoded. A step that fails would fail all requests."""
        if self._decode is None:
            raise ValueError("stop: texts need a tokenizer, and there is none")
        try:
            self._decode([])
        except Exception as problem:
            raise ValueError(f"stop: texts need a tokenizer, which cannot be read: {problem}") from problem

    def cancel(self, ticket: int) -> None:
        """Drop a request. For an unknown or answered ticket, do nothing."""
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
        """Drop the cached prompts of an adapter that is no longer used; None means the base model."""
        self._prefixes.forget(params)

    def run(self, specs: Sequence[SampleSpec]) -> list[SampleResult]:
        """Add requests, compute them, and return their results in order.

        The results of requests that `add` has added before are lost.
        """
        tickets = [self.add(spec) for spec in specs]
        results: dict[int, SampleResult] = {}
        while self.busy:
            results.update(self.step())
        return [results[ticket] for ticket in tickets]

    def step(self) -> list[tuple[int, SampleResult]]:
        """Compute waiting prompts and the first tokens of new samples, then one more token of every sample.

        Returns:
            Tickets and results of the requests that this step completed.
        """
        self._prefill()
        self._start()
        self._continue()
        finished, self._finished = self._finished, []
        return [(job.ticket, _result(job)) for job in finished]

    # ----------------------------------------------------------------------------------------- prompts

    def _prefill(self) -> None:
        jobs: list[_ActiveRequest] = []
        prompts: list[Prompt] = []
        room = self._max_rows - len(self._cache.seats()) - len(self._ready)
        rows = 0
        seen: set[tuple[int, bytes]] = set()
        twins: list[_ActiveRequest] = []
        while self._waiting and room > 0 and rows < PROMPT_ROWS:
            job = self._waiting.popleft()
            spec = job.spec
            name = id(spec.params), spec.prompt.tobytes()
            if name in seen and self._prefixes.keeps(len(spec.prompt)):
                twins.append(job)  # the same prompt is in this step; in the next one it is in the cache
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
                _SampleRow(job, number, Draws(job.spec.seed, number))
                for number in range(job.spec.num_samples)
            )

    def _start(self) -> None:
        """Choose the first token of ready samples while there is room.

        Samples that do not end with this token enter the `KVCache`.
        """
        room = self._max_rows - len(self._cache.seats())
        rows = [self._ready.popleft() for _ in range(min(room, len(self._ready)))]
        if not rows:
            return
        logits = np.stack([row.job.prefilled.logits for row in rows if row.job.prefilled is not None])
        for row in self._choose_tokens(rows, logits):
            assert row.job.prefilled is not None  # noqa: S101
            row.seat = self._cache.add(row, *row.job.prefilled.past)

    # ------------------------------------------------------------------------------------ continuation

    def _continue(self) -> None:
        for seat in self._cache.seats():
            seat.owner.seat = self._cache.grow(seat)
        rows: list[_SampleRow] = [seat.owner for seat in self._cache.seats()]
        if not rows:
            return
        tokens = np.array([row.tokens[-1] for row in rows])
        positions = np.array([seat.filled for seat in self._cache.seats()])
        routes = group_by_adapter([row.job.spec.params for row in rows])
        turn = ops.rotation(self._weights.config, positions, self._weights.dtype)
        hidden = hidden_states(self._weights, tokens, turn, routes, self._cache.continuation())
        logits = head.logits(self._weights, hidden, routes)
        going = {id(row) for row in self._choose_tokens(rows, logits)}
        for row in rows:
            if id(row) not in going and row.seat is not None:
                self._cache.remove(row.seat)

    def _choose_tokens(self, rows: list[_SampleRow], logits: Array) -> list[_SampleRow]:
        """Choose a token for each row, and finish samples that end with it. Return the rows that go on."""
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
            reason = self._find_stop_reason(row)
            if reason is None:
                going.append(row)
            else:
                self._finish(row, reason)
        return going

    def _find_stop_reason(self, row: _SampleRow) -> str | None:
        spec = row.job.spec
        if row.tokens[-1] in spec.stop_tokens:
            return "stop"
        if spec.stop_texts and self._decode is not None:
            # Each token is at least a byte of text, and earlier steps have searched the earlier text.
            reach = _BYTES_A_CHARACTER * (max(map(len, spec.stop_texts)) + 1)
            text = self._decode(row.tokens[-reach:])
            if any(stop in text for stop in spec.stop_texts):
                return "stop"
        return "length" if len(row.tokens) >= spec.max_tokens else None

    def _finish(self, row: _SampleRow, reason: str) -> None:
        job = row.job
        topk = None
        if row.topk:
            ids, logprobs = (np.stack(column) for column in zip(*row.topk, strict=True))
            topk = TopK(ids.astype(np.int32), logprobs.astype(np.float32))
        tokens, logprobs = np.array(row.tokens, dtype=np.int32), np.array(row.logprobs, dtype=np.float32)
        job.done[row.number] = Sampled(tokens, logprobs, reason, topk)
        if len(job.done) == job.spec.num_samples:
            self._finished.append(self._jobs.pop(job.ticket))


def _result(job: _ActiveRequest) -> SampleResult:
    assert job.prefilled is not None  # noqa: S101
    samples = [job.done[number] for number in range(job.spec.num_samples)]
    return SampleResult(samples, job.prefilled.scores, job.known)
