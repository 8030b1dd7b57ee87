"""Insertion of unknown fields into requests, as a newer client would send: random names at random depth."""

from __future__ import annotations

import random
from typing import Any

from support.proto_cases import varint

from tinker_sync.wire.proto import tables
from tinker_sync.wire.proto.codec import LENGTH, Message, read_length, read_tag, skip

FREE = frozenset({"user_metadata", "loss_fn_inputs", "loss_fn_config", "args", "kwargs"})
"""Fields whose value is a mapping with names of the client's choice, so any name in it is known."""

_LETTERS = "abcxyz_-. ☃𝄞\n\"'\\"


def newer_json(rng: random.Random, tree: Any) -> Any:
    """Return a copy of a tree with unknown fields in about half of its objects."""
    if isinstance(tree, list):
        return [newer_json(rng, item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    made = {
        name: _in_free(rng, value) if name in FREE else newer_json(rng, value) for name, value in tree.items()
    }
    added = {_name(rng): _value(rng, 3) for _ in range(rng.choice((0, 0, 1, 1, 2)))}
    items = [*made.items(), *added.items()]
    rng.shuffle(items)
    return dict(items)


def _in_free(rng: random.Random, tree: Any) -> Any:
    """Return the value of a field of `FREE`. If the value holds tensors, these get unknown fields."""
    if isinstance(tree, dict) and all(
        isinstance(value, dict) and "dtype" in value for value in tree.values()
    ):
        return {name: newer_json(rng, value) for name, value in tree.items()}
    return tree


def _name(rng: random.Random) -> str:
    # No known field begins like this.
    return "x" + "".join(rng.choice(_LETTERS) for _ in range(rng.choice((1, 5, 5, 200))))


def _value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(9 if depth else 7)
    if kind == 7:
        return [_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 8:
        return {_name(rng): _value(rng, depth - 1) for _ in range(rng.randrange(4))}
    return (None, True, 0, -(2**70), 1.5, "", "snow ☃")[kind]


def newer_protobuf(
    rng: random.Random, data: bytes, table: Message = tables.FORWARD_BACKWARD_REQUEST
) -> bytes:
    """Return a copy of an encoded message, with unknown fields among its fields and in nested messages."""
    view, at, parts = memoryview(data), 0, []
    while at < len(view):
        start = at
        tag, at = read_tag(view, at, len(view))
        field = table.by_tag[tag]
        if isinstance(field.kind, Message):
            begin, at = read_length(view, at, len(view))
            inner = newer_protobuf(rng, data[begin:at], field.kind)
            parts.append(varint(tag) + varint(len(inner)) + inner)
        else:
            at = skip(view, at, len(view), tag)
            parts.append(data[start:at])
    for _ in range(rng.choice((0, 0, 1, 2))):
        parts.insert(rng.randrange(len(parts) + 1), _unknown(rng, table))
    return b"".join(parts)


def _unknown(rng: random.Random, table: Message, depth: int = 3) -> bytes:
    known = {field.number for field in table.fields}
    number = rng.choice([n for n in (*range(1, 30), 1000, 18_999, 2**29 - 1) if n not in known])
    wire = rng.choice((0, 1, LENGTH, 3, 5) if depth else (0, 1, LENGTH, 5))
    if wire == 0:
        return varint(number << 3) + varint(rng.choice((0, 1, 300, 2**64 - 1)))
    if wire == LENGTH:
        payload = rng.randbytes(rng.choice((0, 1, 200)))
        return varint(number << 3 | LENGTH) + varint(len(payload)) + payload
    if wire == 3:
        inside = b"".join(_unknown(rng, table, depth - 1) for _ in range(rng.randrange(3)))
        return varint(number << 3 | 3) + inside + varint(number << 3 | 4)
    return varint(number << 3 | wire) + rng.randbytes(8 if wire == 1 else 4)
