"""Random and damaged messages from the tables of `wire.proto`, and a form in which messages compare."""

from __future__ import annotations

import copy
import math
import random
import struct
from collections.abc import Mapping
from functools import cache
from typing import Any

from hypothesis import strategies as st

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


# ---------------- Hypothesis strategies for protobuf messages, made from the tables of `wire.proto`
_SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "uint32": st.integers(0, 2**32 - 1),
    "uint64": st.integers(0, 2**64 - 1),
    "enum": st.integers(-(2**31), 2**31 - 1),
    "bool": st.booleans(),
    "string": st.text(st.characters(exclude_categories=("Cs",)), max_size=20),
    "bytes": st.binary(max_size=40),
    "double": st.floats(),
    "float": st.floats(width=32),
}


@cache
def messages(table: Message) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy of messages in the form that the reader returns."""
    fields = {field.name: _field(field) for field in table.fields}
    return st.fixed_dictionaries({}, optional=fields).map(lambda drawn: normal(table, drawn))


def _field(field: Field) -> st.SearchStrategy[Any]:
    if field.rule is FieldRule.MAP:
        return st.dictionaries(_SCALARS["string"], _value(field.message.by_name["value"].kind), max_size=3)
    if field.rule is FieldRule.REPEATED:
        return st.lists(_value(field.kind), max_size=3)
    return _value(field.kind)


def _value(kind: Scalar | Message) -> st.SearchStrategy[Any]:
    return messages(kind) if isinstance(kind, Message) else _SCALARS[kind.name]


# ---- Damaged bytes for decoders: cut, flipped, spliced, and with huge numbers as lengths and counts
_HOSTILE = (
    *(0, 1, 2, 3, 0x7F, 0x80, 0xFF, 0x3FFF, 2**31 - 1, 2**31, 2**32 - 1, 2**32),
    *(10**18, 2**63 - 1, 2**63, 2**64 - 1),
)


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def mutated(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Return a copy of `data` with one to four random mutations. The copy rarely equals `data`."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        rng.choice(_MUTATIONS)(rng, out, others)
    return bytes(out)


def _place(rng: random.Random, out: bytearray) -> int:
    return rng.randrange(len(out) + 1)


def _cut_end(rng: random.Random, out: bytearray, _others: list[bytes]) -> None:
    del out[_place(rng, out) :]


def _cut_middle(rng: random.Random, out: bytearray, _others: list[bytes]) -> None:
    at = _place(rng, out)
    del out[at : at + rng.randrange(1, 9)]


def _flip_bit(rng: random.Random, out: bytearray, _others: list[bytes]) -> None:
    if out:
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)


def _set_byte(rng: random.Random, out: bytearray, _others: list[bytes]) -> None:
    if out:
        out[rng.randrange(len(out))] = rng.randrange(256)


def _insert_number(rng: random.Random, out: bytearray, _others: list[bytes]) -> None:
    at = _place(rng, out)
    out[at : at + rng.randrange(3)] = varint(rng.choice(_HOSTILE))


def _set_word(rng: random.Random, out: bytearray, _others: list[bytes]) -> None:
    at = _place(rng, out)
    out[at : at + 8] = rng.choice(_HOSTILE).to_bytes(8, "little")


def _repeat_part(rng: random.Random, out: bytearray, _others: list[bytes]) -> None:
    at = _place(rng, out)
    out[at:at] = out[at : at + rng.randrange(1, 40)] * rng.choice((1, 1, 3))


def _splice(rng: random.Random, out: bytearray, others: list[bytes]) -> None:
    other = rng.choice(others)
    start = rng.randrange(len(other) + 1)
    at = _place(rng, out)
    out[at : at + rng.randrange(20)] = other[start : start + rng.randrange(60)]


def _append_message(rng: random.Random, out: bytearray, others: list[bytes]) -> None:
    out += rng.choice(others)


def _insert_group(rng: random.Random, out: bytearray, _others: list[bytes]) -> None:
    depth = rng.choice((1, 2, 5, 200))
    out[_place(rng, out) :] = (
        bytes((0x0B,)) * depth + b"\x10\x01" + bytes((0x0C,)) * rng.choice((depth, depth - 1))
    )


_MUTATIONS = (
    _cut_end,
    _cut_middle,
    _flip_bit,
    _set_byte,
    _insert_number,
    _set_word,
    _repeat_part,
    _splice,
    _append_message,
    _insert_group,
)


# -------------------------------------------------------------------------------- well-formed but wrong

_RANGES_TO_LEAVE = {"uint32": (0, 2**32 - 1), "uint64": (0, 2**64 - 1), "int64": (-(2**63), 2**63 - 1)}
_NUMBERS = (*_HOSTILE, -1, -4, -(2**31), -(2**63), 2**62, 4, 5, 8, 32)


def hostile(rng: random.Random, table: Message, message: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a plain message with one to three values replaced by other values of their fields."""
    changed: dict[str, Any] = copy.deepcopy(message)
    for _ in range(rng.choice((1, 1, 2, 3))):
        _spoil(rng, table, changed)
    return changed


def _spoil(rng: random.Random, table: Message, message: dict[str, Any]) -> None:
    field = rng.choice(table.fields)
    value = message.get(field.name)
    if field.rule is FieldRule.MAP:
        _spoil_map(rng, field.message, value or {})
    elif field.rule is FieldRule.REPEATED:
        message[field.name] = _spoiled_list(rng, field, value or [])
    elif isinstance(field.kind, Message) and value is not None and rng.random() < 0.9:
        _spoil(rng, field.kind, value)
    elif isinstance(field.kind, Message) or rng.random() < 0.1:
        message.pop(field.name, None)
    else:
        for rival in field.rivals:
            message.pop(rival, None)
        message[field.name] = _other(rng, field.kind, value)


def _spoil_map(rng: random.Random, entry: Message, found: dict[str, Any]) -> None:
    inside = entry.by_name["value"].kind
    if not found:
        return
    key = rng.choice(list(found))
    if isinstance(inside, Message) and rng.random() < 0.9:
        _spoil(rng, inside, found[key])
    else:
        found[rng.choice(("", "x", key * 2))] = found[key] if rng.random() < 0.5 else found.pop(key)


def _spoiled_list(rng: random.Random, field: Field, found: list[Any]) -> list[Any]:
    if not isinstance(field.kind, Message):
        return [*found[1:], *(_other(rng, field.kind, "") for _ in range(rng.choice((1, 1, 2, 40))))]
    if not found:
        return [{}]
    at = rng.randrange(len(found))
    if rng.random() < 0.8:
        _spoil(rng, field.kind, found[at])
        return found
    return rng.choice((found[:at], [*found, copy.deepcopy(found[at])], [*found, {}]))


def _other(rng: random.Random, kind: Scalar, value: Any) -> Any:
    if kind.name == "string":
        return rng.choice(("", "a", "png", "x" * 300))
    if kind.name == "bytes":
        octets = bytearray(value or b"")
        rng.choice((_cut_end, _set_word, _set_word, _repeat_part, _flip_bit))(rng, octets, [])
        return bytes(octets)
    if kind.name in ("float", "double"):
        return rng.choice((0.0, -1.0, float("nan"), float("inf"), 1e30))
    if kind.name == "bool":
        return not value
    low, high = _RANGES_TO_LEAVE.get(kind.name, (-(2**31), 2**31 - 1))
    return min(max(rng.choice(_NUMBERS), low), high)
