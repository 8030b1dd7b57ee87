"""Hypothesis strategies for protobuf messages, made from the tables of `wire.proto`."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import strategies as st
from support.proto_random import normal

from tinker_sync.wire.proto.codec import Field, FieldRule, Message, Scalar

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
