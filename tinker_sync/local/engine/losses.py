"""The losses, each a pure function of the log-probabilities `p` of one datum's target tokens.

Every loss is a plain sum over tokens. A `Term` holds it with its gradient with respect to `p`. Arithmetic is
in float64, which costs little compared to the model.

In the formulas `q` are the sampler's log-probabilities, `A` the advantages, `r = exp(p - q)`. Where a ratio
and its clipped value are equal, the derivative is that of the ratio, as in automatic differentiation.

The inputs of losses are converted and checked beforehand, with a ValueError that names the input. A trainer
checks all data of a request before it computes, so a bad datum changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import attrs
import numpy as np

from tinker_sync.local.engine.decoder import describe_bad_token
from tinker_sync.local.engine.safetensors import Array

if TYPE_CHECKING:
    from typing import TypeAlias


class Term(NamedTuple):
    """The result of a loss: its value, its gradient for the log-probabilities, and its metrics."""

    loss: float
    slope: Array
    metrics: Mapping[str, float] = {}


class LossRule(NamedTuple):
    """A loss: its function, and the inputs and settings that the function takes.

    Attributes:
        compute: the function of the log-probabilities, the inputs and the config.
        needs, may: the names of the required and of the optional inputs.
        config: the defaults of its settings; None for a value that the user must give.
        name: the name of an uploaded loss.
        ranks: the number of dimensions of each input of an uploaded loss, also of `logprobs`, which are `p`.
            Any shapes of these ranks fit, and data may have further inputs. None for a built-in loss.
    """

    compute: Callable[[Array, Mapping[str, Array], Mapping[str, float]], Term]
    needs: tuple[str, ...]
    may: tuple[str, ...] = ()
    config: Mapping[str, float | None] = {}
    name: str = ""
    ranks: Mapping[str, int] | None = None


def _ratio(p: Array, inputs: Mapping[str, Array]) -> Array:
    # exp(700) is close to the largest float64. Beyond it, infinity times zero would turn the sum into NaN.
    ratio: Array = np.exp(np.minimum(p - inputs["logprobs"], 700.0))
    return ratio


def cross_entropy(p: Array, inputs: Mapping[str, Array], config: Mapping[str, float]) -> Term:  # noqa: ARG001
    """Compute `-sum(p * w)`, where `w` are the weights, or 1 without them.

    >>> cross_entropy(np.array([-1.0, -2.0]), {"weights": np.array([1.0, 0.5])}, {}).loss
    2.0
    """
    weights = inputs.get("weights")
    slope = np.full(p.shape, -1.0) if weights is None else -weights
    return Term(float((p * slope).sum()), slope)


def importance_sampling(p: Array, inputs: Mapping[str, Array], config: Mapping[str, float]) -> Term:  # noqa: ARG001
    """Compute `-sum(r * A)`, where `r = exp(p - q)`.

    `q` are the sampler's log-probabilities, `inputs["logprobs"]`, and `A` the advantages.

    >>> one = np.array([-1.0])
    >>> importance_sampling(one, {"logprobs": one, "advantages": np.array([2.0])}, {}).loss
    -2.0
    """
    slope = -_ratio(p, inputs) * inputs["advantages"]
    return Term(float(slope.sum()), slope)


def _clipped(ratio: Array, advantages: Array, config: Mapping[str, float]) -> Term:
    free = ratio * advantages
    held = np.clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"]) * advantages
    return Term(-float(np.minimum(free, held).sum()), np.where(free <= held, -free, 0.0))


def ppo(p: Array, inputs: Mapping[str, Array], config: Mapping[str, float]) -> Term:
    """Compute `-sum(min(r * A, clip(r, lo, hi) * A))`, with `r` and `A` as in `importance_sampling`.

    `lo` and `hi` are the thresholds in `config`.

    >>> inputs = {"logprobs": np.array([-2.0]), "advantages": np.array([1.0])}
    >>> ppo(np.array([-1.0]), inputs, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
    Term(loss=-1.2, slope=array([0.]), metrics={})
    """
    return _clipped(_ratio(p, inputs), inputs["advantages"], config)


def cispo(p: Array, inputs: Mapping[str, Array], config: Mapping[str, float]) -> Term:
    """Compute `-sum(clip(r, lo, hi) * p * A)`, with no gradient through the clipped ratio.

    The symbols are those of `ppo`.

    >>> inputs = {"logprobs": np.array([-1.0]), "advantages": np.array([3.0])}
    >>> cispo(np.array([-1.0]), inputs, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0})
    Term(loss=3.0, slope=array([-3.]), metrics={})
    """
    held = np.clip(_ratio(p, inputs), config["clip_low_threshold"], config["clip_high_threshold"])
    slope = -held * inputs["advantages"]
    return Term(float((slope * p).sum()), slope)


def dro(p: Array, inputs: Mapping[str, Array], config: Mapping[str, float]) -> Term:
    """Compute `-sum(p * A - beta / 2 * (p - q)^2)`, with `q` and `A` as in `importance_sampling`.

    >>> inputs = {"logprobs": np.array([-3.0]), "advantages": np.array([1.0])}
    >>> dro(np.array([-1.0]), inputs, {"beta": 0.5})
    Term(loss=2.0, slope=array([0.]), metrics={})
    """
    apart = p - inputs["logprobs"]
    loss = float((config["beta"] / 2 * apart * apart - p * inputs["advantages"]).sum())
    return Term(loss, config["beta"] * apart - inputs["advantages"])


def gspo(p: Array, inputs: Mapping[str, Array], config: Mapping[str, float]) -> Term:
    """Compute `ppo` with one ratio for the sequence: `exp` of the mean of `p - q` over marked tokens.

    `q` are the sampler's log-probabilities. `inputs["sequence_ratio_mask"]` is not 0 for marked tokens.

    >>> inputs = {name: np.array([-1.0, -1.0]) for name in ("logprobs", "sequence_ratio_mask")}
    >>> config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    >>> gspo(np.array([-1.0, -1.0]), {**inputs, "advantages": np.array([1.0, 2.0])}, config).slope.tolist()
    [-1.0, -2.0]
    """
    masked = inputs["sequence_ratio_mask"] != 0
    mean = float((p - inputs["logprobs"])[masked].mean())
    return _clipped(np.full(p.shape, np.exp(min(mean, 700.0))), inputs["advantages"], config)


def stable_reinforce(p: Array, inputs: Mapping[str, Array], config: Mapping[str, float]) -> Term:  # noqa: ARG001
    """Compute `cispo` with the thresholds 0 and 4. `inputs["logprobs"]` are those that the server recorded.

    The formula is ours: that of the hosted service is not public.

    >>> inputs = {"logprobs": np.array([-9.0]), "advantages": np.array([1.0])}
    >>> stable_reinforce(np.array([-1.0]), inputs, {}).slope.tolist()
    [-4.0]
    """
    return cispo(p, inputs, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0})


_SAMPLED = ("target_tokens", "logprobs", "advantages")

LOSSES: Mapping[str, LossRule] = {
    "cross_entropy": LossRule(cross_entropy, ("target_tokens",), ("weights",)),
    "importance_sampling": LossRule(importance_sampling, _SAMPLED),
    "ppo": LossRule(ppo, _SAMPLED, config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": LossRule(cispo, _SAMPLED, config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": LossRule(dro, _SAMPLED, config={"beta": 0.05}),
    "gspo": LossRule(
        gspo,
        (*_SAMPLED, "sequence_ratio_mask"),
        config={"clip_low_threshold": None, "clip_high_threshold": None},
    ),
    "stable_reinforce": LossRule(stable_reinforce, _SAMPLED),
}


# ---------------------------------------------------------------------------------------------------- inputs


class Listed(NamedTuple):
    """A sparse matrix: a dense array with 0 in unlisted cells, and an array that is true in listed ones."""

    array: Array
    listed: Array


Input: TypeAlias = "Array | Listed"


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
    if isinstance(given, Listed):
        array, real = given
        # Sparse input omits zeros, token 0 included: a weight distinguishes that token from padding.
        weights = example.inputs.get("weights")
        if weights is not None:
            dense = weights.array if isinstance(weights, Listed) else weights
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
    array = given.array if isinstance(given, Listed) else given
    if array.ndim != rank:
        raise ValueError(f"{name}: the loss takes rank {rank}, got shape {array.shape}")
    return array


def _read_numbers(given: Input, name: str, shape: tuple[int, ...]) -> Array:
    array = given.array if isinstance(given, Listed) else given
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{name}: must be numbers, got {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{name}: shape {array.shape} differs from that of target_tokens, {shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: not all values are finite")
    return array.astype(np.float64)
