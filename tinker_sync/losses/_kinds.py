"""The two kinds of custom losses, in numpy and in torch, and their types."""

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
"""A function of the data and of the log-probabilities of each datum's target tokens, as float64 arrays. It
returns the loss, metrics, and the derivatives of the loss by the log-probabilities, in the same shapes."""

TorchLossFn: TypeAlias = "Callable[[list[Datum], list[torch.Tensor]], tuple[torch.Tensor, Metrics]]"
"""A function of the data and the log-probabilities as torch tensors. It returns the loss, which torch
differentiates, and metrics."""

LossT = TypeVar("LossT", bound=Callable[..., Any])

_MARK = "takes_numpy"


def numpy_loss(loss_fn: LossT) -> LossT:
    """Mark a loss that works in numpy and returns its own gradients. Unmarked losses work in torch.

    `TrainingClient.forward_backward_custom` decides by this mark alone, not by the installed packages or the
    returned value. A class whose instances are losses may set `takes_numpy = True`.

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
    """Return True for a loss that works in numpy."""
    return bool(getattr(loss_fn, _MARK, False))


def name_of(loss_fn: Any) -> str:
    """Return the name of a loss for error messages."""
    return str(getattr(loss_fn, "__name__", None) or type(loss_fn).__name__)
