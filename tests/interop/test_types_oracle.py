"""The types have the same fields as the reference client's, and the same values from the same arguments.

This package accepts all arguments that the reference client accepts, with the same meaning. The last section
has the intended differences: this package refuses values that no server accepts, and an unknown argument is
an error for types of answers too.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
from collections.abc import Iterator
from datetime import date, datetime, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import attrs
import numpy as np
import pydantic
import pytest
import tinker.types
from interop.conftest import LACKING_FIELDS, shared
from pydantic import AwareDatetime
from support.random_models import exact, exported_models, flat_models, hashable, random_arguments, seeded
from tinker.types.custom_loss_graph import CustomLossNodeOp
from tinker.types.generic_event import GenericEvent
from tinker.types.optimizer import OptimizerConfigBase, OptimParamsBase
from tinker.types.topk_logprobs import TopkLogprobs
from tinker.types.try_again_response import TryAgainResponse

import tinker_sync.types
from tinker_sync.types._structured import fields_of

INSTANCES_OF_EACH_CLASS = 100

NOT_EXPORTED = {
    "CustomLossNodeOp": CustomLossNodeOp,
    "GenericEvent": GenericEvent,
    "OptimParamsBase": OptimParamsBase,
    "OptimizerConfigBase": OptimizerConfigBase,
    "TopkLogprobs": TopkLogprobs,
    "TryAgainResponse": TryAgainResponse,
}
"""The classes that the reference client has in other modules."""


def theirs(name: str) -> Any:
    return NOT_EXPORTED.get(name) or getattr(tinker.types, name)


def ours(name: str) -> Any:
    return getattr(tinker_sync.types, name)


def shared_fields(cls: Any) -> list[attrs.Attribute[Any]]:
    return [
        field
        for field in fields_of(cls)
        if not field.name.startswith("_") and (cls.__name__, field.name) not in LACKING_FIELDS
    ]


CLASSES = sorted(name for name in exported_models() if name in NOT_EXPORTED or hasattr(tinker.types, name))
FLAT = sorted({*flat_models()} & {*CLASSES})
PYDANTIC = [name for name in CLASSES if issubclass(theirs(name), pydantic.BaseModel)]
DATACLASSES = [name for name in CLASSES if dataclasses.is_dataclass(theirs(name))]


def test_every_class_of_the_reference_is_compared() -> None:
    classes = {
        name
        for name, value in vars(tinker.types).items()
        if inspect.isclass(value)
        and (issubclass(value, pydantic.BaseModel) or dataclasses.is_dataclass(value))
    }
    assert classes | (NOT_EXPORTED.keys() - {"CustomLossNodeOp"}) == {*CLASSES}
    assert {*CLASSES} == {*PYDANTIC, *DATACLASSES}
    assert {*FLAT} <= {*PYDANTIC}


# ---------------------------------------------------------------------------------------------- fields


def default_of(field: attrs.Attribute[Any]) -> Any:
    """Return the default of a field as JSON data, or NOTHING for a required field."""
    default: Any = field.default
    if default is attrs.NOTHING:
        return default
    made = default.factory() if isinstance(default, attrs.Factory) else default
    return plain(field.converter(made) if field.converter else made)


def plain(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def reference_default(field: Any) -> Any:
    if field.is_required():
        return attrs.NOTHING
    return plain(field.get_default(call_default_factory=True))


@pytest.mark.parametrize("name", PYDANTIC)
def test_models_have_the_same_fields(name: str) -> None:
    mine = {field.name: field for field in shared_fields(ours(name))}
    reference = theirs(name).model_fields
    assert list(mine) == list(reference)
    for field, declared in reference.items():
        expected, default = reference_default(declared), default_of(mine[field])
        assert default == expected, field
        assert type(default) is type(expected) or isinstance(expected, int), field


@pytest.mark.parametrize("name", FLAT)
def test_models_declare_the_same_types(name: str) -> None:
    mine = {field.name: field.type for field in shared_fields(ours(name))}
    reference = {field: declared.annotation for field, declared in theirs(name).model_fields.items()}
    assert {field: spelled(annotation) for field, annotation in mine.items()} == {
        field: spelled(annotation) for field, annotation in reference.items()
    }


def spelled(annotation: Any) -> Any:
    """Return an annotation in a form that is equal for both packages, with class names in place of classes.

    A union becomes the set of its members, because their order does not matter.
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return spelled(inner[0])
    if origin in (Union, types.UnionType):
        members = [spelled(member) for member in inner]
        return frozenset().union(*(each if isinstance(each, frozenset) else {each} for each in members))
    if origin is Literal:
        return inner
    if origin is not None:
        return origin.__name__, *(spelled(argument) for argument in inner)
    if annotation is AwareDatetime:
        return "datetime"
    return getattr(annotation, "__name__", str(annotation))


