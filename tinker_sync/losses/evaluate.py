"""The two kinds of custom losses, in numpy and in torch, and their evaluation, with checks of the result.

The evaluation runs on a worker and uses no client. An error about a result names the loss and the problem,
and often the place and the remedy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from attrs import frozen

from tinker_sync.errors import InvalidInputError, MissingExtraError
from tinker_sync.losses.handle import LossHandle, run_on_each
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
    """Return True for a loss that is marked as working in numpy."""
    return bool(getattr(loss_fn, "takes_numpy", False))


def name_of(loss_fn: Any) -> str:
    """Return the name of a loss for error messages."""
    return str(getattr(loss_fn, "__name__", None) or type(loss_fn).__name__)


@frozen(eq=False)
class Evaluated:
    """The result of a loss: its value, its metrics, and the gradient for each datum's log-probabilities."""

    loss: float
    metrics: dict[str, Any]
    gradients: list[Float32Array]


Evaluate: TypeAlias = "Callable[[list[Datum], list[FloatArray]], Evaluated]"


def make_evaluator(loss_fn: Any) -> Evaluate:
    """Return a function that evaluates a loss and checks the result.

    The loss is a function in numpy or in torch, or a `LossHandle`, which this process computes with torch.

    Raises:
        MissingExtraError: the loss works in torch, which is not installed.
        TypeError: the loss is not callable.
    """
    if not callable(loss_fn) and not isinstance(loss_fn, LossHandle):
        wanted = f"loss_fn: expected a function or a LossHandle, got {type(loss_fn).__name__}"
        named = isinstance(loss_fn, str)
        raise TypeError(
            f"{wanted}; forward_backward and forward take a loss by its name" if named else wanted
        )
    if takes_numpy(loss_fn):
        return partial(_evaluate_numpy, loss_fn)
    try:
        import torch  # noqa: F401  # fails here, before a request is sent
    except ImportError:
        raise MissingExtraError(
            "torch",
            feature=f"the loss {name_of(loss_fn)}, which is written in torch,",
            instead="write it in numpy, without torch, and mark it with tinker_sync.losses.numpy_loss",
        ) from None
    if isinstance(loss_fn, LossHandle):
        return partial(_evaluate_torch, partial(run_on_each, loss_fn), loss_fn.name)
    return partial(_evaluate_torch, loss_fn, name_of(loss_fn))


# ---------------------------------------------------------------------------------------------- numpy


def _evaluate_numpy(loss_fn: Any, data: list[Datum], logprobs: list[FloatArray]) -> Evaluated:
    loss, metrics, gradients = call_numpy_loss(loss_fn, data, logprobs)
    name = name_of(loss_fn)
    narrow = [_narrow(f"{name}: gradients[{index}]", each) for index, each in enumerate(gradients)]
    return Evaluated(loss, metrics, narrow)


def call_numpy_loss(
    loss_fn: Any, data: list[Datum], logprobs: list[FloatArray]
) -> tuple[float, dict[str, Any], list[npt.NDArray[Any]]]:
    """Call a numpy loss and check its result.

    Raises:
        InvalidInputError: the result is not a finite loss, a dict of metrics, and for each datum an array of
            gradients in the shape of its log-probabilities.
    """
    name = name_of(loss_fn)
    shapes = [each.shape for each in logprobs]
    returned = loss_fn(data, logprobs)
    if not isinstance(returned, (tuple, list)) or len(returned) != 3:
        raise InvalidInputError(
            f"{name} returned {_kind_of(returned)}; a numpy loss returns (loss, metrics, gradients)"
        )
    loss, metrics, gradients = returned
    return _read_loss(name, loss), _read_metrics(name, metrics), _check_gradients(name, gradients, shapes)


def _read_loss(name: str, loss: Any) -> float:
    if isinstance(loss, (str, bytes)) or not hasattr(loss, "__float__") or np.size(loss) != 1:
        raise InvalidInputError(
            f"{name} returned {_kind_of(loss)} as its loss; return one number, such as loss.sum()"
        )
    return _check_finite_loss(name, float(np.asarray(loss).reshape(()).item()))


