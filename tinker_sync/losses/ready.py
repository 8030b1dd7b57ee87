"""Ready-made losses: sums over tokens, preferences between answers, and sums of losses.

They use only numpy, and threads may share an instance. `p` is the model's log-probability of a target token.
`w` is the weight of the token: the input `weights`, or without it 1, and 0 for cells that sparse targets
omit. A `TokenLoss` is a plain sum over all tokens of all data, so it grows with their number. Its metric
``NAME:mean`` is a weighted sum divided by the number of positions with a weight other than 0.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from attrs import field, frozen

from tinker_sync.errors import InvalidInputError
from tinker_sync.losses.data import read_input, read_weights
from tinker_sync.losses.evaluate import FloatArray, call_numpy_loss, name_of, takes_numpy
from tinker_sync.types._checks import in_range
from tinker_sync.types.datum import Datum
from tinker_sync.types.training import REFERENCE

# The exponent of the largest ratio. Beyond it infinity times zero would turn a whole sum into NaN.
_MOST = 700.0
_REFERENCE_HINT = "tinker_sync.losses.with_reference adds it"


class Cells(NamedTuple):
    """The loss of one datum as three arrays in the shape of its log-probabilities, times the weights.

    For each log-probability, `loss` has its term of the loss, `slope` the derivative of the loss with respect
    to it, and `shown` its term of the metric.
    """

    loss: FloatArray
    slope: FloatArray
    shown: FloatArray


class TokenLoss:
    """The base class of losses that are a sum over tokens. A subclass sets `name` and defines `_cells`."""

    __slots__ = ()

    takes_numpy: ClassVar[bool] = True
    name: ClassVar[str]

    def __call__(
        self, data: Sequence[Datum], logprobs: Sequence[FloatArray]
    ) -> tuple[float, dict[str, float], list[FloatArray]]:
        """Return the loss, its metrics, and the derivative by each log-probability.

        Raises:
            InvalidInputError: an input that the loss needs is missing, or has another shape.
        """
        loss, shown, tokens = 0.0, 0.0, 0
        gradients = []
        for index, (datum, p) in enumerate(zip(data, logprobs, strict=True)):
            weights = read_weights(datum, index, p.shape)
            cells = self._cells(p, weights, datum, index)
            loss += float(cells.loss.sum())
            shown += float(cells.shown.sum())
            tokens += int(np.count_nonzero(weights.reshape(len(weights), -1).any(axis=1)))
            gradients.append(cells.slope)
        return loss, {f"{self.name}:mean": shown / max(tokens, 1)}, gradients

    @abstractmethod
    def _cells(self, p: FloatArray, weights: FloatArray, datum: Datum, index: int) -> Cells: ...


def _weigh(weights: FloatArray, each: FloatArray, slope: FloatArray) -> Cells:
    return Cells(weights * each, weights * slope, weights * each)


@frozen
class CrossEntropy(TokenLoss):
    """The loss `-sum(w * p)`, the server's `cross_entropy`, to be summed with other losses.

    p is the model's log-probability of a token, w its weight.

    >>> from tinker_sync.types import ModelInput
    >>> example = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [0, 1]})
    >>> CrossEntropy()([example], [np.array([-1.0, -2.0])])[0]
    2.0
    """

    name: ClassVar[str] = "cross_entropy"

    def _cells(self, p: FloatArray, weights: FloatArray, datum: Datum, index: int) -> Cells:  # noqa: ARG002
        return _weigh(weights, -p, np.full(p.shape, -1.0))


@frozen
class ImportanceSampling(TokenLoss):
    """The loss `-sum(w * exp(p - q) * A)`; with weights of 1, the server's `importance_sampling`.

    p is the model's log-probability of a token, w its weight, q the sampler's `logprobs`, A the `advantages`.

    >>> from tinker_sync.types import ModelInput
    >>> inputs = {"target_tokens": [2], "logprobs": [-1.0], "advantages": [3.0]}
    >>> ImportanceSampling()([Datum(ModelInput.from_ints([1]), inputs)], [np.array([-1.0])])[0]
    -3.0
    """

    name: ClassVar[str] = "importance_sampling"

    def _cells(self, p: FloatArray, weights: FloatArray, datum: Datum, index: int) -> Cells:
        ratio = np.exp(np.minimum(p - read_input(datum, index, "logprobs", p.shape), _MOST))
        each = -ratio * read_input(datum, index, "advantages", p.shape)
        return _weigh(weights, each, each)


@frozen
class PPO(TokenLoss):
    """The loss `-sum(w * min(r * A, clip(r, clip_low, clip_high) * A))` with `r = exp(p - q)`.

    With weights of 1 it is the server's `ppo`. p, w, q and A are as in `ImportanceSampling`.

    >>> PPO(clip_high=1.28).clip_low
    0.8
    """

    name: ClassVar[str] = "ppo"

    clip_low: float = 0.8
    clip_high: float = 1.2

    def _cells(self, p: FloatArray, weights: FloatArray, datum: Datum, index: int) -> Cells:
        advantages = read_input(datum, index, "advantages", p.shape)
        ratio = np.exp(np.minimum(p - read_input(datum, index, "logprobs", p.shape), _MOST))
        free, held = ratio * advantages, np.clip(ratio, self.clip_low, self.clip_high) * advantages
        return _weigh(weights, -np.minimum(free, held), np.where(free <= held, -free, 0.0))


def _is_one_of(*allowed: str) -> Any:
    def check(instance: Any, attribute: Any, value: Any) -> None:
        if value not in allowed:
            raise InvalidInputError(
                f"{type(instance).__name__}.{attribute.name}: expected {' or '.join(allowed)}, got {value!r}"
            )

    return check


@frozen
class KLToReference(TokenLoss):
    """A loss that keeps the model close to a reference model: an estimate of their divergence.

    p is the model's log-probability of a token, q that of the reference model, w the weight of the token.
    `reference` is the name of the input with q. The values of `estimator` differ in the tokens they need:

    - "k3", for one target a token: `sum(w * (exp(q - p) - 1 - (q - p)))`. It is never negative. On tokens
      that the model itself sampled, its value is an unbiased estimate of KL(model, reference) of each
      position, and its derivative is an unbiased estimate of the derivative of KL(reference, model).
    - "k2", for one target a token: `sum(w * (p - q)**2 / 2)`. On tokens that the model itself sampled, its
      derivative is an unbiased estimate of that of KL(model, reference). Its value is close to the divergence
      when the two models are close.
    - "listed", for several targets a token: `sum(w * exp(p) * (p - q))` over the listed tokens. It equals
      KL(model, reference) when they are the whole vocabulary; else it is the part of these tokens.

    On tokens from another source, "k3" and "k2" penalize the difference on these tokens, without an
    estimate of a divergence.

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
        apart = p - read_input(datum, index, self.reference, p.shape, _REFERENCE_HINT)
        if self.estimator == "k2":
            return _weigh(weights, apart * apart / 2, apart)
        if self.estimator == "listed":
            share = np.exp(p)
            return _weigh(weights, share * apart, share * (apart + 1))
        grown = np.expm1(np.minimum(-apart, _MOST))
        return _weigh(weights, grown + apart, -grown)


