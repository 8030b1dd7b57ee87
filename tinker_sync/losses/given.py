"""What ready losses read from a datum, checked, and how a reference gets into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from tinker_sync.errors import InvalidInputError
from tinker_sync.losses._kinds import FloatArray
from tinker_sync.losses.data import logprobs_of
from tinker_sync.types.datum import Datum
from tinker_sync.types.tensor_data import TensorData
from tinker_sync.types.training import ForwardBackwardOutput

REFERENCE: Final = "reference_logprobs"
"""Under this name ready losses look for the log-probabilities of a reference model."""


def with_reference(
    data: Sequence[Datum], output: ForwardBackwardOutput, name: str = REFERENCE
) -> list[Datum]:
    """Data that bring along the log-probabilities another model gave to their target tokens.

    Args:
        data: the examples.
        output: what a forward pass of the reference model over the same data returned.
        name: under which to put them; they are not sent to the server.

    Raises:
        InvalidInputError: the output is not of these data.

    >>> from tinker_sync.types import ModelInput
    >>> example = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
    >>> scored = TensorData([-0.5, -1.5], "float32", [2])
    >>> output = ForwardBackwardOutput("ArrayRecord", [{"logprobs": scored}])
    >>> with_reference([example], output)[0].loss_fn_inputs["reference_logprobs"].tolist()
    [-0.5, -1.5]
    """
    if len(output.loss_fn_outputs) != len(data):
        raise InvalidInputError(
            f"with_reference: the output is of {len(output.loss_fn_outputs)} data, not of these {len(data)}"
        )
    return [
        datum.model_copy(
            update={"loss_fn_inputs": {**datum.loss_fn_inputs, name: TensorData.from_numpy(logprobs)}}
        )
        for datum, logprobs in zip(data, logprobs_of(output, data), strict=True)
    ]


def values(datum: Datum, index: int, name: str, shape: tuple[int, ...], hint: str = "") -> FloatArray:
    """An input as a dense array of the shape of the log-probabilities.

    Raises:
        InvalidInputError: it is missing or of another shape.
    """
    where = f"data[{index}].loss_fn_inputs[{name!r}]"
    tensor = datum.loss_fn_inputs.get(name)
    if tensor is None:
        raise InvalidInputError(f"{where}: is missing{hint and f'; {hint}'}")
    array = tensor.to_numpy().astype(np.float64)
    if array.shape != shape:
        raise InvalidInputError(f"{where}: has shape {array.shape}, the log-probabilities have {shape}")
    return array


def cell_weights(datum: Datum, index: int, shape: tuple[int, ...]) -> FloatArray:
    """The weight of each log-probability: `weights`; without them 1, and 0 for what sparse targets omit."""
    if "weights" in datum.loss_fn_inputs:
        return values(datum, index, "weights", shape)
    targets = datum.loss_fn_inputs["target_tokens"]
    if not targets.is_sparse:
        return np.ones(shape)
    ones = np.ones(targets._numpy.shape, dtype=np.float32)
    listed = TensorData._wrap(ones, "float32", targets.shape, targets._crow, targets._col)
    return listed.to_numpy().astype(np.float64)
