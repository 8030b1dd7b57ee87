"""The training of one adapter over shared base weights, with its gradients and its optimizer.

A trainer is used by one thread at a time. Any number of trainers share one `Weights`. Equal calls give equal
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import attrs
import numpy as np

from tinker_sync.local.engine.decoder import (
    PackedSpan,
    Tape,
    backward,
    packed_states,
    round_up,
    target_logprobs,
    target_logprobs_backward,
)
from tinker_sync.local.engine.lora import LoraParams, LoraSettings
from tinker_sync.local.engine.losses import (
    CheckedExample,
    Example,
    LossRule,
    Term,
    check_example,
    complete_config,
    find_rule,
)
from tinker_sync.local.engine.model import Weights
from tinker_sync.local.engine.safetensors import Array

if TYPE_CHECKING:
    from tinker_sync.types.optim import AdamParams

# --------------------------------------------------------------------------------------------- the optimizer


def _check_settings(settings: AdamParams) -> None:
    for field in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
        value = getattr(settings, field)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{field}: must be finite and not negative, got {value}")
    for field in ("beta1", "beta2"):
        if not 0 <= getattr(settings, field) < 1:
            raise ValueError(f"{field}: must be at least 0 and below 1, got {getattr(settings, field)}")


@attrs.define(eq=False)
class AdamState:
    """The state of the optimizer: both moments of the gradients, and the number of steps.

    >>> from tinker_sync.types import AdamParams
    >>> weights, state = np.ones(1), AdamState.start(np.ones(1))
    >>> norm = state.step(weights, np.array([3.0]), AdamParams(learning_rate=0.1))
    >>> float(weights[0].round(6)), float(norm), state.steps
    (0.9, 3.0, 1)
    """

    first: Array
    second: Array
    steps: int = 0

    @classmethod
    def start(cls, weights: Array) -> AdamState:
        """Return the state before the first step."""
        return cls(np.zeros_like(weights), np.zeros_like(weights))

    def step(self, weights: Array, grads: Array, settings: AdamParams) -> float:
        """Change `weights` by one step.

        Args:
            weights: Flat; changed in place.
            grads: Flat; scaled in place by clipping.
            settings: The settings of this step.

        Returns:
            The norm of the gradients before clipping.

        Raises:
            ValueError: a setting is out of its range, or some gradients are not finite; weights and state
                stay unchanged.
        """
        _check_settings(settings)
        norm = math.sqrt(float(np.dot(grads, grads))) if len(grads) else 0.0
        if not math.isfinite(norm):
            norm = math.sqrt(float(np.square(grads, dtype=np.float64).sum()))
        if not math.isfinite(norm):
            raise ValueError("gradients: not all of them are finite, so no step was taken")
        shrink = settings.grad_clip_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ does
        if 0 < shrink < 1:
            grads *= shrink
        self.steps += 1
        weights *= 1 - settings.learning_rate * settings.weight_decay
        self.first *= settings.beta1
        self.first += grads * (1 - settings.beta1)
        self.second *= settings.beta2
        square = grads * grads
        square *= 1 - settings.beta2
        self.second += square
        np.sqrt(self.second, out=square)
        square /= math.sqrt(1 - settings.beta2**self.steps)
        square += settings.eps
        np.divide(self.first, square, out=square, where=square > 0)
        square *= settings.learning_rate / (1 - settings.beta1**self.steps)
        weights -= square
        return norm


# ----------------------------------------------------------------------------------------------- the trainer


BATCH_ROWS = 1024
"""The most rows computed at once, unless one datum has more; a layer's results fit the processor's cache."""

_NO_SLOPE: Array = np.empty(0)

LENGTH_STEP = 8
"""Sequences are padded to a multiple of this, so that sequences of similar length share a batch."""


@attrs.frozen(eq=False)
class LossOutput:
    """The result of a pass: the log-probabilities of each datum's targets, and the metrics of the batch."""

    logprobs: list[Array]
    metrics: dict[str, float]


class _Pack(NamedTuple):
    """A batch of data in consecutive rows: `places[i]` are the rows of `data[i]`."""

    data: list[CheckedExample]
    places: list[slice]
    spans: list[PackedSpan]
    tokens: Array
    positions: Array