@frozen
class Distance(TokenLoss):
    """A regularizer that keeps log-probabilities close to those of a reference model, token by token.

    p is the model's log-probability of a token, q that of the reference model, w the weight of the token. The
    values of `norm` differ in how they treat tokens that are far apart:

    - "l1": `sum(w * |p - q|)`. Each token pulls with the same force, so a few may stay far away. Its
      derivative at p = q counts as 0.
    - "l2": `sum(w * (p - q)**2)`, twice the "k2" of `KLToReference`. Far tokens pull most.
    - "elastic": `share` times "l1", and `1 - share` times "l2".

    Attributes:
        norm: "l1", "l2" or "elastic".
        share: the share of "l1" in "elastic".
        reference: the input with q; None sets q to 0, which is probability 1, and makes "l1" the
            cross-entropy.

    >>> from tinker_sync.types import ModelInput
    >>> example = Datum(ModelInput.from_ints([1]), {"target_tokens": [2], "reference_logprobs": [-1.0]})
    >>> Distance("elastic", share=0.25)([example], [np.array([-3.0])])
    (3.5, {'distance:mean': 3.5}, [array([-3.25])])
    """

    name: ClassVar[str] = "distance"

    norm: Literal["l1", "l2", "elastic"] = field(default="l2", validator=_is_one_of("l1", "l2", "elastic"))
    share: float = field(default=0.5, kw_only=True, validator=in_range(ge=0, le=1))
    reference: str | None = field(default=REFERENCE, kw_only=True)

    def _cells(self, p: FloatArray, weights: FloatArray, datum: Datum, index: int) -> Cells:
        q = (
            np.zeros(p.shape)
            if self.reference is None
            else read_input(datum, index, self.reference, p.shape, _REFERENCE_HINT)
        )
        return _weigh(weights, *_measure(self.norm, self.share, p - q))


