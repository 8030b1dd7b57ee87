"""The classes that are dataclasses in the reference client work with the functions of `dataclasses`."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from support.each import for_each

import tinker_sync as tinker
from tinker_sync import InvalidInputError
from tinker_sync.types import (
    CustomLossInput,
    Datum,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
    ModelInput,
    PromptAltTokens,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
    TensorData,
    TopkLogprobs,
)

TENSOR = TensorData([1, 2, 3, 4], "int64", [2, 2])
SPARSE = TensorData([7.0], "float32", [2, 9], [0, 0, 1], [4])
DATUM = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [0.0, 1.0]})
INPUT = ForwardBackwardInput([DATUM], "ppo", {"clip": 0.2})
SEQUENCE = SampledSequence("stop", "seq-1", np.array([5, 6]), np.array([-1.0, -2.0]))
GRAPH: Any = None
EXAMPLES: list[Any] = [
    TENSOR,
    SPARSE,
    DATUM,
    INPUT,
    ForwardBackwardRequest(INPUT, "model-1", 3),
    ForwardRequest(INPUT, "model-1"),
    ForwardBackwardOutput("ArrayRecord", [{"logprobs": SPARSE}], {"loss:sum": 1.5}),
    SEQUENCE,
    SampleResponse([SEQUENCE], np.array([np.nan, -0.5], dtype=np.float32)),
    TopkLogprobs(np.array([[5, 6]]), np.array([[-0.1, -2.5]])),
    PromptAltTokens(TENSOR, TENSOR),
    PromptProvenanceSpan(sequence_id="seq-1", length=2),
    SampledProvenanceSpan(sequence_id="seq-1", offset=1, length=2),
    tinker.LossHandle("nll", (CustomLossInput(name="logprobs", rank=1),), "session-1", GRAPH, "loss-1"),
]


@for_each("value", EXAMPLES)
def test_fields_are_the_parameters_of_the_constructor(value: Any) -> None:
    assert dataclasses.is_dataclass(value)
    assert dataclasses.is_dataclass(type(value))
    names = [field.name for field in dataclasses.fields(value)]
    assert names == [field.name for field in dataclasses.fields(type(value))]
    assert type(value)(**{name: getattr(value, name) for name in names}) == value


def test_replace_converts_and_checks_as_the_constructor() -> None:
    changed = dataclasses.replace(DATUM, loss_fn_inputs={"weights": [1, 1]})
    assert changed.loss_fn_inputs == {"weights": TensorData([1.0, 1.0], "float32", [2])}
    assert changed.model_input is DATUM.model_input
    assert dataclasses.replace(TENSOR, shape=[4, 1]).tolist() == [[1], [2], [3], [4]]
    assert dataclasses.replace(SEQUENCE, stop_reason="length").tokens == [5, 6]
    with pytest.raises(InvalidInputError, match=r"do not fill the shape \[3, 3\]"):
        dataclasses.replace(TENSOR, shape=[3, 3])
    with pytest.raises(InvalidInputError, match="offset: expected 0 or more"):
        dataclasses.replace(PromptProvenanceSpan(sequence_id="seq-1", length=2), offset=-1)
    with pytest.raises(TypeError, match="Datum has no parameter 'weights'"):
        dataclasses.replace(DATUM, weights=[1])


def test_asdict_enters_the_classes() -> None:
    tree = dataclasses.asdict(INPUT)
    inputs = tree["data"][0]["loss_fn_inputs"]
    assert inputs["weights"] == {
        "data": [0.0, 1.0],
        "dtype": "float32",
        "shape": [2],
        "sparse_crow_indices": None,
        "sparse_col_indices": None,
    }
    assert tree["data"][0]["model_input"] == DATUM.model_input
    assert (tree["loss_fn"], tree["loss_fn_config"]) == ("ppo", {"clip": 0.2})
    assert TensorData(**dataclasses.asdict(SPARSE)) == SPARSE


def test_dataclasses_are_loaded_when_they_are_asked_for() -> None:
    code = (
        "import sys\n"
        "from tinker_sync.types import PromptProvenanceSpan as Span\n"
        "span = Span(sequence_id='seq-1', length=2)\n"
        "print('dataclasses' in sys.modules)\n"
        "print(span.__dataclass_fields__['length'].name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False", "length"]
