"""Properties of every model without arrays, on random instances."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import random
from typing import Any

import attrs
import pytest
from support.each import for_each
from support.random_models import flat_models, random_arguments

from tinker_sync.errors import InvalidInputError

MODELS = flat_models()
OPEN = {"OptimParamsBase", "OptimizerConfigBase"}
INSTANCES = 20

every_model = for_each("cls", MODELS.values())


def instances(cls: type[Any]) -> list[Any]:
    rng = random.Random(cls.__name__)
    return [cls(**random_arguments(rng, cls)) for _ in range(INSTANCES)]


def hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


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
def test_copies_and_pickles_are_equal(cls: type[Any]) -> None:
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