@pytest.mark.parametrize("name", DATACLASSES)
def test_dataclasses_take_the_same_arguments_in_the_same_order(name: str) -> None:
    mine, reference = (inspect.signature(cls).parameters.values() for cls in (ours(name), theirs(name)))
    assert [(each.name, each.kind) for each in mine] == [(each.name, each.kind) for each in reference]
    for own, other in zip(mine, reference, strict=True):
        if (name, own.name) not in MORE_DEFAULTS:
            assert (own.default is own.empty) == (other.default is other.empty), own.name


@pytest.mark.parametrize("name", [*DATACLASSES, "LossHandle"])
def test_dataclasses_have_the_same_fields(name: str) -> None:
    cls, reference = (
        (tinker_sync.LossHandle, tinker.LossHandle) if name == "LossHandle" else (ours(name), theirs(name))
    )
    mine = {each.name: described(each) for each in dataclasses.fields(cls)}
    expected = {each.name: described(each) for each in dataclasses.fields(reference)}
    if name == "TensorData":
        # The values are the public parameter `data`, with which `replace` makes a tensor; it fails in the
        # reference client, whose constructor has no parameter `_numpy`.
        del mine["data"], expected["_numpy"]
    if name == "SampledSequence":
        del mine["sequence_id"], expected["sequence_id"]  # optional in this package
    assert mine == expected


