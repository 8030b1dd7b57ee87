"""Losses over pairs of a chosen and a rejected answer. Pure numpy; threads may share one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from attrs import field, frozen

from tinker_sync.errors import InvalidInputError
from tinker_sync.losses._kinds import FloatArray
from tinker_sync.losses.data import REFERENCE, read_input, read_weights
from tinker_sync.types.datum import Datum

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


def _check_half(instance: Any, attribute: Any, value: float) -> None:
    if not 0 <= value < 0.5:
        raise InvalidInputError(
            f"{type(instance).__name__}.{attribute.name}: expected 0 to below 0.5, got {value!r}"
        )


@frozen
class DPO:
    """Direct preference optimization: raises the chosen answer over the rejected one, against a reference.

    The data are pairs, see `dpo_pairs`. S(x) is the sum of `w * (p - q)` over the tokens of an answer: w is
    the weight of a token, p its log-probability under the model, q that under the reference model. The margin
    of a pair is `beta * (S(chosen) - S(rejected))`, and its loss is `-log sigmoid(margin)`. With a label
    smoothing of e it is `-(1 - e) * log sigmoid(margin) - e * log sigmoid(-margin)`. The loss is the sum over
    the pairs. Set `weights` to 0 for the tokens of the prompt.

    Metrics: ``dpo:mean`` is the loss of a pair, ``dpo_margin:mean`` its margin, ``dpo_accuracy:mean`` the
    share of pairs with a margin above 0; ``dpo_chosen:mean`` and ``dpo_rejected:mean`` are `beta * S`.

    Attributes:
        beta: the weight of a margin.
        reference: the input with the reference's log-probabilities; None takes 0 for them.
        label_smoothing: the assumed share of pairs with chosen and rejected answer swapped.

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
    label_smoothing: float = field(default=0.0, validator=_check_half)

    def __call__(
        self, data: Sequence[Datum], logprobs: Sequence[FloatArray]
    ) -> tuple[float, dict[str, float], list[FloatArray]]:
        """Return the loss, its metrics, and the derivative by each log-probability."""
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
