"""Losses over pairs of a preferred and another answer. Pure numpy; threads may share one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from attrs import field, frozen

from tinker_sync.errors import InvalidInputError
from tinker_sync.losses._kinds import FloatArray
from tinker_sync.losses.given import REFERENCE, cell_weights, values
from tinker_sync.types.datum import Datum

_HINT = "tinker_sync.losses.with_reference puts it there; reference=None does without"


def dpo_pairs(chosen: Sequence[Datum], rejected: Sequence[Datum]) -> list[Datum]:
    """The data of both in the order in which `DPO` takes them: each preferred answer, then the other one.

    Raises:
        InvalidInputError: there are not equally many.

    >>> from tinker_sync.types import ModelInput
    >>> a, b = (Datum(ModelInput.from_ints([token]), {"target_tokens": [token]}) for token in (1, 2))
    >>> dpo_pairs([a], [b]) == [a, b]
    True
    """
    if len(chosen) != len(rejected):
        raise InvalidInputError(
            f"dpo_pairs: {len(chosen)} chosen and {len(rejected)} rejected data make no pairs"
        )
    return [datum for pair in zip(chosen, rejected, strict=True) for datum in pair]


def _half(instance: Any, attribute: Any, value: float) -> None:
    if not 0 <= value < 0.5:
        raise InvalidInputError(
            f"{type(instance).__name__}.{attribute.name}: expected 0 to below 0.5, got {value!r}"
        )


@frozen
class DPO:
    """Direct preference optimization: raise the preferred answer over the other, compared with a reference.

    The data are pairs, see `dpo_pairs`. With S(x) the sum of `w * (p - q)` over the tokens of an answer,
    where q are the reference model's log-probabilities, the margin of a pair is `beta * (S(chosen) -
    S(rejected))` and its loss `-log sigmoid(margin)`; with label smoothing, `-(1 - e) * log sigmoid(margin) -
    e * log sigmoid(-margin)`. The loss is the sum over the pairs. Set `weights` to 0 for the tokens of the
    prompt.

    Metrics: ``dpo:mean`` the loss of a pair, ``dpo_margin:mean``, ``dpo_accuracy:mean`` the share of pairs
    with a margin above 0, and ``dpo_chosen:mean`` and ``dpo_rejected:mean``, which are `beta * S`.

    Attributes:
        beta: how strongly a margin counts.
        reference: the input with the reference's log-probabilities; None: they are 0.
        label_smoothing: the share of pairs that may be the wrong way round.

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
    label_smoothing: float = field(default=0.0, validator=_half)

    def __call__(
        self, data: Sequence[Datum], logprobs: Sequence[FloatArray]
    ) -> tuple[float, dict[str, float], list[FloatArray]]:
        """The loss, its metrics, and the derivative by each log-probability."""
        if len(data) % 2:
            raise InvalidInputError(
                f"DPO: {len(data)} data make no pairs; give each chosen answer followed by the rejected one"
            )
        weights = [
            cell_weights(datum, index, p.shape)
            for index, (datum, p) in enumerate(zip(data, logprobs, strict=True))
        ]
        rewards = self.beta * np.array(
            [
                float((w * (p - self._of_reference(datum, index, p))).sum())
                for index, (datum, p, w) in enumerate(zip(data, logprobs, weights, strict=True))
            ]
        )
        chosen, rejected = rewards[0::2], rewards[1::2]
        margins = chosen - rejected
        smoothing = self.label_smoothing
        losses = (1 - smoothing) * np.logaddexp(0.0, -margins) + smoothing * np.logaddexp(0.0, margins)
        # Of the loss of each pair by its margin; below, by S of the chosen and of the rejected answer.
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

    def _of_reference(self, datum: Datum, index: int, p: FloatArray) -> FloatArray:
        if self.reference is None:
            return np.zeros(p.shape)
        return values(datum, index, self.reference, p.shape, _HINT)


def _sigmoid(x: FloatArray) -> FloatArray:
    """Without overflow, whatever x."""
    return np.exp(-np.logaddexp(0.0, -x))