class AdapterTrainer:
    """One adapter under training. Not thread-safe.

    >>> from tinker_sync.local.engine.model import ModelConfig, random_weights
    >>> from tinker_sync.types import AdamParams
    >>> size = {"vocab_size": 9, "hidden_size": 8, "layers": 1, "mlp_size": 8}
    >>> config = ModelConfig(heads=2, kv_heads=1, head_dim=4, **size)
    >>> run = AdapterTrainer(random_weights(config, seed=0), LoraSettings(rank=2))
    >>> data = [Example(np.array([1, 2, 3]), {"target_tokens": np.array([2, 3, 4])})]
    >>> before = run.forward_backward(data, "cross_entropy").metrics["loss:sum"]
    >>> norm = run.optim_step(AdamParams(learning_rate=0.1))
    >>> run.forward(data, "cross_entropy").metrics["loss:sum"] < before
    True
    """

    def __init__(self, weights: Weights, settings: LoraSettings) -> None:
        self.weights = weights
        self.params = LoraParams.start(weights.config, settings, weights.dtype)
        self.grads = LoraParams.zeros(weights.config, settings, weights.dtype)
        self.optimizer = AdamState.start(self.params.flat)

    def forward(
        self, data: Sequence[Example], loss_fn: str | LossRule, config: Mapping[str, float] | None = None
    ) -> LossOutput:
        """Compute the loss and log-probabilities, without gradients.

        Arguments and errors are those of `forward_backward`.
        """
        return self._pass(data, loss_fn, config, None)

    def forward_backward(
        self, data: Sequence[Example], loss_fn: str | LossRule, config: Mapping[str, float] | None = None
    ) -> LossOutput:
        """Compute the loss and log-probabilities, and add to the gradients for the next `optim_step`.

        Args:
            data: The data; the loss is the sum over them.
            loss_fn: The loss, by name or as a rule.
            config: Values that replace the loss's defaults.

        Raises:
            ValueError: an input is bad; the message names it, and the gradients stay unchanged.
        """
        grads = LoraParams.zeros(self.weights.config, self.params.settings, self.weights.dtype)
        output = self._pass(data, loss_fn, config, grads)
        if not np.isfinite(grads.flat).all():
            raise ValueError(
                "logprobs, advantages, weights: too large or too far from the model's for a gradient"
            )
        self.grads.flat += grads.flat
        return output

    def restore(self, flat: Array, optimizer: AdamState | None = None) -> None:
        """Continue from saved numbers, with gradients of zero.

        Args:
            flat: The saved `params.flat`.
            optimizer: The saved `optimizer`; None means a new one.

        Raises:
            ValueError: the size differs from that of the adapter; the adapter stays unchanged.
        """
        first, second = (flat, flat) if optimizer is None else (optimizer.first, optimizer.second)
        for name, array in (("flat", flat), ("first", first), ("second", second)):
            if array.shape != self.params.flat.shape:
                raise ValueError(f"{name}: expected shape {self.params.flat.shape}, got {array.shape}")
        self.params.flat[...] = flat
        self.grads.flat[...] = 0
        self.optimizer = AdamState.start(self.params.flat)
        if optimizer is not None:
            self.optimizer.first[...] = first
            self.optimizer.second[...] = second
            self.optimizer.steps = optimizer.steps

    def optim_step(self, settings: AdamParams) -> float:
        """Take one step of AdamW, and set the gradients to zero for the next pass.

        Returns:
            The norm of the gradients before clipping.

        Raises:
            ValueError: some gradients are not finite; the adapter stays unchanged.
        """
        norm = self.optimizer.step(self.params.flat, self.grads.flat, settings)
        self.grads.flat[...] = 0
        return norm

    def _pass(
        self,
        data: Sequence[Example],
        loss_fn: str | LossRule,
        given: Mapping[str, float] | None,
        grads: LoraParams | None,
    ) -> LossOutput:
        rule, config = find_rule(loss_fn), complete_config(loss_fn, given)
        ready = [self._check(item, loss_fn, number) for number, item in enumerate(data)]
        logprobs: list[Array] = [np.empty(0, dtype=np.float32)] * len(ready)
        terms: list[Term | None] = [None] * len(ready)
        with np.errstate(over="ignore", invalid="ignore"):
            for members in _batches([len(one.tokens) for one in ready]):
                pack = _pack([ready[number] for number in members])
                for number, p, term in self._compute(pack, rule, config, grads):
                    logprobs[members[number]] = p
                    terms[members[number]] = term._replace(slope=_NO_SLOPE)
        return LossOutput(logprobs, _combine_metrics([term for term in terms if term is not None]))

    def _check(self, item: Example, loss_fn: str | LossRule, number: int) -> CheckedExample:
        config = self.weights.config
        one = check_example(item, loss_fn, config.vocab_size, f"data[{number}].")
        if len(one.tokens) > config.max_positions:
            got, most = len(one.tokens), config.max_positions
            raise ValueError(f"data[{number}].model_input: {got} tokens, the model takes {most}")
        return one

    def _compute(
        self, pack: _Pack, rule: LossRule, config: Mapping[str, float], grads: LoraParams | None
    ) -> Iterator[tuple[int, Array, Term]]:
        """Yield for each datum its index in the pack, its log-probabilities and its loss.

        Add the gradients to `grads` if it is given.
        """
        tape = Tape(pack.spans, recording=grads is not None)
        hidden = packed_states(self.weights, pack.tokens, pack.positions, self.params, tape)
        dhidden = np.zeros_like(hidden)
        for members, rows in _group_by_width(pack):
            targets = np.concatenate([pack.data[number].targets for number in members])
            p, head_tape = target_logprobs(
                self.weights, hidden[rows], targets, self.params, keep=grads is not None
            )
            slopes, start = np.empty(p.shape, dtype=p.dtype), 0
            for number in members:
                one = pack.data[number]
                part = slice(start, start + len(one.tokens))
                term = one.term(rule, p[part], config)
                slopes[part] = term.slope
                yield number, one.output(p[part]), term
                start = part.stop
            if grads is not None:
                dhidden[rows] = target_logprobs_backward(self.weights, head_tape, slopes, self.params, grads)
        if grads is not None:
            backward(self.weights, tape, pack.positions, dhidden, self.params, grads)