def described(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    factory = field.default_factory
    made = factory if factory is dataclasses.MISSING else factory()
    return field.default, made, field.init, field.repr, field.compare, field.kw_only


MORE_DEFAULTS = {("SampledSequence", "sequence_id")}
"""Arguments that are optional in this package, because some servers send no such ids."""


ALIASES = sorted(
    name
    for name, value in vars(tinker.types).items()
    if name[:1].isupper() and not inspect.isclass(value) and not isinstance(value, types.ModuleType)
)


@pytest.mark.parametrize("name", ["CustomLossNodeOp", *ALIASES])
def test_aliases_mean_the_same(name: str) -> None:
    own = ours(name)
    if isinstance(own, str):  # an alias as text, which loads no classes; its members are compared above
        assert name in own or "TensorData" in own or "ProvenanceSpan" in own
    else:
        assert spelled(own) == spelled(theirs(name))


# -------------------------------------------------------------------------------------------- instances


@pytest.mark.parametrize("name", FLAT)
def test_the_same_arguments_make_the_same_values(name: str) -> None:
    rng, cls, reference = seeded(name), ours(name), theirs(name)
    for _ in range(INSTANCES_OF_EACH_CLASS):
        arguments = shared(random_arguments(rng, cls))
        mine, other = cls(**arguments), reference(**arguments)
        assert exact(shared(mine.model_dump(mode="json", exclude_none=True))) == exact(
            other.model_dump(mode="json", exclude_none=True)
        )
        assert exact(shared(mine.model_dump(mode="json"))) == exact(other.model_dump(mode="json"))
        assert made_of(mine) == made_of(other)
        assert hashable(mine) == hashable(other)
        assert cls.model_validate(other.model_dump()) == mine
        # A dump of the reference client's instance gives an equal instance of this package.
        assert exact(cls.model_validate(other.model_dump(mode="json")).model_dump(mode="json")) == exact(
            mine.model_dump(mode="json")
        )


def made_of(value: Any) -> Any:
    """Return a tree with the class names of a model and of the models in it, and None for other values."""
    if isinstance(value, (list, tuple)):
        return [made_of(item) for item in value]
    if isinstance(value, dict):
        return {name: made_of(item) for name, item in value.items()}
    if isinstance(value, pydantic.BaseModel):
        return type(value).__name__, {
            name: made_of(getattr(value, name)) for name in type(value).model_fields
        }
    if attrs.has(type(value)):
        names = [field.name for field in shared_fields(type(value))]
        return type(value).__name__, {name: made_of(getattr(value, name)) for name in names}
    return None


@pytest.mark.parametrize("name", FLAT)
def test_equal_where_the_reference_is_equal(name: str) -> None:
    rng, cls, reference = seeded(name), ours(name), theirs(name)
    made = [shared(random_arguments(rng, cls)) for _ in range(12)]
    mine, other = [cls(**arguments) for arguments in made], [reference(**arguments) for arguments in made]
    assert [[a == b for b in mine] for a in mine] == [[a == b for b in other] for a in other]


@pytest.mark.parametrize("name", FLAT)
def test_unknown_fields_are_taken_or_refused_alike(name: str) -> None:
    arguments = {**shared(random_arguments(seeded(name), ours(name))), "no_such_field": 1}
    accepted = can_make(lambda: theirs(name)(**arguments))
    assert can_make(lambda: ours(name).model_validate(arguments)) == accepted


def can_make(make: Any) -> bool:
    try:
        make()
    except (ValueError, TypeError):
        return False
    return True


# --------------------------------------------------------------------------------------- odd values


class Text(str, enum.Enum):
    ONE = "1"
    ACTIVE = "active"


class Number(enum.Enum):
    ONE = 1


HUGE = 1e300

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 2**70, 0.0, 1.0, -0.0, 1.5, HUGE, float("nan"), float("inf"),
    "", "1", "0", "1.0", " 1 ", "+1", "1_000", "1.5", "1e3", "nan", "inf", "true", "T", "off", "maybe",
    "0x10", ".0",
    "active", "own", "user", "length", "INFO", "accepted", "ok", "☃", "a\ud800",
    b"1", b"x", b"\xff", bytearray(b"1"), Text.ONE, Text.ACTIVE, Number.ONE,
    Decimal(1), Decimal("1.5"), Decimal(10**20 + 1), Decimal("nan"), Fraction(2, 1), Fraction(1, 3),
    np.int64(1), np.float32(1.5), np.float64(1), np.bool_(True), np.str_("1"),
    np.array(1), np.array([1.5, 2]),
    [], [1], ["a"], ("a",), {"a"}, range(2), {"a": 1}.keys(), [None], [["a"]], [{}], [{"type": "active"}],
    {}, {"a": "b"}, {"a": 1}, {"a": None}, {1: 2}, {b"a": "b"}, types.MappingProxyType({"a": "b"}),
    {"type": "own"}, {"type": "adamw"}, {"type": "adamw", "x": 1}, {"type": "new"}, {"type": None},
    {"version": 1},
    {"type": "success"}, {"rank": "8"}, {"learning_rate": 1}, {"offset": 0, "limit": 1, "total_count": "2"},
    {"user_metadata": {"a": "b"}}, {"type": "training", "token_count": 1}, {"token_count": 1},
    {"cached": 1, "token_count": 1}, {"cached": "maybe", "token_count": 1},
    {"sampling_session_id": "s"}, {"nodes": []}, {"request_id": "r"},
    "2026-01-31T12:00:00Z", "2026-01-31 12:00:00,5+0530", "2026-01-31", "2026-02-30", "2026-01-31T24:00:00Z",
    "1700000000", "1700000000.5", 1_700_000_000, 1_700_000_000_000, date(2026, 1, 31), b"2026-01-31T12:00Z",
    datetime(2026, 1, 31, tzinfo=timezone.utc), datetime(2026, 1, 31),  # noqa: DTZ001
]  # fmt: skip


