"""What a datum brings along for its loss, checked: every complaint is a ValueError that names the input.

All checks of a request come before any computing, so a bad datum changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs
import numpy as np

from tinker_sync.local.engine._arrays import Array, first_outside
from tinker_sync.local.engine.losses import LOSSES, LossRule, Term

if TYPE_CHECKING:
    from typing import TypeAlias


@attrs.frozen(eq=False)
class Csr:
    """A sparse 2-D input: `values` row by row, `crow` where each row begins, `col` the column of each."""

    values: Array
    crow: Array
    col: Array
    shape: tuple[int, int]

    def dense(self, name: str) -> tuple[Array, Array]:
        """The dense array with 0 where nothing is listed, and which cells are listed.

        >>> Csr(np.array([7]), np.array([0, 0, 1]), np.array([1]), (2, 2)).dense("x")[0].tolist()
        [[0, 0], [0, 7]]
        """
        rows, columns = self.shape
        fits = len(self.crow) == rows + 1 and len(self.values) == len(self.col)
        if not fits or self.crow[0] != 0 or self.crow[-1] != len(self.col) or (np.diff(self.crow) < 0).any():
            raise ValueError(f"{name}: its sparse row pointers do not fit its values and shape {self.shape}")
        if len(self.col) and not (self.col.min() >= 0 and self.col.max() < columns):
            raise ValueError(f"{name}: a sparse column lies outside of 0 … {columns - 1}")
        row = np.repeat(np.arange(rows), np.diff(self.crow))
        array = np.zeros(self.shape, dtype=self.values.dtype)
        listed = np.zeros(self.shape, dtype=bool)
        array[row, self.col] = self.values
        listed[row, self.col] = True
        return array, listed


Input: TypeAlias = "Array | Csr"


@attrs.frozen(eq=False)
class Example:
    """One datum: the tokens the model reads and what the loss takes, by name.

    >>> Example(np.array([1, 2]), {"target_tokens": np.array([2, 3])}).tokens.tolist()
    [1, 2]
    """

    tokens: Array
    inputs: Mapping[str, Input]


@attrs.frozen(eq=False)
class Checked:
    """One datum, ready: targets `[tokens, candidates]`, 0 in padding, and float64 inputs of `shape`."""

    tokens: Array
    targets: Array
    real: Array | None
    shape: tuple[int, ...]
    inputs: Mapping[str, Array]

    def term(self, rule: LossRule, p: Array, config: Mapping[str, float]) -> Term:
        """The loss at these log-probabilities, whose padding counts for nothing."""
        term = rule.compute(p.reshape(self.shape).astype(np.float64), self.inputs, config)
        slope = term.slope.reshape(self.targets.shape)
        return term._replace(slope=slope if self.real is None else np.where(self.real, slope, 0.0))

    def output(self, p: Array) -> Array:
        """What is reported: float32 of the targets' shape, 0 in padding."""
        shown = p if self.real is None else np.where(self.real, p, 0.0)
        return shown.reshape(self.shape).astype(np.float32)


def rule_of(loss_fn: str | LossRule) -> LossRule:
    """The rule of a loss, or the rule itself.

    >>> rule_of("stable_reinforce")
    Traceback (most recent call last):
    ValueError: loss_fn: 'stable_reinforce' needs data that only the hosted service records
    """
    if isinstance(loss_fn, LossRule):
        return loss_fn
    if loss_fn == "stable_reinforce":
        raise ValueError(f"loss_fn: {loss_fn!r} needs data that only the hosted service records")
    if loss_fn not in LOSSES:
        raise ValueError(f"loss_fn: {loss_fn!r} is unknown; there are {', '.join(LOSSES)}")
    return LOSSES[loss_fn]


def settled_config(loss_fn: str | LossRule, given: Mapping[str, float] | None) -> dict[str, float]:
    """The config of a loss with its defaults.

    >>> settled_config("ppo", {"clip_low_threshold": 0.5})
    {'clip_low_threshold': 0.5, 'clip_high_threshold': 1.2}
    """
    rule, said = rule_of(loss_fn), dict(given or {})
    loss_fn = rule.name or loss_fn
    config: dict[str, float] = {}
    for name, default in rule.config.items():
        value = said.pop(name, default)
        if value is None:
            raise ValueError(f"loss_fn_config.{name}: {loss_fn} needs it")
        if isinstance(value, (bool, str)) or not math.isfinite(value):
            raise ValueError(f"loss_fn_config.{name}: must be a finite number, got {value!r}")
        config[name] = float(value)
    if said:
        known = ", ".join(rule.config) or "no settings"
        raise ValueError(f"loss_fn_config.{next(iter(said))}: {loss_fn} knows {known}")
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 0.0)
    if low > high:
        raise ValueError(f"loss_fn_config.clip_low_threshold: {low} is above clip_high_threshold {high}")
    return config


