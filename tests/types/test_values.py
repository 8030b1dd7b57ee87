"""Models with arrays are values: they compare and hash by content, and cannot be changed."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import attrs
import numpy as np
import pytest
from support.random_models import flat_models, hashable, random_arguments
from support.values import for_each

import tinker_sync as tinker
from tinker_sync import errors, types
from tinker_sync.clients.sampling import RetryConfig, as_retry_config
from tinker_sync.errors import InvalidInputError
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
from tinker_sync.types.training import listed_data

NAN = float("nan")
PROMPT = ModelInput.from_ints([1, 2, 3])


def datums() -> list[Any]:
    run = [types.SampledProvenanceSpan(sequence_id="s", length=3)]
    return [
        Datum(PROMPT),
        Datum(ModelInput.from_ints([1, 2])),
        Datum(PROMPT, {"weights": [1, 1, 1]}),
        Datum(PROMPT, {"advantages": [1, 1, 1]}),
        Datum(PROMPT, {"weights": [1, 1, 0]}),
        Datum(PROMPT, {"weights": np.array([1, 1, 1])}),
        Datum(PROMPT, {"weights": [1, 1, 1]}, run, run),
        Datum(PROMPT, {"weights": [1, 1, 1]}, [], run),
        Datum(PROMPT, {"weights": [NAN]}),
    ]


def inputs() -> list[Any]:
    return [
        ModelInput.empty(),
        ModelInput.from_ints([]),
        ModelInput.from_ints([1, 2]),
        ModelInput.from_ints([1, 3]),
        ModelInput.from_ints([1]).append_int(2),
        ModelInput.from_ints(np.arange(40)),
        ModelInput.from_ints([*range(39), 0]),
        ModelInput(chunks=[types.ImageChunk(data=b"a", format="png")]),
        ModelInput(chunks=[types.ImageChunk(data=b"a", format="jpeg")]),
        ModelInput(chunks=[types.ImageChunk(data=b"a", format="png", expected_tokens=1)]),
        ModelInput(chunks=[types.ImageAssetPointerChunk(location="a", format="png")]),
        ModelInput(chunks=[types.DmelChunk(dmel=b"a")]),
        *ModelInput.from_ints([1]).chunks,
    ]


def tensors() -> list[Any]:
    return [
        TensorData([1, 2, 3, 4], "int64"),
        TensorData([1, 2, 3, 4], "int64", [2, 2]),
        TensorData([1, 2, 3, 4], "float32"),
        TensorData([1, 2, 3, 5], "int64"),
        TensorData([1, 2, 3], "int64"),
        TensorData([], "int64"),
        TensorData([], "float32"),
        TensorData([], "float32", [0, 3]),
        TensorData([NAN], "float32"),
        TensorData([0.0], "float32"),
        TensorData(1, "int64"),
        TensorData([1], "int64"),
        TensorData([7], "int64", [2, 9], [0, 0, 1], [4]),
        TensorData([7], "int64", [2, 9], [0, 1, 1], [4]),
        TensorData([7], "int64", [2, 9], [0, 0, 1], [5]),
        TensorData([7], "int64", [2, 8], [0, 0, 1], [4]),
        TensorData([8], "int64", [2, 9], [0, 0, 1], [4]),
    ]


def samples() -> list[Any]:
    floats, matrix = np.array([np.nan, -0.0]), np.array([[1, 2]])
    request = types.SampleRequest(prompt=PROMPT, sampling_params=types.SamplingParams(max_tokens=4))
    return [
        types.SamplingParams(),
        types.SamplingParams(stop=[]),
        types.SamplingParams(stop=["a"]),
        types.SamplingParams(temperature=0.5),
        types.TopkLogprobs(matrix, matrix.astype(float)),
        types.TopkLogprobs(matrix, np.array([[np.nan, 2]])),
        types.TopkLogprobs(matrix.T, matrix.T.astype(float)),
        SampledSequence("stop"),
        SampledSequence("length"),
        SampledSequence("stop", "s"),
        SampledSequence("stop", "s", np.array([1, 2])),
        SampledSequence("stop", "s", np.array([1, 3])),
        SampledSequence("stop", "s", np.array([1, 2]), floats),
        SampledSequence("stop", "s", _tokens_list=[1, 2]),
        types.PromptAltTokens(TensorData([1], "int64"), TensorData([NAN], "float32")),
        types.PromptAltTokens(TensorData([1], "int64"), TensorData([0.0], "float32")),
        SampleResponse([]),
        SampleResponse([], floats),
        SampleResponse([], prompt_cache_hit_tokens=1),
        SampleResponse([SampledSequence("stop", "s", np.array([1, 2]), floats)]),
        request,
        request.model_copy(update={"num_samples": 2}),
        request.model_copy(update={"target_prompt_logprobs": TensorData([1], "int64")}),
    ]


def passes() -> list[Any]:
    good = Datum(PROMPT, {"target_tokens": [2, 3, 4]})
    work = types.ForwardBackwardInput([good], "ppo", {"clip": 0.2})
    return [
        work,
        types.ForwardBackwardInput([good, good], "ppo", {"clip": 0.2}),
        types.ForwardBackwardInput([good], "grpo", {"clip": 0.2}),
        types.ForwardBackwardInput([good], "ppo"),
        types.ForwardBackwardRequest(work, "m", 1),
        types.ForwardBackwardRequest(work, "m", 2),
        types.ForwardRequest(work, "m", 1),
        types.ForwardBackwardOutput("A", [{"x": TensorData([NAN], "float32")}], {"loss:sum": 1.0}),
        types.ForwardBackwardOutput("A", [{"x": TensorData([0.0], "float32")}], {"loss:sum": 1.0}),
    ]


every_family = pytest.mark.parametrize("make", [datums, inputs, tensors, samples, passes])
"""Each function returns models of which no two are equal."""


def hash_or_none(value: object) -> int | None:
    try:
        return hash(value)
    except TypeError:
        return None


@every_family
def test_models_compare_and_hash_by_value(make: Callable[[], list[Any]]) -> None:
    twins = make()
    for index, one in enumerate(make()):
        assert [one == twin for twin in twins] == [index == at for at in range(len(twins))]
        assert [one != twin for twin in twins] == [index != at for at in range(len(twins))]
        assert hash_or_none(one) == hash_or_none(twins[index])
        assert one not in ([1], "TensorData", None)


@every_family
def test_copies_and_pickles_are_equal(make: Callable[[], list[Any]]) -> None:
    for one in make():
        copies = [copy.copy(one), copy.deepcopy(one), one.model_copy(), one.model_copy(deep=True)]
        copies += [pickle.loads(pickle.dumps(one, p)) for p in range(2, pickle.HIGHEST_PROTOCOL + 1)]
        for twin in copies:
            assert (type(twin), twin, repr(twin)) == (type(one), one, repr(one))
            assert hash_or_none(twin) == hash_or_none(one)


@every_family
def test_models_are_immutable(make: Callable[[], list[Any]]) -> None:
    for one in make():
        for name in [*type(one).__slots__, "tokens", "length", "nbytes", "colour"]:
            with pytest.raises(AttributeError):
                setattr(one, name, None)
            with pytest.raises(AttributeError):
                delattr(one, name)
        assert type(one).__dictoffset__ == 0


# ------------------------------------ Properties of every model without arrays, on random instances
MODELS = flat_models()
OPEN = {"OptimParamsBase", "OptimizerConfigBase"}
INSTANCES = 20

every_model = for_each("cls", MODELS.values())


def instances(cls: type[Any]) -> list[Any]:
    rng = random.Random(cls.__name__)
    return [cls(**random_arguments(rng, cls)) for _ in range(INSTANCES)]


def test_models_are_found() -> None:
    assert len(MODELS) > 100
    assert {name for name, cls in MODELS.items() if cls.__open__} == OPEN


@every_model
def test_arguments_must_be_known_keywords(cls: type[Any]) -> None:
    made = random_arguments(random.Random(1), cls)
    if made:
        with pytest.raises(TypeError):
            cls(*made.values())
    if cls.__name__ not in OPEN:
        with pytest.raises(TypeError, match="no_such_field"):
            cls(**made, no_such_field=1)


@every_model
def test_missing_arguments_are_reported(cls: type[Any]) -> None:
    made = {**random_arguments(random.Random(2), cls)}
    required = [field.name for field in attrs.fields(cls) if field.init and field.default is attrs.NOTHING]
    for name in required:
        with pytest.raises(TypeError, match=name):
            cls(**{other: value for other, value in made.items() if other != name})
    if not required:
        cls()


@every_model
def test_responses_ignore_unknown_fields_and_requests_refuse_them(cls: type[Any]) -> None:
    made = {**random_arguments(random.Random(3), cls), "no_such_field": 1}
    if cls.__response__:
        assert "no_such_field" not in cls.model_validate(made).model_dump()
    elif cls.__open__:
        assert cls.model_validate(made).no_such_field == 1
    else:
        with pytest.raises(InvalidInputError, match="no_such_field"):
            cls.model_validate(made)


@every_model
def test_flat_models_copy_and_pickle(cls: type[Any]) -> None:
    for made in instances(cls):
        assert copy.deepcopy(made) == made
        assert pickle.loads(pickle.dumps(made)) == made
        assert made.model_copy() == made
        assert made.model_copy(deep=True) == made


@every_model
def test_dumps_round_trip(cls: type[Any]) -> None:
    for made in instances(cls):
        assert cls.model_validate(made.model_dump()) == made
        assert cls.model_validate(json.loads(made.model_dump_json())) == made


@every_model
def test_instances_are_immutable(cls: type[Any]) -> None:
    made = instances(cls)[0]
    assert type(made).__dictoffset__ == 0
    for field in attrs.fields(cls):
        with pytest.raises(AttributeError):
            setattr(made, field.name, None)


@every_model
def test_hashing_follows_the_values(cls: type[Any]) -> None:
    rng = random.Random(cls.__name__)
    for _ in range(INSTANCES):
        arguments = random_arguments(rng, cls)
        one, same = cls(**copy.deepcopy(arguments)), cls(**arguments)
        assert one == same
        fields = [field for field in attrs.fields(cls) if field.hash is not False]
        if all(hashable(getattr(one, field.name)) for field in fields):
            assert hash(one) == hash(same)
        else:
            assert not hashable(one)


@every_model
def test_reprs_are_one_line_and_name_the_class(cls: type[Any]) -> None:
    for made in instances(cls):
        assert repr(made).startswith(f"{cls.__name__}(")
        assert "\n" not in repr(made)


@every_model
def test_signatures_show_the_declared_types(cls: type[Any]) -> None:
    for parameter in inspect.signature(cls).parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty
        assert parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)


# ---- The classes that are dataclasses in the reference client work with the functions of `dataclasses`
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
    with pytest.raises(InvalidInputError, match=r"shape \[3, 3\]"):
        dataclasses.replace(TENSOR, shape=[3, 3])
    with pytest.raises(InvalidInputError, match="offset: "):
        dataclasses.replace(PromptProvenanceSpan(sequence_id="seq-1", length=2), offset=-1)
    with pytest.raises(TypeError, match="'weights'"):
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


# ---- Objects of other packages' classes with the names and fields of ours: converted, or refused by name
class Other:
    """Classes of another package."""

    @dataclass
    class EncodedTextChunk:
        tokens: list[int]
        type: str = "encoded_text"

    @dataclass
    class ModelInput:
        chunks: list[Any]

    @dataclass
    class TensorData:
        data: list[float]
        dtype: str
        shape: list[int] | None = None

    @dataclass
    class Datum:
        model_input: Any
        loss_fn_inputs: dict[str, Any]

    @dataclass
    class RetryConfig:
        max_connections: int = 7
        progress_timeout: float = 3.0

    @dataclass
    class AdamParams:
        learning_rate: float


class Without:
    class Datum:
        pass


PLAIN_PROMPT = Other.ModelInput([Other.EncodedTextChunk([1, 2])])
OURS = types.ModelInput.from_ints([1, 2])


def test_objects_are_converted_with_what_they_hold() -> None:
    inputs = {"weights": Other.TensorData([0, 1], "float32", [2])}
    [datum] = listed_data([Other.Datum(PLAIN_PROMPT, inputs)])  # type: ignore[list-item]
    assert datum == types.Datum(OURS, {"weights": [0.0, 1.0]})
    assert types.ModelInput(chunks=PLAIN_PROMPT.chunks) == OURS
    assert types.Datum(PLAIN_PROMPT, inputs) == datum  # type: ignore[arg-type]
    request = types.OptimStepRequest(model_id="m", optim_params=Other.AdamParams(0.5))  # type: ignore[arg-type]
    assert request.optim_params == types.AdamParams(learning_rate=0.5)
    config = as_retry_config(Other.RetryConfig())
    assert (config.max_connections, config.progress_timeout) == (7, 3.0)
    assert as_retry_config(None) == RetryConfig()


def test_errors_in_objects_name_the_place() -> None:
    wrong = Other.Datum(PLAIN_PROMPT, {"weights": Other.TensorData([0, 1], "float16")})
    with pytest.raises(errors.InvalidInputError, match=r"^data\[0\].*weights.*'float16'"):
        listed_data([wrong])  # type: ignore[list-item]


def test_a_class_with_other_fields_is_refused_with_its_package() -> None:
    with pytest.raises(TypeError, match=r"the Datum of the package \w+, which has other fields"):
        listed_data([Without.Datum()])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"data\[0\]: .*int$"):
        listed_data([3])  # type: ignore[list-item]
    with pytest.raises(errors.InvalidInputError, match=r"retry_config: .*int"):
        as_retry_config(3)


class _Foreign:
    """An object that is pickled as one of ours, with the state of another class."""

    def __init__(self, cls: type, state: dict[str, Any]) -> None:
        self._reduced = object.__new__, (cls,), state

    def __reduce__(self) -> Any:
        return self._reduced


def test_pickles_of_other_classes_load_whole_or_not_at_all() -> None:
    pydantic_like = {"__dict__": {"chunks": OURS.chunks}, "__pydantic_fields_set__": {"chunks"}}
    assert pickle.loads(pickle.dumps(_Foreign(types.ModelInput, pydantic_like))) == OURS
    fields = {"model_input": OURS, "loss_fn_inputs": {"weights": [0.0, 1.0]}, "tokens": [5]}
    loaded = pickle.loads(pickle.dumps(_Foreign(types.Datum, fields)))
    assert loaded == types.Datum(OURS, {"weights": [0.0, 1.0]})
    with pytest.raises(errors.InvalidInputError, match="Datum"):
        pickle.loads(pickle.dumps(_Foreign(types.Datum, {"loss_fn_inputs": {}})))
    with pytest.raises(KeyError):
        pickle.loads(pickle.dumps(_Foreign(types.TensorData, {"dtype": "float32"})))