def odd_arguments(name: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield a field, an odd value, and valid arguments in which the field has this value.

    The first item has the field "", and arguments that are all valid.
    """
    rng, cls = seeded(name), ours(name)
    good = shared(random_arguments(rng, cls))
    yield "", None, good
    for field in shared_fields(cls):
        if field.init:
            for value in ODD:
                yield field.name, value, {**good, field.name: value}


@pytest.mark.parametrize("name", FLAT)
def test_values_that_the_reference_accepts_mean_the_same_here(name: str) -> None:
    accepted = 0
    for field, value, arguments in odd_arguments(name):
        if value is Number.ONE and declared_text(name, field):
            continue
        try:
            other = theirs(name)(**arguments)
        except pydantic.ValidationError:
            continue
        accepted += 1
        mine = ours(name)(**arguments)
        where = f"{name}.{field}={value!r}"
        assert shown(mine) == shown(other), where
        assert made_of(mine) == made_of(other), where
    assert accepted > 0


def shown(made: Any) -> Any:
    """Return a dump in which NaN equals NaN, without differences in the types of free-form values."""
    return exact(shared(loosened(made.model_dump())))


def loosened(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {str(name): loosened(value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple, set, frozenset, range, type({}.keys()))):
        return [loosened(value) for value in tree]
    if isinstance(tree, datetime):
        return tree.isoformat()
    if isinstance(tree, enum.Enum):
        return tree.value
    return tree.tolist() if isinstance(tree, (np.ndarray, np.generic)) else tree


@pytest.mark.parametrize("name", FLAT)
def test_values_that_only_this_package_accepts_are_known(name: str) -> None:
    """Only this package accepts a few forms of valid values, and the fields in `WIDER`; nothing else."""
    for field, value, arguments in odd_arguments(name):
        if can_make(lambda arguments=arguments: ours(name)(**arguments)):
            beyond = not can_make(lambda arguments=arguments: theirs(name)(**arguments))
            assert not beyond or (name, field) in WIDER or means_the_same(value), f"{name}.{field}={value!r}"


def means_the_same(value: Any) -> bool:
    """Return True for a form that only this package accepts: a mapping that is no dict, or a huge float."""
    return isinstance(value, types.MappingProxyType) or value is HUGE


# ------------------------------------------------------------------------- intended differences


def declared_text(name: str, field: str) -> bool:
    """Return True if a field takes text, for which only the reference client accepts `Number.ONE`."""
    declared = {each.name: each.type for each in attrs.fields(ours(name))}
    return field != "" and str in (declared[field], *get_args(declared[field]))


WIDER = {
    # An unknown category of a newer server becomes `Unknown`, so that the error itself is still readable.
    ("RequestFailedResponse", "category"),
    # None counts as missing, because two other fields may hold the settings.
    ("OptimStepRequest", "optim_params"),
    # The reference client fails for text with half a surrogate pair; this package's encoder refuses it.
    ("SessionSearchRequest", "display_name"),
}


@pytest.mark.parametrize(
    "path",
    ["tinker://r/weights/a", "tinker://s:train:0/sampler_weights/b c", "tinker://r/external_weights/é?#"],
)
def test_paths_and_links_are_read_alike(path: str) -> None:
    mine, other = (cls.from_tinker_path(path) for cls in map_both("ParsedCheckpointTinkerPath"))
    assert mine.model_dump() == other.model_dump()
    for name, method in [
        ("SaveWeightsResponse", "get_console_url"),
        ("SaveWeightsForSamplerResponse", "get_console_url"),
        ("SaveWeightsForSamplerResponse", "get_playground_url"),
    ]:
        mine, other = (getattr(cls(path=path), method)() for cls in map_both(name))
        assert mine == other


@pytest.mark.parametrize(
    "path", ["", "tinker://r/weights", "tinker://r/w/a", "r/weights/a", "tinker://r/weights/a/b"]
)
def test_malformed_paths_are_refused_alike(path: str) -> None:
    for cls in map_both("ParsedCheckpointTinkerPath"):
        with pytest.raises(ValueError, match="tinker"):
            cls.from_tinker_path(path)


def map_both(name: str) -> tuple[Any, Any]:
    return ours(name), theirs(name)
