"""The inputs of losses: conversion and checks, which raise a ValueError that names the input.

A trainer checks all data of a request before it computes, so a bad datum changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs
import numpy as np

from tinker_sync.local.engine._arrays import Array, describe_bad_token
from tinker_sync.local.engine.losses import LOSSES, LossRule, Term

if TYPE_CHECKING:
    from typing import TypeAlias


@attrs.frozen(eq=False)
class Csr:
    """A sparse 2-D input: `values` row by row, `crow` the row starts, `col` the column of each value."""

    values: Array
    crow: Array
    col: Array
    shape: tuple[int, int]

    def dense(self, name: str) -> tuple[Array, Array]:
        """Return the dense array, with 0 in unlisted cells, and a mask of the listed cells.

        Raises:
            ValueError: the row starts or the columns do not fit; the message begins with `name`.

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
    """One datum: the tokens that the model reads, and the inputs of the loss by name.

    >>> Example(np.array([1, 2]), {"target_tokens": np.array([2, 3])}).tokens.tolist()
    [1, 2]
    """

    tokens: Array
    inputs: Mapping[str, Input]


@attrs.frozen(eq=False)
class CheckedExample:
    """A datum that `check_example` has checked and converted.

    Attributes:
        targets: token ids `[tokens, candidates]`, 0 in padding.
        real: a mask: True for targets, False in padding; None if the targets were given as a dense array.
        shape: the shape in which the targets were given.
        inputs: the inputs of the loss, by name.
    """

    tokens: Array
    targets: Array
    real: Array | None
    shape: tuple[int, ...]
    inputs: Mapping[str, Array]

    def term(self, rule: LossRule, p: Array, config: Mapping[str, float]) -> Term:
        """Compute the loss at the log-probabilities `p` of the targets. The derivatives in padding are 0."""
        term = rule.compute(p.reshape(self.shape).astype(np.float64), self.inputs, config)
        slope = term.slope.reshape(self.targets.shape)
        return term._replace(slope=slope if self.real is None else np.where(self.real, slope, 0.0))

    def output(self, p: Array) -> Array:
        """Return the log-probabilities to report: float32 in the targets' shape, 0 in padding."""
        shown = p if self.real is None else np.where(self.real, p, 0.0)
        return shown.reshape(self.shape).astype(np.float32)


def find_rule(loss_fn: str | LossRule) -> LossRule:
    """Return the rule of a named loss; return a rule unchanged.

    Raises:
        ValueError: the engine does not compute a loss of this name.

    >>> find_rule("ppo").needs
    ('target_tokens', 'logprobs', 'advantages')
    """
    if isinstance(loss_fn, LossRule):
        return loss_fn
    if loss_fn not in LOSSES:
        raise ValueError(f"loss_fn: {loss_fn!r} is unknown; there are {', '.join(LOSSES)}")
    return LOSSES[loss_fn]


def complete_config(loss_fn: str | LossRule, given: Mapping[str, float] | None) -> dict[str, float]:
    """Check the config of a loss, and return it with the defaults of the loss filled in.

    Raises:
        ValueError: the loss or a setting is unknown, or a setting is missing or not valid.

    >>> complete_config("ppo", {"clip_low_threshold": 0.5})
    {'clip_low_threshold': 0.5, 'clip_high_threshold': 1.2}
    """
    rule, rest = find_rule(loss_fn), dict(given or {})
    loss_fn = rule.name or loss_fn
    config: dict[str, float] = {}
    for name, default in rule.config.items():
        value = rest.pop(name, default)
        if value is None:
            raise ValueError(f"loss_fn_config.{name}: {loss_fn} needs it")
        if isinstance(value, (bool, str)) or not math.isfinite(value):
            raise ValueError(f"loss_fn_config.{name}: must be a finite number, got {value!r}")
        config[name] = float(value)
    if rest:
        known = ", ".join(rule.config) or "no settings"
        raise ValueError(f"loss_fn_config.{next(iter(rest))}: {loss_fn} knows {known}")
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 0.0)
    if low > high:
        raise ValueError(f"loss_fn_config.clip_low_threshold: {low} is above clip_high_threshold {high}")
    return config


