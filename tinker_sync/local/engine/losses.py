"""The losses, each a pure function of the log-probabilities `p` of one datum's target tokens.

Every loss is a plain sum over tokens. A `Term` holds it with its derivative by `p`; `loss_inputs` checks the
inputs beforehand. Arithmetic is in float64, which costs little compared to the model.

In the formulas `q` are the sampler's log-probabilities, `A` the advantages, `r = exp(p - q)`. Where a ratio
and its clipped value are equal, the derivative is that of the ratio, as in automatic differentiation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from tinker_sync.local.engine._arrays import Array


class Term(NamedTuple):
    """The result of a loss: its value, its derivative by each log-probability, and its metrics."""

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
    """Compute `-sum(clip(r, lo, hi) * p * A)`, without a derivative through the clipped ratio.

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
