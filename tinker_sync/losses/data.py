"""The data and log-probabilities that pass between a custom loss and the server, and the inputs of losses.

The functions do no I/O, and do not change their arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from tinker_sync.errors import APIResponseValidationError, InvalidInputError
from tinker_sync.losses.evaluate import Float32Array, FloatArray
from tinker_sync.types._structured import refuse_all
from tinker_sync.types.datum import Datum
from tinker_sync.types.tensor_data import TensorData, not_tensors
from tinker_sync.types.training import REFERENCE, ForwardBackwardOutput

_TARGETS: Final = "target_tokens"


def forward_data(data: Sequence[Datum]) -> list[Datum]:
    """Return the data with only those inputs that a forward pass needs: targets and weights.

    Some servers require weights, so missing ones become zeros.

    Raises:
        InvalidInputError: a datum has no targets, or an input is no tensor.
    """
    refuse_all(
        [
            f"data[{index}]{problem}"
            for index, datum in enumerate(data)
            for problem in not_tensors(datum.loss_fn_inputs)
        ]
    )
    refuse_all(
        [
            f"data[{index}].loss_fn_inputs['target_tokens']: is missing; "
            "a custom loss takes the log-probabilities of these tokens"
            for index, datum in enumerate(data)
            if _TARGETS not in datum.loss_fn_inputs
        ]
    )
    return [_reduce(datum, _find_weights(datum)) for datum in data]


def _find_weights(datum: Datum) -> TensorData:
    given = datum.loss_fn_inputs.get("weights")
    return _zeros_like(datum.loss_fn_inputs[_TARGETS]) if given is None else given


def _zeros_like(targets: TensorData) -> TensorData:
    """Return zeros in the layout of the targets, including their sparse indices."""
    zeros = np.zeros(targets._numpy.shape, dtype=np.float32)
    return TensorData._wrap(zeros, "float32", targets.shape, targets._crow, targets._col)


def _reduce(datum: Datum, weights: TensorData) -> Datum:
    inputs = {_TARGETS: datum.loss_fn_inputs[_TARGETS], "weights": weights}
    return Datum(datum.model_input, inputs, datum.model_input_spans, datum.loss_fn_input_spans)


def backward_data(data: Sequence[Datum], gradients: Sequence[Float32Array]) -> list[Datum]:
    """Return data whose weights give the cross-entropy the wanted gradients of the log-probabilities.

    The server computes the cross-entropy, the sum of `-logprob * weight`, so the weights are `-gradients`.
    """
    return [
        _reduce(datum, TensorData.from_numpy_sparse(-gradient))
        for datum, gradient in zip(data, gradients, strict=True)
    ]


def read_logprobs(output: ForwardBackwardOutput, data: Sequence[Datum]) -> list[FloatArray]:
    """Return the log-probabilities of a forward pass: for each datum an array in the shape of its targets.

    The arrays are dense copies in float64.

    Raises:
        APIResponseValidationError: the output lacks some of them, or has too many.
    """
    records = output.loss_fn_outputs
    if len(records) != len(data):
        raise APIResponseValidationError(
            f"the forward pass returned {len(records)} outputs for {len(data)} data"
        )
    return list(_read_each(output, data))


def _read_each(output: ForwardBackwardOutput, data: Sequence[Datum]) -> Iterator[FloatArray]:
    for index, (record, datum) in enumerate(zip(output.loss_fn_outputs, data, strict=True)):
        shape = datum.loss_fn_inputs[_TARGETS]._effective_shape
        if "logprobs" not in record:
            raise APIResponseValidationError(f"the forward pass returned no logprobs for data[{index}]")
        logprobs = record["logprobs"].to_numpy().astype(np.float64)
        if logprobs.size != int(np.prod(shape)):
            raise APIResponseValidationError(
                f"the forward pass returned logprobs of shape {logprobs.shape} for data[{index}], "
                f"whose target_tokens have shape {shape}"
            )
        yield logprobs.reshape(shape)  # older servers return flat values


# ------------------------------------------------------------------------------------------- ready losses


def with_reference(
    data: Sequence[Datum], output: ForwardBackwardOutput, name: str = REFERENCE
) -> list[Datum]:
    """Return copies of the data with the log-probabilities of their targets under a reference model.

    Args:
        data: the examples.
        output: the result of the reference model's forward pass over the same data.
        name: the input to add; the ready-made losses read it under the default name.

    Raises:
        InvalidInputError: the output has entries for another number of data.
        APIResponseValidationError: the log-probabilities of a datum are missing, or of another shape.

    >>> from tinker_sync.types import ModelInput
    >>> example = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
    >>> scored = TensorData([-0.5, -1.5], "float32", [2])
    >>> output = ForwardBackwardOutput("ArrayRecord", [{"logprobs": scored}])
    >>> with_reference([example], output)[0].loss_fn_inputs["reference_logprobs"].tolist()
    [-0.5, -1.5]
    """
    if len(output.loss_fn_outputs) != len(data):
        raise InvalidInputError(
            f"with_reference: the output has {len(output.loss_fn_outputs)} entries for {len(data)} data"
        )
    return [
        datum.model_copy(
            update={"loss_fn_inputs": {**datum.loss_fn_inputs, name: TensorData.from_numpy(logprobs)}}
        )
        for datum, logprobs in zip(data, read_logprobs(output, data), strict=True)
    ]


def read_input(datum: Datum, index: int, name: str, shape: tuple[int, ...], hint: str = "") -> FloatArray:
    """Return an input as a dense array of the shape of the log-probabilities.

    The text of an error names the datum by `index`, and ends with `hint` if the input is missing.

    Raises:
        InvalidInputError: the input is missing or has another shape.
    """
    where = f"data[{index}].loss_fn_inputs[{name!r}]"
    tensor = datum.loss_fn_inputs.get(name)
    if tensor is None:
        raise InvalidInputError(f"{where}: is missing{hint and f'; {hint}'}")
    array = tensor.to_numpy().astype(np.float64)
    if array.shape != shape:
        raise InvalidInputError(f"{where}: has shape {array.shape}, the log-probabilities have {shape}")
    return array


def read_weights(datum: Datum, index: int, shape: tuple[int, ...]) -> FloatArray:
    """Return the weights of the log-probabilities: the input `weights`.

    Without that input, each target has the weight 1, and cells that sparse targets omit have the weight 0.
    """
    if "weights" in datum.loss_fn_inputs:
        return read_input(datum, index, "weights", shape)
    targets = datum.loss_fn_inputs["target_tokens"]
    if not targets.is_sparse:
        return np.ones(shape)
    ones = np.ones(targets._numpy.shape, dtype=np.float32)
    listed = TensorData._wrap(ones, "float32", targets.shape, targets._crow, targets._col)
    return listed.to_numpy().astype(np.float64)