def _measure(norm: str, share: float, apart: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return a norm of differences, number by number, and its derivatives."""
    of_l1 = {"l1": 1.0, "l2": 0.0, "elastic": share}[norm]
    each = of_l1 * np.abs(apart) + (1 - of_l1) * apart * apart
    return each, of_l1 * np.sign(apart) + (1 - of_l1) * 2 * apart


@frozen
class Consistency:
    """A regularizer that makes a model say the same with the same likelihood in two contexts.

    The data are pairs, one after the other; `dpo_pairs` arranges them. The two data of a pair have the same
    answer after different prompts, such as a question and its paraphrase, or a prompt with and without a
    distraction. The tokens of the answer are those whose weight is not 0; each one is compared with its
    counterpart. With p and q for their log-probabilities and w for the weight in the first datum, the loss is
    `sum(w * (p - q)**2)` for "l2"; "l1" and "elastic" are as in `Distance`. The metric ``consistency:mean``
    is the loss divided by the number of compared tokens.

    The loss penalizes a finite difference of the log-probabilities by the input. Their gradient by the input
    is known only to the server.

    Attributes:
        norm: "l1", "l2" or "elastic".
        share: the share of "l1" in "elastic".
        teacher: the first datum of a pair is the teacher, which gets no gradient.

    >>> from tinker_sync.types import ModelInput
    >>> short = Datum(ModelInput.from_ints([1]), {"target_tokens": [9]})
    >>> long = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 9], "weights": [0, 1]})
    >>> Consistency()([short, long], [np.array([-1.0]), np.array([-5.0, -1.5])])
    (0.25, {'consistency:mean': 0.25}, [array([1.]), array([ 0., -1.])])
    """

    takes_numpy: ClassVar[bool] = True

    norm: Literal["l1", "l2", "elastic"] = field(default="l2", validator=_is_one_of("l1", "l2", "elastic"))
    share: float = field(default=0.5, kw_only=True, validator=in_range(ge=0, le=1))
    teacher: bool = field(default=False, kw_only=True)

    def __call__(
        self, data: Sequence[Datum], logprobs: Sequence[FloatArray]
    ) -> tuple[float, dict[str, float], list[FloatArray]]:
        """Return the loss, its metric, and the derivative by each log-probability.

        Raises:
            InvalidInputError: the number of data is odd, or the two answers of a pair differ in length.
        """
        if len(data) % 2:
            raise InvalidInputError(
                f"Consistency: expected pairs, got {len(data)} data; put the two data of a pair side by side"
            )
        weights = [
            read_weights(datum, index, p.shape)
            for index, (datum, p) in enumerate(zip(data, logprobs, strict=True))
        ]
        gradients = [np.zeros(p.shape) for p in logprobs]
        loss, count = 0.0, 0
        for first in range(0, len(data), 2):
            one, other = weights[first] != 0, weights[first + 1] != 0
            if one.sum() != other.sum():
                raise InvalidInputError(
                    f"Consistency: data[{first}] and data[{first + 1}] have answers of {one.sum()} and "
                    f"{other.sum()} tokens; weights of 0 leave out the tokens of the prompts"
                )
            weight = weights[first][one]
            each, slope = _measure(self.norm, self.share, logprobs[first][one] - logprobs[first + 1][other])
            loss += float((weight * each).sum())
            count += len(weight)
            if not self.teacher:
                gradients[first][one] = weight * slope
            gradients[first + 1][other] = -weight * slope
        return loss, {"consistency:mean": loss / max(count, 1)}, gradients


@frozen
class EntropyBonus(TokenLoss):
    """A loss that makes the model less certain: gradient descent on it raises the entropy.

    The metric ``entropy:mean`` estimates the entropy of a position. The derivative of the loss estimates the
    derivative of minus the entropy. p is the model's log-probability of a token, w its weight. The values of
    `estimator` differ in the tokens that they need:

    - "sampled", for one target a token: `sum(w * p**2 / 2)`. On tokens that the model itself sampled at
      temperature 1, its derivative is an unbiased estimate of minus the derivative of the entropy of each
      position given the tokens before it. The metric, the mean of `-p`, is an unbiased estimate of the
      entropy. (The derivative of `-p` itself is zero on average.) On tokens from another source, loss and
      metric estimate nothing.
    - "listed", for several targets a token: `sum(w * exp(p) * p)` over the listed tokens. It is minus the
      entropy when they are the whole vocabulary; else it is the part of these tokens.

    Weight it in a `WeightedSum`.

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


