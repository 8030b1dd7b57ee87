"""Forward and backward passes check their data and settings and convert outputs."""

from __future__ import annotations

import copy
import json
import math
import pickle
from decimal import Decimal
from typing import Any, cast

import numpy as np
import pytest
from support.values import refusal

from tinker_sync import types
from tinker_sync.errors import InvalidInputError
from tinker_sync.types import (
    AdamParams,
    Datum,
    DimuonParams,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ModelInput,
    OptimizerConfigBase,
    OptimParamsBase,
    OptimStepRequest,
    OptimStepResponse,
    TensorData,
)


def datum(*tokens: int, **inputs: Any) -> Datum:
    return Datum(ModelInput.from_ints(tokens), inputs)


GOOD = datum(1, 2, target_tokens=[2, 3], weights=[0, 1])


def test_data_must_be_an_iterable_of_datums() -> None:
    for data in ((GOOD,), iter([GOOD]), {1: GOOD}.values()):
        assert ForwardBackwardInput(data, "ppo").data == [GOOD]
    given = [GOOD]
    kept = ForwardBackwardInput(given, "ppo")
    given.append(GOOD)
    assert kept.data == [GOOD]
    with pytest.raises(TypeError, match=r"^data\[1\]: .*Datum"):
        ForwardBackwardInput([GOOD, {}], "ppo")
    for wrong in (GOOD, None, 5, "data", {"data": GOOD}):
        with pytest.raises(TypeError, match=r"^data"):
            ForwardBackwardInput(wrong, "ppo")


def test_settings_must_be_numbers_or_text() -> None:
    given = {"a": 1, "b": np.float32(0.5), "c": True, "d": "0.5", "e": Decimal("1.5"), "f": np.int64(7)}
    config = ForwardBackwardInput([GOOD], "ppo", given).loss_fn_config
    assert config == {"a": 1.0, "b": 0.5, "c": 1.0, "d": "0.5", "e": 1.5, "f": 7.0}
    assert {type(value) for value in config.values()} == {float, str}
    given["a"] = 2
    assert config["a"] == 1.0
    assert ForwardBackwardInput([GOOD], "ppo", {}).loss_fn_config == {}
    for wrong, kind in ((None, "NoneType"), ([1], "list"), (1j, "complex"), (np.ones(2), "ndarray")):
        message = refusal(ForwardBackwardInput, [GOOD], "ppo", {"clip": wrong})
        assert message.startswith("loss_fn_config['clip']: expected a number")
        assert message.endswith(f"({kind})")
    with pytest.raises(TypeError, match="loss_fn_config: expected a mapping"):
        ForwardBackwardInput([GOOD], "ppo", [("clip", 0.2)])


def test_empty_data_are_reported() -> None:
    assert refusal(ForwardBackwardInput([], "ppo").validate) == "data: is empty; give at least one Datum"


@pytest.mark.parametrize("value", [[0, 1], np.array([0, 1])], ids=lambda value: type(value).__name__)
def test_an_input_put_in_later_without_a_tensor_is_named(value: Any) -> None:
    late = datum(1, 2, target_tokens=[2, 3])
    late.loss_fn_inputs["weights"] = value
    problem = (
        f".loss_fn_inputs['weights']: expected TensorData, got {type(value).__name__}; "
        "make a new Datum with it, which converts it"
    )
    assert late.problems() == [f"datum{problem}"]
    work = ForwardBackwardInput([GOOD, late], "cross_entropy")
    assert refusal(work.validate) == f"data[1]{problem}"
    late.loss_fn_inputs["weights"] = TensorData.from_numpy(np.array([0.0, 1.0]))
    work.validate()


def test_all_problems_are_reported_at_once() -> None:
    weights = np.ones(18)
    weights[17] = np.nan
    work = ForwardBackwardInput(
        [
            GOOD,
            datum(1, 2, target_tokens=[2]),
            GOOD,
            datum(*range(18), weights=weights, advantages=[np.inf]),
            datum(),
        ],
        "a loss of the server's own",
    )
    with pytest.raises(InvalidInputError) as caught:
        work.validate()
    assert list(caught.value.problems) == [
        "data[1].loss_fn_inputs['target_tokens']: has length 1, model_input has 2",
        "data[3].loss_fn_inputs['weights'][17]: expected a finite number, got nan",
        "data[3].loss_fn_inputs['advantages'][0]: expected a finite number, got inf",
        "data[4].model_input: is empty",
    ]
    assert isinstance(caught.value, ValueError)
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


NAN = float("nan")
ODD_VALUES = [
    ({"tokens": -1}, ".model_input.chunks[0].tokens[1]: expected 0 or more, got -1"),
    (
        {"target_tokens": -2},
        (
            ".loss_fn_inputs['target_tokens'][1]: expected 0 or more, got -2; "
            "weights of 0 leave tokens out of the loss"
        ),
    ),
    ({"weights": NAN}, ".loss_fn_inputs['weights'][1]: expected a finite number, got nan"),
    ({"logprobs": -np.inf}, ".loss_fn_inputs['logprobs'][1]: expected a finite number, got -inf"),
    ({"advantages": NAN}, ".loss_fn_inputs['advantages'][1]: expected a finite number, got nan"),
]


