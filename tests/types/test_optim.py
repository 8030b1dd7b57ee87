"""Optimizer families accept unknown fields, and steps check their settings."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from tinker_sync import types
from tinker_sync.errors import InvalidInputError
from tinker_sync.types import AdamParams, DimuonParams, OptimizerConfigBase, OptimParamsBase, OptimStepRequest


# ------------------------------------------------------------------------------------------ open families
def test_an_open_family_keeps_all_fields() -> None:
    config = OptimizerConfigBase(type="muon", version=2, nested={"a": None}, gone=None)
    assert (config.type, config.version, config.nested) == ("muon", 2, {"a": None})
    assert config.model_dump() == {"type": "muon", "version": 2, "nested": {"a": None}, "gone": None}
    assert config.model_dump(exclude_none=True) == {"type": "muon", "version": 2, "nested": {"a": None}}
    assert repr(config) == "OptimizerConfigBase(type='muon', version=2, nested={'a': None}, gone=None)"


def test_open_families_compare_by_all_fields_and_hash_by_type() -> None:
    one = OptimizerConfigBase(type="muon", version=2)
    assert one == OptimizerConfigBase(type="muon", version=2)
    assert one != OptimizerConfigBase(type="muon", version=3)
    assert one != OptimizerConfigBase(type="muon")
    assert one != OptimParamsBase(type="muon", version=2)
    assert hash(one) == hash(OptimizerConfigBase(type="muon", version=3))
    assert OptimizerConfigBase(type="adamw") != types.AdamOptimizerConfig()


def test_copies_of_open_families_are_complete() -> None:
    params = OptimParamsBase(type="muon", learning_rate=0.02, schedule=[1, 2])
    assert params.model_copy(update={"learning_rate": 0.5}).model_dump() == {
        "type": "muon",
        "learning_rate": 0.5,
        "schedule": [1, 2],
    }
    assert params.model_copy(deep=True).schedule is not params.schedule
    assert pickle.loads(pickle.dumps(params)) == params


def test_absent_fields_raise_attribute_error() -> None:
    config = OptimizerConfigBase(type="muon", _hidden=1)
    with pytest.raises(AttributeError, match="'OptimizerConfigBase' object has no attribute 'version'"):
        config.version  # noqa: B018  # the access is the test
    with pytest.raises(AttributeError):
        config._hidden  # noqa: B018
    with pytest.raises(AttributeError):
        types.AdamOptimizerConfig().version  # noqa: B018
    with pytest.raises(AttributeError):
        config.version = 3
    assert config.model_dump()["_hidden"] == 1


def test_closed_families_refuse_unknown_fields() -> None:
    with pytest.raises(TypeError, match="version"):
        types.AdamOptimizerConfig(version=1)
    with pytest.raises(TypeError, match="lr"):
        DimuonParams(learning_rate=1, lr=2)
    assert isinstance(types.DimuonOptimizerConfig(), OptimizerConfigBase)
    assert isinstance(DimuonParams(learning_rate=1), OptimParamsBase)


@pytest.mark.parametrize(
    ("mapping", "config"),
    [
        ({}, types.AdamOptimizerConfig()),
        ({"type": "adamw"}, types.AdamOptimizerConfig()),
        ({"type": "adamw", "added": 1}, OptimizerConfigBase(type="adamw", added=1)),
        ({"type": "dimuon", "version": 9}, OptimizerConfigBase(type="dimuon", version=9)),
        ({"type": "muon"}, OptimizerConfigBase(type="muon")),
    ],
)
def test_responses_may_have_any_family(mapping: dict[str, Any], config: Any) -> None:
    info = types.GetInfoResponse.model_validate(
        {"model_data": {}, "model_id": "m", "optimizer_config": mapping}
    )
    assert info.optimizer_config == config


# ------------------------------------------------------------------------------------------------ steps
@pytest.mark.parametrize("name", ["optim_params", "adam_params", "optimizer_params"])
def test_the_settings_of_a_step_have_three_names(name: str) -> None:
    request = OptimStepRequest(**{name: AdamParams(learning_rate=1)}, model_id="m", seq_id=1)
    assert request.optim_params == AdamParams(learning_rate=1)
    assert request == OptimStepRequest.model_validate(request.model_dump())
    assert list(request.model_dump()) == ["model_id", "seq_id", "type", "adam_params"]
    other = OptimStepRequest(**{name: DimuonParams(learning_rate=1)}, model_id="m")
    assert list(other.model_dump(exclude_none=True)) == ["model_id", "type", "optimizer_params"]


def test_the_settings_of_a_step_must_be_given_once() -> None:
    with pytest.raises(TypeError, match=r"exactly one of .*, 0 were given"):
        OptimStepRequest(model_id="m")
    with pytest.raises(TypeError, match=r"exactly one of .*, 2 were given"):
        OptimStepRequest(model_id="m", adam_params=AdamParams(), optim_params=AdamParams())
    with pytest.raises(InvalidInputError, match="exactly one of"):
        OptimStepRequest.model_validate({"model_id": "m"})


@pytest.mark.parametrize(
    ("mapping", "params"),
    [
        ({}, AdamParams()),
        ({"learning_rate": 1}, AdamParams(learning_rate=1)),
        ({"type": "muon", "learning_rate": 1}, OptimParamsBase(type="muon", learning_rate=1)),
        ({"type": "adamw"}, OptimParamsBase(type="adamw")),
    ],
)
def test_the_type_of_a_mapping_decides_its_class(mapping: dict[str, Any], params: Any) -> None:
    assert OptimStepRequest(adam_params=mapping, model_id="m").optim_params == params


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"learning_rate": -1e-9}, "learning_rate: expected 0 or more, got -1e-09"),
        ({"learning_rate": math.nan}, "learning_rate: expected 0 or more, got nan"),
        ({"learning_rate": math.inf}, "learning_rate: expected 0 or more, got inf"),
        ({"learning_rate": 1, "beta1": 1}, "beta1: expected 0 or more and less than 1, got 1.0"),
        ({"learning_rate": 1, "beta1": -0.1}, "beta1: expected 0 or more and less than 1, got -0.1"),
        (
            {"learning_rate": 1, "grad_clip_norm": math.inf},
            "grad_clip_norm: expected a finite number, got inf",
        ),
    ],
)
def test_settings_of_dimuon_have_ranges(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        DimuonParams(**arguments)
    assert str(caught.value) == f"DimuonParams.{text}"