@frozen
class LabelSmoothing(TokenLoss):
    """Cross-entropy that spreads the share `epsilon` of a weight evenly over the tokens of a position.

    It needs several targets a token: at each position first the right token, then its alternatives. With K
    tokens listed at a position, the first has the factor `1 - epsilon + epsilon / K` and each other `epsilon
    / K`, times the weight of the first. With the whole vocabulary listed, this is the usual label smoothing.
    A target is listed if its weight in `weights` is not 0. Without `weights`, each target is listed.

    >>> from tinker_sync.types import ModelInput
    >>> example = Datum(ModelInput.from_ints([1]), {"target_tokens": np.array([[2, 3]])})
    >>> LabelSmoothing(0.2)([example], [np.array([[-1.0, -3.0]])])[2]
    [array([[-0.9, -0.1]])]
    """

    name: ClassVar[str] = "label_smoothing"

    epsilon: float = field(default=0.1, validator=in_range(ge=0, lt=1))

    def _cells(self, p: FloatArray, weights: FloatArray, datum: Datum, index: int) -> Cells:  # noqa: ARG002
        _check_rank(True, p, "LabelSmoothing", index)
        listed = weights != 0
        shares = listed * self.epsilon / np.maximum(listed.sum(axis=1, keepdims=True), 1)
        shares[:, :1] += listed[:, :1] * (1 - self.epsilon)
        return _weigh(weights[:, :1] * shares, -p, np.full(p.shape, -1.0))


def _check_rank(several: bool, p: FloatArray, name: str, index: int) -> None:
    if several != (p.ndim == 2):
        wanted = "several targets a token, of shape [T, K]" if several else "one target a token, of shape [T]"
        raise InvalidInputError(
            f"data[{index}].loss_fn_inputs['target_tokens']: has shape {p.shape}; {name} is for {wanted}"
        )


_HINT = "tinker_sync.losses.with_reference adds it; reference=None needs none"