def _check_finite_loss(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise InvalidInputError(
            f"{name} returned a loss of {value}; look for a logarithm of 0, a division by 0 or an "
            "exponential of a large number in it. Nothing was trained"
        )
    return value


def _check_gradients(name: str, gradients: Any, shapes: Sequence[tuple[int, ...]]) -> list[npt.NDArray[Any]]:
    if isinstance(gradients, (Mapping, str)) or not hasattr(gradients, "__len__"):
        raise InvalidInputError(
            f"{name} returned {_kind_of(gradients)} as gradients; return a list with an array for each datum"
        )
    if len(gradients) != len(shapes):
        raise InvalidInputError(
            f"{name} returned {len(gradients)} gradients for {len(shapes)} data; "
            "return one for each, zeros where the loss does not depend on it"
        )
    return [
        _check_gradient(name, index, each, shape)
        for index, (each, shape) in enumerate(zip(gradients, shapes, strict=True))
    ]


def _check_gradient(name: str, index: int, given: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    where = f"{name}: gradients[{index}]"
    try:
        array = np.asarray(given)
    except ValueError:  # rows of different lengths
        raise InvalidInputError(f"{where}: expected an array of numbers, got {_kind_of(given)}") from None
    if array.dtype.kind not in "fiu":
        raise InvalidInputError(
            f"{where}: expected an array of real numbers, got {_kind_of(given)} of {array.dtype}"
        )
    if array.shape != shape:
        raise InvalidInputError(
            f"{where}: has shape {array.shape}, logprobs[{index}] has {shape}; "
            "return the derivative of the loss by each log-probability"
        )
    return array


def _narrow(where: str, array: npt.NDArray[Any]) -> Float32Array:
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    bad = ~np.isfinite(narrow)
    if bad.any():
        at = tuple(int(each) for each in np.argwhere(bad)[0])
        place = "".join(f"[{each}]" for each in at)
        raise InvalidInputError(
            f"{where}{place}: {array[at]} is not a finite float32, one of {int(bad.sum())} such derivatives; "
            "look for a division by 0 or an exponential of a large number in the loss. Nothing was trained"
        )
    return narrow


# ---------------------------------------------------------------------------------------------- torch


def _evaluate_torch(loss_fn: Any, name: str, data: list[Datum], logprobs: list[FloatArray]) -> Evaluated:
    import torch

    leaves = [torch.tensor(each, dtype=torch.float32).requires_grad_(True) for each in logprobs]
    returned = loss_fn(data, leaves)
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        raise InvalidInputError(
            f"{name} returned {_kind_of(returned)}; a torch loss returns (loss, metrics). "
            "Mark a numpy loss, which returns gradients too, with tinker_sync.losses.numpy_loss"
        )
    loss, metrics = returned
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise InvalidInputError(
            f"{name} returned {_kind_of(loss)} as its loss; return a tensor of one number, such as loss.sum()"
        )
    value = _check_finite_loss(name, float(loss.detach()))
    if not loss.requires_grad:
        raise InvalidInputError(
            f"{name}: the loss does not depend on the log-probabilities, so there is no gradient; "
            "compute it from them, without detach(), item() or numpy() on the way"
        )
    loss.backward()
    gradients = [_read_gradient(name, index, leaf) for index, leaf in enumerate(leaves)]
    return Evaluated(value, _read_metrics(name, metrics), gradients)


def _read_gradient(name: str, index: int, leaf: Any) -> Float32Array:
    if leaf.grad is None:
        raise InvalidInputError(
            f"{name}: the loss does not depend on logprobs[{index}], so there is no gradient for "
            f"data[{index}]; leave the datum out, or add 0.0 * logprobs.sum() for it if that is meant"
        )
    return _narrow(f"{name}: the derivative by logprobs[{index}]", leaf.grad.to_dense().numpy())


# ---------------------------------------------------------------------------------------------- metrics


def _read_metrics(name: str, metrics: Any) -> dict[str, Any]:
    if not isinstance(metrics, Mapping):
        raise InvalidInputError(
            f"{name} returned {_kind_of(metrics)} as metrics; return a dict, which may be empty"
        )
    return {str(key): _read_metric(f"{name}: metrics[{key!r}]", value) for key, value in metrics.items()}


def _read_metric(where: str, value: Any) -> Any:
    """Convert a tensor or an array of one number to that number. Refuse tensors and arrays of another size.

    Other values stay as they are.
    """
    if not hasattr(value, "item"):
        return value
    if np.prod(tuple(value.shape)) != 1:
        raise InvalidInputError(f"{where}: has shape {tuple(value.shape)}; reduce it to one number")
    return value.detach().item() if hasattr(value, "detach") else value.item()


def _kind_of(value: Any) -> str:
    """Describe a value by its type and size, without its contents."""
    shape = getattr(value, "shape", None)
    if shape is not None and len(shape):
        return f"a {type(value).__name__} of shape {tuple(shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}" if value is not None else "None"
