"""Ready losses that are sums over tokens. Pure numpy; threads may share one.

`p` is the model's log-probability of a target token, `w` its weight (`weights`; without them 1, and 0 where
sparse targets list nothing). Each loss is a plain sum over all tokens of all data, so its size grows with
them; its metric ``NAME:mean`` is per token that has a weight.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from attrs import field, frozen

from tinker_sync.errors import InvalidInputError
from tinker_sync.losses._kinds import FloatArray
from tinker_sync.losses.given import REFERENCE, cell_weights, values
from tinker_sync.types.datum import Datum

# Beyond this a ratio is of no use to anybody, and infinity times zero would spoil a whole sum.
_MOST = 700.0
_REFERENCE_HINT = "tinker_sync.losses.with_reference puts it there"


class Cells(NamedTuple):
    """For each log-probability, weights included: its part of the loss, the derivative, and what is shown."""

    loss: FloatArray
    slope: FloatArray
    shown: FloatArray


class TokenLoss:
    """What they have in common."""

    __slots__ = ()

    takes_numpy: ClassVar[bool] = True
    name: ClassVar[str]

    def __call__(
        self, data: Sequence[Datum], logprobs: Sequence[FloatArray]
    ) -> tuple[float, dict[str, float], list[FloatArray]]:
        """The loss, its metrics, and the derivative by each log-probability."""
        loss, shown, tokens = 0.0, 0.0, 0
        gradients = []
        for index, (datum, p) in enumerate(zip(data, logprobs, strict=True)):
            weights = cell_weights(datum, index, p.shape)
            cells = self._cells(p, weights, datum, index)
            loss += float(cells.loss.sum())
            shown += float(cells.shown.sum())
            tokens += int(np.count_nonzero(weights.reshape(len(weights), -1).any(axis=1)))
            gradients.append(cells.slope)
        return loss, {f"{self.name}:mean": shown / max(tokens, 1)}, gradients

    @abstractmethod
    def _cells(self, p: FloatArray, weights: FloatArray, datum: Datum, index: int) -> Cells: ...


def _weighted(weights: FloatArray, each: FloatArray, slope: FloatArray) -> Cells:
    return Cells(weights * each, weights * slope, weights * each)


@frozen
class CrossEntropy(TokenLoss):
    """`-sum(w * p)`, as the server's loss of that name; for sums with other losses.

    >>> from tinker_sync.types import ModelInput
    >>> example = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [0, 1]})
    >>> CrossEntropy()([example], [np.array([-1.0, -2.0])])[0]
    2.0
    """

    name: ClassVar[str] = "cross_entropy"

    def _cells(self, p: FloatArray, weights: FloatArray, datum: Datum, index: int) -> Cells:  # noqa: ARG002
        return _weighted(weights, -p, np.full(p.shape, -1.0))


@frozen
class ImportanceSampling(TokenLoss):
    """`-sum(w * exp(p - q) * A)` with the sampler's `logprobs` q and the `advantages` A.

    >>> from tinker_sync.types import ModelInput
    >>> inputs = {"target_tokens": [2], "logprobs": [-1.0], "advantages": [3.0]}
    >>> ImportanceSampling()([Datum(ModelInput.from_ints([1]), inputs)], [np.array([-1.0])])[0]
    -3.0
    """

    name: ClassVar[str] = "importance_sampling"

    def _cells(self, p: FloatArray, weights: FloatArray, datum: Datum, index: int) -> Cells:
        ratio = np.exp(np.minimum(p - values(datum, index, "logprobs", p.shape), _MOST))
        each = -ratio * values(datum, index, "advantages", p.shape)
        return _weighted(weights, each, each)


@frozen
class PPO(TokenLoss):
    """`-sum(w * min(r * A, clip(r, low, high) * A))` with `r = exp(p - q)`, q and A as in
    `ImportanceSampling`.

    >>> PPO(clip_high=1.28).clip_low
    0.8
    """

    name: ClassVar[str] = "ppo"

    clip_low: float = 0.8
    clip_high: float = 1.2

    def _cells(self, p: FloatArray, weights: FloatArray, datum: Datum, index: int) -> Cells:
        advantages = values(datum, index, "advantages", p.shape)
        ratio = np.exp(np.minimum(p - values(datum, index, "logprobs", p.shape), _MOST))
        free, held = ratio * advantages, np.clip(ratio, self.clip_low, self.clip_high) * advantages
        return _weighted(weights, -np.minimum(free, held), np.where(free <= held, -free, 0.0))


def _is_one_of(*allowed: str) -> Any:
    def check(instance: Any, attribute: Any, value: Any) -> None:
        if value not in allowed:
            raise InvalidInputError(
                f"{type(instance).__name__}.{attribute.name}: expected {' or '.join(allowed)}, got {value!r}"
            )

    return check


@frozen
class KLToReference(TokenLoss):
    """How far the model is from a reference model, `q` being that one's `reference_logprobs` of the same
    tokens.

    What can be known of it depends on the tokens whose log-probabilities there are:

    - "k3", for one target a token: `sum(w * (exp(q - p) - 1 - (q - p)))`. Never negative. On tokens that the
      model itself sampled, its value is an unbiased estimate of KL(model, reference) of each position; its
      derivative is one of the derivative of KL(reference, model).
    - "k2", for one target a token: `sum(w * (p - q)**2 / 2)`. On tokens that the model itself sampled, its
      derivative is an unbiased estimate of that of KL(model, reference); its value is close to it where the
      two are close.
    - "listed", for several targets a token: `sum(w * exp(p) * (p - q))` over those listed: KL(model,
      reference) itself where all of the vocabulary is, else the part of it that the listed tokens have.

    On tokens from elsewhere the first two are a penalty for being apart on these tokens, and no estimate.

    >>> from tinker_sync.types import ModelInput
    >>> example = Datum(ModelInput.from_ints([1]), {"target_tokens": [2], "reference_logprobs": [-1.0]})
    >>> KLToReference("k2")([example], [np.array([-3.0])])
    (2.0, {'kl:mean': 2.0}, [array([-2.])])
    """

    name: ClassVar[str] = "kl"

    estimator: Literal["k3", "k2", "listed"] = field(default="k3", validator=_is_one_of("k3", "k2", "listed"))
    reference: str = REFERENCE

    def _cells(self, p: FloatArray, weights: FloatArray, datum: Datum, index: int) -> Cells:
        _check_rank(self.estimator == "listed", p, f"KLToReference({self.estimator!r})", index)
        apart = p - values(datum, index, self.reference, p.shape, _REFERENCE_HINT)
        if self.estimator == "k2":
            return _weighted(weights, apart * apart / 2, apart)
        if self.estimator == "listed":
            share = np.exp(p)
            return _weighted(weights, share * apart, share * (apart + 1))
        grown = np.expm1(np.minimum(-apart, _MOST))
        return _weighted(weights, grown + apart, -grown)


@frozen
class EntropyBonus(TokenLoss):
    """A loss that falls as the model becomes less certain. The metric ``entropy:mean`` estimates the entropy
    of a position; the loss itself is made for its derivative:

    - "sampled", for one target a token: `sum(w * p**2 / 2)`. On tokens that the model itself sampled at
      temperature 1, its derivative is an unbiased estimate of minus that of the entropy of each position
      given what stands before it, and the metric, the mean of `-p`, one of the entropy. (The derivative of
      `-p` itself is zero on average, so that would be no bonus.) On tokens from elsewhere it is neither.
    - "listed", for several targets a token: `sum(w * exp(p) * p)` over those listed: minus the entropy itself
      where all of the vocabulary is, else the part of it that the listed tokens have.

    Give it a weight in a `WeightedSum`.

    >>> from tinker_sync.types import ModelInput
    >>> example = Datum(ModelInput.from_ints([1]), {"target_tokens": [2]})
    >>> EntropyBonus()([example], [np.array([-3.0])])
    (4.5, {'entropy:mean': 3.0}, [array([-3.])])
    """

    name: ClassVar[str] = "entropy"

    estimator: Literal["sampled", "listed"] = field(
        default="sampled", validator=_is_one_of("sampled", "listed")
    )

    def _cells(self, p: FloatArray, weights: FloatArray, datum: Datum, index: int) -> Cells:  # noqa: ARG002
        _check_rank(self.estimator == "listed", p, f"EntropyBonus({self.estimator!r})", index)
        if self.estimator == "sampled":
            return Cells(weights * p * p / 2, weights * p, -weights * p)
        share = weights * np.exp(p)
        return Cells(share * p, share * (p + 1), -share * p)


def _share(instance: Any, attribute: Any, value: float) -> None:
    if not 0 <= value < 1:
        raise InvalidInputError(
            f"{type(instance).__name__}.{attribute.name}: expected a share from 0 to below 1, got {value!r}"
        )


@frozen
class LabelSmoothing(TokenLoss):
    """Cross-entropy with a share of each token's weight spread evenly over all tokens listed for its
    position.

    It is for several targets a token: the first of each position is the right one, the others are those it
    may be confused with. With K tokens listed for a position, the first one counts `1 - epsilon + epsilon /
    K` and each other `epsilon / K`, times the weight of the first; with all of the vocabulary listed this is
    label smoothing as it is usually meant. A token is listed where `weights` are not 0, or, without them,
    where sparse targets list it.

    >>> from tinker_sync.types import ModelInput
    >>> example = Datum(ModelInput.from_ints([1]), {"target_tokens": np.array([[2, 3]])})
    >>> LabelSmoothing(0.2)([example], [np.array([[-1.0, -3.0]])])[2]
    [array([[-0.9, -0.1]])]
    """

    name: ClassVar[str] = "label_smoothing"

    epsilon: float = field(default=0.1, validator=_share)

    def _cells(self, p: FloatArray, weights: FloatArray, datum: Datum, index: int) -> Cells:  # noqa: ARG002
        _check_rank(True, p, "LabelSmoothing", index)
        listed = weights != 0
        shares = listed * self.epsilon / np.maximum(listed.sum(axis=1, keepdims=True), 1)
        shares[:, :1] += listed[:, :1] * (1 - self.epsilon)
        return _weighted(weights[:, :1] * shares, -p, np.full(p.shape, -1.0))


def _check_rank(several: bool, p: FloatArray, name: str, index: int) -> None:
    if several != (p.ndim == 2):
        wanted = "several targets a token, of shape [T, K]" if several else "one target a token, of shape [T]"
        raise InvalidInputError(
            f"data[{index}].loss_fn_inputs['target_tokens']: has shape {p.shape}; {name} is for {wanted}"
        )