def sampled(length: int, odd: dict[str, float], container: Any = np.asarray) -> Datum:
    arrays: dict[str, Any] = {
        "tokens": np.full(length, 5, dtype=np.int32),
        "target_tokens": np.full(length, 6),
        **{name: np.full(length, 0.5, dtype=np.float32) for name in ("weights", "logprobs", "advantages")},
    }
    for name, value in odd.items():
        arrays[name][1] = value
    tokens = ModelInput.from_ints(container(arrays.pop("tokens")))
    return Datum(tokens, arrays)


@pytest.mark.parametrize("container", [np.asarray, list, tuple])
@pytest.mark.parametrize(("length", "at"), [(3, 0), (3, 40), (1200, 69)])
@pytest.mark.parametrize(("odd", "problem"), ODD_VALUES)
def test_one_odd_value_among_many_data_is_named(
    odd: dict[str, float], problem: str, length: int, at: int, container: Any
) -> None:
    good, bad = sampled(length, {}, container), sampled(length, odd, container)
    data = [bad if index == at else good for index in range(70)]
    with pytest.raises(InvalidInputError) as caught:
        ForwardBackwardInput(data, "ppo").validate()
    assert list(caught.value.problems) == [f"data[{at}]{problem}"]


def test_a_missing_input_among_many_data_is_named() -> None:
    data = [sampled(3, {}) for _ in range(20)]
    del data[11].loss_fn_inputs["logprobs"]
    with pytest.raises(InvalidInputError) as caught:
        ForwardBackwardInput(data, "ppo").validate()
    assert list(caught.value.problems) == ["data[11].loss_fn_inputs['logprobs']: is missing; ppo needs it"]


def test_masked_targets_pass_beside_usual_data() -> None:
    masked = datum(1, 2, target_tokens=[-100, 3], weights=[0, 1])
    untrained = datum(1, 2)
    assert ForwardBackwardInput([GOOD, masked, GOOD], "cross_entropy").validate() is None
    assert ForwardBackwardInput([masked, untrained], "a loss of the server's own").validate() is None
    counted = datum(1, 2, target_tokens=[3, -100], weights=[0, 1])
    with pytest.raises(InvalidInputError) as caught:
        ForwardBackwardInput([masked, counted, GOOD], "cross_entropy").validate()
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "data[1].loss_fn_inputs['target_tokens'][1]"
    ]


def test_a_single_datum_is_refused() -> None:
    with pytest.raises(TypeError, match=r"write \[datum\]$"):
        ForwardBackwardInput(GOOD, "ppo")
    with pytest.raises(TypeError, match=r"^data: .*got ModelInput$"):
        ForwardBackwardInput(cast("Any", GOOD.model_input), "ppo")
    with pytest.raises(TypeError, match=r"^data: .*got NoneType$"):
        ForwardBackwardInput(None, "ppo")


def test_outputs_convert_their_tensors() -> None:
    record = {"logprobs": TensorData([0.5], "float32", [1])}
    output = ForwardBackwardOutput("ArrayRecord", (record,), {"loss:sum": 1.5})
    assert output.loss_fn_outputs == [record]
    assert output.metrics == {"loss:sum": 1.5}
    assert ForwardBackwardOutput("ArrayRecord", []).metrics == {}
    assert ForwardBackwardOutput.model_validate(
        {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": [record], "new": 1}
    ) == ForwardBackwardOutput("ArrayRecord", [record])
    assert ForwardBackwardOutput.model_validate(output.model_dump()) == output
    with pytest.raises(InvalidInputError, match=r"loss_fn_outputs\[1\]\['x'\]"):
        ForwardBackwardOutput("A", [record, {"x": [0.5]}])


def test_metrics_are_a_dictionary_that_lists_its_names_in_an_error() -> None:
    given = {"loss:sum": 6.0}
    passed = ForwardBackwardOutput("ArrayRecord", [], given)
    assert passed.metrics == given
    assert passed.metrics.get("loss") is None
    for again in (pickle.loads(pickle.dumps(passed)), copy.deepcopy(passed), passed.model_copy(update={})):
        assert again == passed
        with pytest.raises(KeyError, match="'loss'; there are loss:sum"):
            again.metrics["loss"]
    assert json.loads(json.dumps(passed.metrics)) == given
    stepped = OptimStepResponse(metrics={"grad_norm": 1})
    with pytest.raises(KeyError, match="no metric 'gradnorm'; there are grad_norm"):
        stepped.metrics["gradnorm"]


# ------------------------- Optimizer families accept unknown fields, and steps check their settings
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
    with pytest.raises(AttributeError, match="no attribute 'version'"):
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
    with pytest.raises(TypeError, match="0 were given"):
        OptimStepRequest(model_id="m")
    with pytest.raises(TypeError, match="2 were given"):
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
