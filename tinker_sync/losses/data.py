"""The data of the two passes of a custom loss, and what the first one gives. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tinker_sync.errors import APIResponseValidationError
from tinker_sync.losses._kinds import Float32Array, FloatArray
from tinker_sync.types.datum import Datum, refuse_all
from tinker_sync.types.tensor_data import TensorData
from tinker_sync.types.training import ForwardBackwardOutput

_TARGETS = "target_tokens"


def forward_data(data: Sequence[Datum]) -> list[Datum]:
    """What the server needs for the log-probabilities: targets, and weights, which some servers insist on.

    Raises:
        InvalidInputError: a datum has no targets.
    """
    refuse_all(
        [
            f"data[{index}].loss_fn_inputs['target_tokens']: is missing; "
            "a custom loss is a function of the log-probabilities of these tokens"
            for index, datum in enumerate(data)
            if _TARGETS not in datum.loss_fn_inputs
        ]
    )
    return [_reduced(datum, _weights_of(datum)) for datum in data]


def _weights_of(datum: Datum) -> TensorData:
    given = datum.loss_fn_inputs.get("weights")
    return _zeros_like(datum.loss_fn_inputs[_TARGETS]) if given is None else given


def _zeros_like(targets: TensorData) -> TensorData:
    """Zeros in the layout of the targets, with their own sparse indices where they have some."""
    zeros = np.zeros(targets._numpy.shape, dtype=np.float32)
    return TensorData._wrap(zeros, "float32", targets.shape, targets._crow, targets._col)


def _reduced(datum: Datum, weights: TensorData) -> Datum:
    inputs = {_TARGETS: datum.loss_fn_inputs[_TARGETS], "weights": weights}
    return Datum(datum.model_input, inputs, datum.model_input_spans, datum.loss_fn_input_spans)


def backward_data(data: Sequence[Datum], gradients: Sequence[Float32Array]) -> list[Datum]:
    """Data whose cross-entropy, the sum of `-logprob * weight`, has these derivatives by each logprob."""
    return [
        _reduced(datum, TensorData.from_numpy_sparse(-gradient))
        for datum, gradient in zip(data, gradients, strict=True)
    ]


def logprobs_of(output: ForwardBackwardOutput, data: Sequence[Datum]) -> list[FloatArray]:
    """The log-probabilities in the shapes of the targets, dense, as float64 arrays of nobody else's.

    Raises:
        APIResponseValidationError: the server returned something else.
    """
    records = output.loss_fn_outputs
    if len(records) != len(data):
        raise APIResponseValidationError(
            f"the forward pass returned {len(records)} outputs for {len(data)} data"
        )
    return list(_logprobs_of_each(output, data))


def _logprobs_of_each(output: ForwardBackwardOutput, data: Sequence[Datum]) -> Iterator[FloatArray]:
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
