"""Objects of other packages' classes with the names and fields of ours: converted, or refused by name.

`tests/interop/test_foreign_oracle.py` has the same with objects of the reference client.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest

from tinker_sync import errors, types
from tinker_sync.clients.sampling import RetryConfig, as_retry_config
from tinker_sync.types.training import listed_data


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


PROMPT = Other.ModelInput([Other.EncodedTextChunk([1, 2])])
OURS = types.ModelInput.from_ints([1, 2])


def test_objects_are_converted_with_what_they_hold() -> None:
    inputs = {"weights": Other.TensorData([0, 1], "float32", [2])}
    [datum] = listed_data([Other.Datum(PROMPT, inputs)])  # type: ignore[list-item]
    assert datum == types.Datum(OURS, {"weights": [0.0, 1.0]})
    assert types.ModelInput(chunks=PROMPT.chunks) == OURS
    assert types.Datum(PROMPT, inputs) == datum  # type: ignore[arg-type]
    request = types.OptimStepRequest(model_id="m", optim_params=Other.AdamParams(0.5))  # type: ignore[arg-type]
    assert request.optim_params == types.AdamParams(learning_rate=0.5)
    config = as_retry_config(Other.RetryConfig())
    assert (config.max_connections, config.progress_timeout) == (7, 3.0)
    assert as_retry_config(None) == RetryConfig()


def test_errors_in_objects_name_the_place() -> None:
    wrong = Other.Datum(PROMPT, {"weights": Other.TensorData([0, 1], "float16")})
    with pytest.raises(errors.InvalidInputError, match=r"^data\[0\].*weights.*'float16'"):
        listed_data([wrong])  # type: ignore[list-item]


def test_a_class_with_other_fields_is_refused_with_its_package() -> None:
    with pytest.raises(TypeError, match=r"the Datum of the package \w+, which has other fields"):
        listed_data([Without.Datum()])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"data\[0\]: expected a Datum, got int$"):
        listed_data([3])  # type: ignore[list-item]
    with pytest.raises(errors.InvalidInputError, match="retry_config: expected a RetryConfig, got int"):
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