def dpo_pairs(chosen: Sequence[Datum], rejected: Sequence[Datum]) -> list[Datum]:
    """Arrange data for `DPO`: each chosen answer, followed by its rejected one.

    Raises:
        InvalidInputError: the numbers of answers differ.

    >>> from tinker_sync.types import ModelInput
    >>> a, b = (Datum(ModelInput.from_ints([token]), {"target_tokens": [token]}) for token in (1, 2))
    >>> dpo_pairs([a], [b]) == [a, b]
    True
    """
    if len(chosen) != len(rejected):
        raise InvalidInputError(
            f"dpo_pairs: expected as many rejected as chosen data, got {len(chosen)} and {len(rejected)}"
        )
    return [datum for pair in zip(chosen, rejected, strict=True) for datum in pair]


@frozen
class DPO:
    """Direct preference optimization: favours chosen answers over rejected ones, compared with a reference.

    The data are pairs, see `dpo_pairs`. S(x) is the sum of `w * (p - q)` over the tokens of an answer: w is
    the weight of a token, p its log-probability under the model, q that under the reference model. The margin
    of a pair is `beta * (S(chosen) - S(rejected))`, and its loss is `-log sigmoid(margin)`. With a label
    smoothing of e it is `-(1 - e) * log sigmoid(margin) - e * log sigmoid(-margin)`. The loss is the sum over
    the pairs. Set `weights` to 0 for the tokens of the prompt.

    Metrics are means over the pairs: ``dpo:mean`` of the loss, ``dpo_margin:mean`` of the margin,
    ``dpo_chosen:mean`` and ``dpo_rejected:mean`` of `beta * S`. ``dpo_accuracy:mean`` is the share of pairs
    with a margin above 0.

    Attributes:
        beta: the factor of each margin.
        reference: the input with the reference's log-probabilities; None takes 0 for them.
        label_smoothing: the assumed share of pairs with chosen and rejected answer swapped, below 0.5.

    >>> from tinker_sync.types import ModelInput
    >>> inputs = {"target_tokens": [2], "reference_logprobs": [-1.0]}
    >>> data = [Datum(ModelInput.from_ints([1]), inputs)] * 2
    >>> loss, metrics, gradients = DPO(beta=0.5)(data, [np.array([-0.5]), np.array([-1.5])])
    >>> round(loss, 4), metrics["dpo_margin:mean"], metrics["dpo_accuracy:mean"]
    (0.4741, 0.5, 1.0)
    """

    takes_numpy: ClassVar[bool] = True

    beta: float = 0.1
    reference: str | None = REFERENCE
    label_smoothing: float = field(default=0.0, validator=in_range(ge=0, lt=0.5))

    def __call__(
        self, data: Sequence[Datum], logprobs: Sequence[FloatArray]
    ) -> tuple[float, dict[str, float], list[FloatArray]]:
        """Return the loss, its metrics, and the derivative by each log-probability.

        Raises:
            InvalidInputError: the number of data is odd, or an input is missing or has another shape.
        """
        if len(data) % 2:
            raise InvalidInputError(
                f"DPO: expected pairs, got {len(data)} data; put each rejected answer after its chosen one"
            )
        weights = [
            read_weights(datum, index, p.shape)
            for index, (datum, p) in enumerate(zip(data, logprobs, strict=True))
        ]
        rewards = self.beta * np.array(
            [
                float((w * (p - self._read_reference(datum, index, p))).sum())
                for index, (datum, p, w) in enumerate(zip(data, logprobs, weights, strict=True))
            ]
        )
        chosen, rejected = rewards[0::2], rewards[1::2]
        margins = chosen - rejected
        smoothing = self.label_smoothing
        losses = (1 - smoothing) * np.logaddexp(0.0, -margins) + smoothing * np.logaddexp(0.0, margins)
        # The derivatives of each pair's loss by its margin; `by_sum` holds those by S of each answer.
        slopes = smoothing * _sigmoid(margins) - (1 - smoothing) * _sigmoid(-margins)
        by_sum = self.beta * np.stack([slopes, -slopes], axis=1).reshape(-1)
        pairs = max(len(margins), 1)
        metrics = {
            "dpo:mean": float(losses.sum()) / pairs,
            "dpo_margin:mean": float(margins.sum()) / pairs,
            "dpo_accuracy:mean": float((margins > 0).sum()) / pairs,
            "dpo_chosen:mean": float(chosen.sum()) / pairs,
            "dpo_rejected:mean": float(rejected.sum()) / pairs,
        }
        return float(losses.sum()), metrics, [slope * w for slope, w in zip(by_sum, weights, strict=True)]

    def _read_reference(self, datum: Datum, index: int, p: FloatArray) -> FloatArray:
        if self.reference is None:
            return np.zeros(p.shape)
        return read_input(datum, index, self.reference, p.shape, _HINT)