def checked(example: Example, loss_fn: str | LossRule, vocab_size: int, place: str = "") -> Checked:
    """A datum ready for its loss.

    Args:
        example: The datum.
        loss_fn: Which loss.
        vocab_size: How many tokens the model knows.
        place: What to put before the name of an input, such as `data[3].`.

    Raises:
        ValueError: an input is missing, unknown, of a wrong kind or shape, or has a value nobody can use.

    >>> checked(Example(np.array([1]), {}), "cross_entropy", 9)
    Traceback (most recent call last):
    ValueError: target_tokens: cross_entropy needs it
    """
    rule = rule_of(loss_fn)
    loss_fn = rule.name or loss_fn
    for name in rule.needs:
        if name not in example.inputs:
            raise ValueError(f"{place}{name}: {loss_fn} needs it")
    for name in example.inputs:
        if name not in (*rule.needs, *rule.may) and rule.ranks is None:
            takes = ", ".join((*rule.needs, *rule.may))
            raise ValueError(f"{place}{name}: {loss_fn} takes only {takes}")
    tokens = _token_ids(example.tokens, f"{place}model_input", vocab_size)
    if tokens.ndim != 1 or not len(tokens):
        raise ValueError(f"{place}model_input: must be at least one token, got shape {tokens.shape}")
    targets, real = _targets(example, rule, str(loss_fn), vocab_size, place, len(tokens))
    inputs: dict[str, Array] = {}
    for name in (*rule.needs, *rule.may):
        if name in example.inputs and name in (rule.ranks or {}):
            inputs[name] = _of_rank(example.inputs[name], f"{place}{name}", (rule.ranks or {})[name])
        elif name in example.inputs and name != "target_tokens":
            inputs[name] = _numbers(example.inputs[name], f"{place}{name}", targets.shape)
    if loss_fn == "gspo" and not inputs["sequence_ratio_mask"].any():
        raise ValueError(f"{place}sequence_ratio_mask: marks no token of the sequence")
    wide = targets.reshape(len(tokens), -1)
    return Checked(tokens, wide, None if real is None else real.reshape(wide.shape), targets.shape, inputs)


def _targets(
    example: Example, rule: LossRule, loss_fn: str, vocab_size: int, place: str, length: int
) -> tuple[Array, Array | None]:
    """Dense targets, and which cells are real if some are not."""
    name, given = f"{place}target_tokens", example.inputs["target_tokens"]
    real = None
    if isinstance(given, Csr):
        array, real = given.dense(name)
        # Token 0 is not listed where what is not listed means 0: a weight tells it from padding.
        weights = example.inputs.get("weights")
        if weights is not None:
            dense = weights.dense(f"{place}weights")[0] if isinstance(weights, Csr) else weights
            real = real | (dense != 0) if dense.shape == real.shape else real
    else:
        array = given
    targets = _token_ids(array, name, vocab_size)
    ranks: tuple[int, ...] = (1, 2) if loss_fn == "cross_entropy" else (1,)
    if rule.ranks is not None:
        ranks = (rule.ranks["logprobs"],)
    if targets.ndim not in ranks:
        raise ValueError(
            f"{name}: {loss_fn} takes rank {' or '.join(map(str, ranks))}, got shape {targets.shape}"
        )
    if len(targets) != length:
        raise ValueError(f"{name}: {len(targets)} positions, but model_input has {length} tokens")
    if targets.ndim == 2 and "weights" not in example.inputs and rule.ranks is None:
        raise ValueError(f"{place}weights: targets of rank 2 need them")
    return targets, real


def _token_ids(array: Array, name: str, vocab_size: int) -> Array:
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name}: token ids must be integers, got {array.dtype}")
    if array.size and not (array.min() >= 0 and array.max() < vocab_size):
        raise ValueError(f"{name}: {first_outside(array, vocab_size)}")
    return array.astype(np.int64, copy=False)


def _of_rank(given: Input, name: str, rank: int) -> Array:
    """The dense array as it is."""
    array = given.dense(name)[0] if isinstance(given, Csr) else given
    if array.ndim != rank:
        raise ValueError(f"{name}: the loss takes rank {rank}, got shape {array.shape}")
    return array


def _numbers(given: Input, name: str, shape: tuple[int, ...]) -> Array:
    array = given.dense(name)[0] if isinstance(given, Csr) else given
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{name}: must be numbers, got {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{name}: shape {array.shape} differs from that of target_tokens, {shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: not all values are finite")
    return array.astype(np.float64)
