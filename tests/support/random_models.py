"""Random constructor arguments for models, drawn from the annotations of their fields.

All arguments are plain: nested models are mappings, so that the same arguments fit two implementations.
"""

from __future__ import annotations

import inspect
import random
import string
import types
import zlib
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

import attrs

import tinker_sync.types
from tinker_sync.types._model import Model
from tinker_sync.types._structured import fields_of, tag_of

ARRAYS = {"tensor_data", "model_input", "datum", "training", "sampling"}
"""Modules whose models hold arrays. Their own tests cover the accepted values."""

FAMILIES = ["muon", "adamw", "dimuon", "", "sgd ☃"]


def exported_models() -> dict[str, type[Any]]:
    """Return every model class of `tinker_sync.types`, by its name."""
    found = {name: getattr(tinker_sync.types, name) for name in tinker_sync.types.__all__}
    return {name: cls for name, cls in found.items() if inspect.isclass(cls) and issubclass(cls, Model)}


def flat_models() -> dict[str, type[Any]]:
    """Return the model classes without arrays, by their names."""
    return {
        name: cls
        for name, cls in exported_models().items()
        if cls.__module__.rpartition(".")[2] not in ARRAYS
    }


def random_arguments(rng: random.Random, cls: type[Any]) -> dict[str, Any]:
    """Return random arguments for a model's constructor. Arguments with a default are sometimes missing."""
    if cls.__open__:
        return {"type": rng.choice(FAMILIES), **random_object(rng, depth=2)}
    arguments = {}
    for field in fields_of(cls):
        if not field.init or (field.default is not attrs.NOTHING and rng.random() < 0.4):
            continue
        arguments[field.alias] = _CONSTRAINED.get((cls.__name__, field.name), _unconstrained)(rng, field.type)
    return arguments


def _unconstrained(rng: random.Random, annotation: Any) -> Any:
    return random_value(rng, annotation)


# Random values for the fields with a limit.
_CONSTRAINED: dict[tuple[str, str], Any] = {
    ("DimuonParams", "learning_rate"): lambda rng, _: rng.choice([0, 0.5, 1e30]),
    ("DimuonParams", "beta1"): lambda rng, _: rng.choice([0, 0.5, 0.999]),
    ("DimuonParams", "grad_clip_norm"): lambda rng, _: rng.choice([-1, 0, 2.5]),
    ("UserSearchOwner", "owner_urns"): lambda rng, _: [random_text(rng) for _ in range(rng.randint(1, 10))],
    ("ClientFinishedSessionStatusQuery", "reasons"): lambda rng, _: rng.choice(
        [None, ["success", "errored"]]
    ),
    ("SessionSearchRequest", "display_name"): lambda rng, _: rng.choice([None, "x", random_text(rng) + "y"]),
    ("SessionSearchRequest", "statuses"): lambda rng, _: rng.choice([None, [{"type": "active"}]]),
    ("SessionSearchRequest", "limit"): lambda rng, _: rng.randint(1, 200),
    ("SessionSearchCursor", "last_created_at"): lambda rng, _: random_moment(rng, aware=True),
    ("CheckpointSearchRequest", "limit"): lambda rng, _: rng.randint(1, 200),
    ("CheckpointSearchCursor", "last_created_at"): lambda rng, _: random_moment(rng, aware=True),
    ("Checkpoint", "base_model"): lambda *_: None,  # the reference client lacks this field
}


def random_value(rng: random.Random, annotation: Any) -> Any:
    """Return a random value for an annotation."""
    if annotation in _SIMPLE:
        return _SIMPLE[annotation](rng)
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return rng.choice(inner)
    if origin in (Union, types.UnionType):
        return _random_member(rng, inner)
    if origin is list:
        return [random_value(rng, inner[0]) for _ in range(rng.randint(0, 3))]
    if origin is dict:
        return {random_text(rng): random_value(rng, inner[1]) for _ in range(rng.randint(0, 3))}
    if issubclass(annotation, Enum):
        return rng.choice(list(annotation)).value
    assert issubclass(annotation, Model), annotation
    return random_arguments(rng, annotation)


def _random_member(rng: random.Random, members: tuple[Any, ...]) -> Any:
    if type(None) in members and rng.random() < 0.3:
        return None
    member = rng.choice([member for member in members if member is not type(None)])
    value = random_value(rng, member)
    if inspect.isclass(member) and issubclass(member, Model) and (tag := tag_of(member)):
        # A tag has a default, but only the tag distinguishes the members of a union.
        return {**value, tag[0]: tag[1]}
    return value


def random_text(rng: random.Random) -> str:
    """Return a short text of letters or of unusual characters, or an empty one."""
    alphabet = rng.choice([string.ascii_lowercase, ' "\\\n\x00/ée☃𝄞'])
    return "".join(rng.choices(alphabet, k=rng.randint(0, 8)))


def random_moment(rng: random.Random, *, aware: bool | None = None) -> datetime:
    """Return a datetime in any year, with or without microseconds and a time zone."""
    moment = datetime(1, 1, 3) + timedelta(days=rng.randrange(3_652_000), seconds=rng.randrange(86400))  # noqa: DTZ001
    moment += timedelta(microseconds=rng.choice([0, 0, rng.randrange(1_000_000)]))
    if aware is False or (aware is None and rng.random() < 0.3):
        return moment
    minutes = rng.choice([0, 0, 330, -480, 1])
    return moment.replace(tzinfo=timezone(timedelta(minutes=minutes)))


def random_object(rng: random.Random, *, depth: int = 3) -> dict[str, Any]:
    """Return a JSON object whose names are identifiers."""
    return {f"{rng.choice('abcxyz')}_{n}": random_json(rng, depth - 1) for n in range(rng.randint(0, 3))}


def random_json(rng: random.Random, depth: int = 3) -> Any:
    """Return a random JSON value, which may contain nulls."""
    kind = rng.randrange(7 if depth > 0 else 5)
    if kind == 5:
        return [random_json(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    if kind == 6:
        return random_object(rng, depth=depth)
    return [None, rng.random() < 0.5, random_whole(rng), random_real(rng), random_text(rng)][kind]


def random_whole(rng: random.Random) -> int:
    """Return an int, sometimes of more than 64 bits."""
    return rng.choice([0, 1, -1, rng.randint(0, 1000), 2**53 + 1, -(2**63), 2**70])


def random_real(rng: random.Random) -> float:
    """Return a finite float, or sometimes an int in its place."""
    return rng.choice([0, 1, -0.0, 0.1, 1e-300, -1.5e300, rng.random(), rng.randint(-9, 9)])


_SIMPLE: dict[Any, Any] = {
    str: random_text,
    int: random_whole,
    float: random_real,
    bool: lambda rng: rng.random() < 0.5,
    datetime: random_moment,
    Any: random_json,
    object: random_json,
}


def seeded(name: str) -> random.Random:
    return random.Random(zlib.crc32(name.encode()))


def exact(tree: Any) -> Any:
    """Return the type and repr of each value in a tree, so that 1, 1.0 and True differ, and -0.0 and 0.0."""
    if isinstance(tree, dict):
        return {name: exact(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [exact(value) for value in tree]
    return type(tree).__name__, repr(tree)


def hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