def _sigmoid(x: FloatArray) -> FloatArray:
    """Compute the sigmoid without overflow for any x."""
    return np.exp(-np.logaddexp(0.0, -x))


def _check_terms(given: Mapping[str, Any]) -> dict[str, tuple[float, Any]]:
    terms = dict(given)
    if not terms:
        raise InvalidInputError("WeightedSum: give at least one loss")
    for label, term in terms.items():
        if not isinstance(term, tuple) or len(term) != 2:
            raise InvalidInputError(f"WeightedSum[{label!r}]: expected (weight, loss)")
        weight, loss = term
        if not label or ":" in label:
            raise InvalidInputError(
                f"WeightedSum[{label!r}]: expected a name without a colon, which metrics can begin with"
            )
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise InvalidInputError(f"WeightedSum[{label!r}]: expected a finite weight, got {weight!r}")
        if not takes_numpy(loss):
            raise InvalidInputError(
                f"WeightedSum[{label!r}]: {name_of(loss)} does not take numpy; mark it with numpy_loss"
            )
    return terms


@frozen
class WeightedSum:
    """The sum of numpy losses, each with a weight and a name.

    Metrics: ``NAME:sum`` is the unweighted value of a loss, ``NAME/METRIC`` are its own metrics, and
    ``NAME:gradient_norm`` is the length of its weighted gradient by all log-probabilities, which shows the
    term that decides.

    Attributes:
        terms: for each name its ``(weight, loss)``.

    Raises:
        InvalidInputError: there is no loss, a name is empty or has a colon, a weight is not finite, or a loss
            does not work in numpy.

    >>> from tinker_sync.losses import CrossEntropy, EntropyBonus
    >>> from tinker_sync.types import ModelInput
    >>> both = WeightedSum({"nll": (1.0, CrossEntropy()), "bonus": (0.1, EntropyBonus())})
    >>> example = Datum(ModelInput.from_ints([1]), {"target_tokens": [2]})
    >>> loss, metrics, gradients = both([example], [np.array([-2.0])])
    >>> loss, metrics["nll:sum"], metrics["bonus:sum"], gradients
    (2.2, 2.0, 2.0, [array([-1.2])])
    """

    takes_numpy: ClassVar[bool] = True

    terms: Mapping[str, tuple[float, Any]] = field(converter=_check_terms)

    def __call__(
        self, data: Sequence[Datum], logprobs: Sequence[FloatArray]
    ) -> tuple[float, dict[str, float], list[FloatArray]]:
        """Return the loss, its metrics, and the derivative by each log-probability.

        Raises:
            InvalidInputError: a loss refuses the data, or returns an invalid result.
        """
        total = 0.0
        metrics: dict[str, float] = {}
        gradients = [np.zeros(p.shape) for p in logprobs]
        for label, (weight, loss) in self.terms.items():
            value, own, slopes = call_numpy_loss(loss, list(data), [p.copy() for p in logprobs])
            total += weight * value
            metrics[f"{label}:sum"] = value
            metrics.update({f"{label}/{name}": each for name, each in own.items()})
            slopes = [weight * slope for slope in slopes]
            metrics[f"{label}:gradient_norm"] = math.sqrt(sum(float((each * each).sum()) for each in slopes))
            gradients = [one + slope for one, slope in zip(gradients, slopes, strict=True)]
        return total, metrics, gradients
