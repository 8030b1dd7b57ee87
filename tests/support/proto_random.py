"""Random messages made from the tables of `wire.proto`, and a form in which two messages can be compared."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Mapping
from typing import Any

from tinker_sync.wire.proto import tables
from tinker_sync.wire.proto.codec import Field, FieldRule, Message, Scalar

MESSAGES = tuple(value for value in vars(tables).values() if isinstance(value, Message))
"""Every table of the protocol."""

_RANGES = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
    "enum": (-(2**31), 2**31 - 1),
}
_TEXTS = ("", "a", "logprobs", "target_tokens", "snow ☃", "𝄞", "\x00", "loss:sum", "é" * 70)
_REALS = (0.0, -0.0, 1.0, 0.1, -2.5, math.inf, -math.inf, math.nan, 5e-324, 1.7e308)


def random_message(rng: random.Random, table: Message) -> dict[str, Any]:
    """Return a random message of a table, in the form in which the reader returns messages, see `normal`."""
    fields = rng.sample(table.fields, len(table.fields))
    return normal(table, {field.name: _random_field(rng, field) for field in fields if rng.random() < 0.7})


def normal(table: Message, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in the form in which the reader returns messages.

    This form has only one member of each oneof, and default values only in fields with presence.
    """
    found: dict[str, Any] = {}
    for name, value in message.items():
        field = table.by_name[name]
        if not any(rival in found for rival in field.rivals) and (value or field.rule is FieldRule.PRESENT):
            found[name] = value
    return found


def _random_field(rng: random.Random, field: Field) -> Any:
    if field.rule is FieldRule.MAP:
        assert isinstance(field.kind, Message)
        value = field.kind.by_name["value"].kind
        return {_text(rng): _random_value(rng, value) for _ in range(_count(rng))}
    if field.rule is FieldRule.REPEATED:
        return [_random_value(rng, field.kind) for _ in range(_count(rng))]
    return _random_value(rng, field.kind)


def _count(rng: random.Random) -> int:
    return rng.choice((0, 1, 1, 2, 3))


def _random_value(rng: random.Random, kind: Scalar | Message) -> Any:
    if isinstance(kind, Message):
        return random_message(rng, kind)
    if kind.name in _RANGES:
        return _integer(rng, *_RANGES[kind.name])
    if kind.name == "bool":
        return rng.random() < 0.5
    if kind.name == "string":
        return _text(rng)
    if kind.name == "bytes":
        return rng.randbytes(rng.choice((0, 1, 4, 8, 24, 130)))
    real = rng.choice((rng.gauss(0, 1000), rng.choice(_REALS)))
    if kind.name == "float":
        real = rng.choice((0.0, math.inf)) if abs(real) > 1e38 else real
        return struct.unpack("<f", struct.pack("<f", real))[0]
    return real


def _integer(rng: random.Random, low: int, high: int) -> int:
    number = rng.choice((0, 1, 2, 3, 4, -1, 127, 128, 300, low, high, rng.randint(low, high)))
    return min(max(number, low), high)


def _text(rng: random.Random) -> str:
    return rng.choice((*_TEXTS, "".join(chr(rng.randrange(1, 0xD800)) for _ in range(rng.randrange(6)))))


def comparable(value: Any) -> Any:
    """Return a form of a message in which views are bytes, NaN equals NaN, and 0.0 differs from -0.0."""
    if isinstance(value, Mapping):
        return {key: comparable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [comparable(item) for item in value]
    if isinstance(value, float):
        return ("nan",) if math.isnan(value) else (value, math.copysign(1, value))
    return bytes(value) if isinstance(value, memoryview) else value
