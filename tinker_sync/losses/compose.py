"""`WeightedSum`: a loss that sums others, such as a main loss and a penalty. Pure; threads may share one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from attrs import field, frozen

from tinker_sync.errors import InvalidInputError
from tinker_sync.losses._kinds import FloatArray, name_of, takes_numpy
from tinker_sync.losses.evaluate import call_numpy_loss
from tinker_sync.types.datum import Datum


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

    Metrics: ``NAME:sum`` is the unweighted value of a loss, ``NAME/METRIC`` are its own metrics.

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
        """Return the loss, its metrics, and the derivative by each log-probability."""
        total = 0.0
        metrics: dict[str, float] = {}
        gradients = [np.zeros(p.shape) for p in logprobs]
        for label, (weight, loss) in self.terms.items():
            value, own, slopes = call_numpy_loss(loss, list(data), [p.copy() for p in logprobs])
            total += weight * value
            metrics[f"{label}:sum"] = value
            metrics.update({f"{label}/{name}": each for name, each in own.items()})
            gradients = [one + weight * slope for one, slope in zip(gradients, slopes, strict=True)]
        return total, metrics, gradients