def check_example(
    example: Example, loss_fn: str | LossRule, vocab_size: int, place: str = ""
) -> CheckedExample:
    """Check a datum and convert it for its loss.

    Args:
        example: The datum.
        loss_fn: The loss, by name or as a rule.
        vocab_size: The size of the model's vocabulary.
        place: A prefix for the names of inputs in messages, such as `data[3].`.

    Raises:
        ValueError: an input is missing, unknown, of a wrong kind or shape, or has a value out of range.

    >>> check_example(Example(np.array([1]), {}), "cross_entropy", 9)
    Traceback (most recent call last):
    ValueError: target_tokens: cross_entropy needs it
    """
    rule = find_rule(loss_fn)
    loss_fn = rule.name or loss_fn
    for name in rule.needs:
        if name not in example.inputs:
            raise ValueError(f"{place}{name}: {loss_fn} needs it")
    for name in example.inputs:
        if name not in (*rule.needs, *rule.may) and rule.ranks is None:
            takes = ", ".join((*rule.needs, *rule.may))
            raise ValueError(f"{place}{name}: {loss_fn} takes only {takes}")
    tokens = _read_token_ids(example.tokens, f"{place}model_input", vocab_size)
    if tokens.ndim != 1 or not len(tokens):
        raise ValueError(f"{place}model_input: must be at least one token, got shape {tokens.shape}")
    targets, real = _read_targets(example, rule, str(loss_fn), vocab_size, place, len(tokens))
    inputs: dict[str, Array] = {}
    for name in (*rule.needs, *rule.may):
        if name in example.inputs and name in (rule.ranks or {}):
            inputs[name] = _read_rank(example.inputs[name], f"{place}{name}", (rule.ranks or {})[name])
        elif name in example.inputs and name != "target_tokens":
            inputs[name] = _read_numbers(example.inputs[name], f"{place}{name}", targets.shape)
    if loss_fn == "gspo" and not inputs["sequence_ratio_mask"].any():
        raise ValueError(f"{place}sequence_ratio_mask: marks no token of the sequence")
    wide = targets.reshape(len(tokens), -1)
    return CheckedExample(
        tokens, wide, None if real is None else real.reshape(wide.shape), targets.shape, inputs
    )


def _read_targets(
    example: Example, rule: LossRule, loss_fn: str, vocab_size: int, place: str, length: int
) -> tuple[Array, Array | None]:
    """Return the targets as a dense array, and a mask that is False in padding; no mask for dense ones."""
    name, given = f"{place}target_tokens", example.inputs["target_tokens"]
    real = None
    if isinstance(given, Csr):
        array, real = given.dense(name)
        # Sparse input omits zeros, token 0 included: a weight distinguishes that token from padding.
        weights = example.inputs.get("weights")
        if weights is not None:
            dense = weights.dense(f"{place}weights")[0] if isinstance(weights, Csr) else weights
            real = real | (dense != 0) if dense.shape == real.shape else real
    else:
        array = given
    targets = _read_token_ids(array, name, vocab_size)
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


def _read_token_ids(array: Array, name: str, vocab_size: int) -> Array:
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name}: token ids must be integers, got {array.dtype}")
    if array.size and not (array.min() >= 0 and array.max() < vocab_size):
        raise ValueError(f"{name}: {describe_bad_token(array, vocab_size)}")
    return array.astype(np.int64, copy=False)


def _read_rank(given: Input, name: str, rank: int) -> Array:
    array = given.dense(name)[0] if isinstance(given, Csr) else given
    if array.ndim != rank:
        raise ValueError(f"{name}: the loss takes rank {rank}, got shape {array.shape}")
    return array


def _read_numbers(given: Input, name: str, shape: tuple[int, ...]) -> Array:
    array = given.dense(name)[0] if isinstance(given, Csr) else given
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{name}: must be numbers, got {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{name}: shape {array.shape} differs from that of target_tokens, {shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: not all values are finite")
    return array.astype(np.float64)
