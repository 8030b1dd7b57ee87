"""Damaged bytes for decoders: cut, flipped, spliced, and with huge numbers as lengths and counts."""

from __future__ import annotations

import copy
import random
from typing import Any

from tinker_sync.wire.proto.codec import Field, FieldRule, Message, Scalar

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

_RANGES = {"uint32": (0, 2**32 - 1), "uint64": (0, 2**64 - 1), "int64": (-(2**63), 2**63 - 1)}
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
    low, high = _RANGES.get(kind.name, (-(2**31), 2**31 - 1))
    return min(max(rng.choice(_NUMBERS), low), high)
