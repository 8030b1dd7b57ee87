"""Types of custom losses. mypy reads this file; nothing runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import tinker_sync
from tinker_sync.losses import DPO, CrossEntropy, KLToReference, WeightedSum, numpy_loss

if TYPE_CHECKING:
    from typing_extensions import assert_type

Floats = npt.NDArray[np.float64]


@numpy_loss
def mine(
    data: list[tinker_sync.Datum], logprobs: list[Floats]
) -> tuple[float, dict[str, float], list[Floats]]:
    return 0.0, {}, logprobs


def in_torch(data: Any, logprobs: Any) -> tuple[Any, Mapping[str, float]]:
    return logprobs[0].sum(), {}


def losses_are_taken(
    training: tinker_sync.TrainingClient,
    service: tinker_sync.ServiceClient,
    data: list[tinker_sync.Datum],
) -> None:
    both = WeightedSum({"nll": (1.0, CrossEntropy()), "kl": (0.1, KLToReference("k2"))})
    for loss in (mine, DPO(beta=0.2), both):
        future = training.forward_backward_custom(data, loss)
        assert_type(future.result(), tinker_sync.ForwardBackwardOutput)
    training.forward_backward_custom(data, in_torch)
    handle = service.create_custom_loss(in_torch, {"logprobs": 1}).result()
    assert_type(handle, tinker_sync.LossHandle)
    assert_type(handle.loss_id, str | None)
    training.forward_backward(data, handle)
    training.forward_backward(data, "cross_entropy")


def mistakes_are_seen(training: tinker_sync.TrainingClient, data: list[tinker_sync.Datum]) -> None:
    training.forward_backward_custom(data, "cross_entropy")  # type: ignore[arg-type]
    KLToReference("k4")  # type: ignore[arg-type]
    DPO(beta="0.1")  # type: ignore[arg-type]
