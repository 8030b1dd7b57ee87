"""What a custom loss is, which of the two kinds, and the values it works on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from tinker_sync.types.datum import Datum

if TYPE_CHECKING:
    from typing import TypeAlias

    import torch

FloatArray: TypeAlias = "npt.NDArray[np.float64]"
Float32Array: TypeAlias = "npt.NDArray[np.float32]"
Metrics: TypeAlias = "Mapping[str, Any]"

NumpyLossFn: TypeAlias = Callable[
    [list[Datum], list[FloatArray]], tuple[Any, Metrics, Sequence[npt.ArrayLike]]
]
"""Takes the data and, for each, the log-probabilities of its target tokens as a float64 array of their shape;
returns the loss, metrics, and the derivative of the loss by each log-probability."""

TorchLossFn: TypeAlias = "Callable[[list[Datum], list[torch.Tensor]], tuple[torch.Tensor, Metrics]]"
"""Takes the same with torch tensors, and returns the loss, from which torch computes the derivatives, and
metrics."""

LossT = TypeVar("LossT", bound=Callable[..., Any])

_MARK = "takes_numpy"


def numpy_loss(loss_fn: LossT) -> LossT:
    """Mark a loss as one that works in numpy and returns its own gradients; unmarked ones work in torch.

    What `TrainingClient.forward_backward_custom` does with a loss depends on this mark alone, never on what
    is installed or what the loss returns. A class whose instances are losses may say `takes_numpy = True`.

    >>> import numpy as np
    >>> @numpy_loss
    ... def squared(data, logprobs):
    ...     loss = sum(float((p * p).sum()) for p in logprobs)
    ...     return loss, {"squared:sum": loss}, [2 * p for p in logprobs]
    >>> squared([], [np.array([-1.0, -2.0])])[0]
    5.0
    """
    cast("Any", loss_fn).takes_numpy = True
    return loss_fn


def takes_numpy(loss_fn: Any) -> bool:
    """Whether a loss is of the kind that works in numpy."""
    return bool(getattr(loss_fn, _MARK, False))


def name_of(loss_fn: Any) -> str:
    """What errors call a loss."""
    return str(getattr(loss_fn, "__name__", None) or type(loss_fn).__name__)