def _combine_metrics(terms: Sequence[Term]) -> dict[str, float]:
    """Combine the metrics of all data, and add the sum of the losses as `loss:sum`.

    A metric whose name ends with `:mean` is averaged over the data that have it; any other is summed.
    """
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for term in terms for name in term.metrics):
        values = [term.metrics[name] for term in terms if name in term.metrics]
        metrics[name] = float(sum(values)) / (len(values) if name.endswith(":mean") else 1)
    return {**metrics, "loss:sum": float(sum(term.loss for term in terms))}


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Divide data of these lengths into batches, and yield the indexes of the data of each batch.

    The longest data come first, so the data of a batch are of similar length.
    """
    padded = [round_up(length, LENGTH_STEP) for length in lengths]
    members: list[int] = []
    rows = 0
    for number in sorted(range(len(padded)), key=lambda number: -padded[number]):
        if members and rows + padded[number] > BATCH_ROWS:
            yield members
            members, rows = [], 0
        members.append(number)
        rows += padded[number]
    if members:
        yield members


def _pack(data: list[CheckedExample]) -> _Pack:
    """Put the data into consecutive rows, each padded at its end; neighbours of equal length share a span."""
    lengths = [round_up(len(one.tokens), LENGTH_STEP) for one in data]
    tokens = np.zeros(sum(lengths), dtype=np.int64)
    positions = np.concatenate([np.arange(length) for length in lengths])
    places: list[slice] = []
    spans: list[PackedSpan] = []
    start = 0
    for one, length in zip(data, lengths, strict=True):
        places.append(slice(start, start + len(one.tokens)))
        tokens[places[-1]] = one.tokens
        if spans and spans[-1].length == length:
            spans[-1] = spans[-1]._replace(sequences=spans[-1].sequences + 1)
        else:
            spans.append(PackedSpan(start, 1, length))
        start += length
    return _Pack(data, places, spans, tokens, positions)


def _group_by_width(pack: _Pack) -> Iterator[tuple[list[int], Array]]:
    """Yield groups of data that have equally many candidates for a token.

    Each group consists of the indexes of its data in the pack, and the rows of their tokens without padding.
    """
    widths: dict[int, list[int]] = {}
    for number, one in enumerate(pack.data):
        widths.setdefault(one.targets.shape[1], []).append(number)
    for members in widths.values():
        places = (pack.places[number] for number in members)
        yield members, np.concatenate([np.arange(place.start, place.stop) for place in places])
