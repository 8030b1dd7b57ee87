"""The protobuf reader and writer agree with the reference client's protobuf classes."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given, settings
from hypothesis import strategies as st
from interop.make_golden import GOLDEN, golden_hex, golden_json
from interop.make_golden import messages as golden_messages
from support.proto_mutate import mutated
from support.proto_random import MESSAGES, comparable, random_message
from support.proto_strategies import messages
from tinker.proto import tinker_public_pb2 as pb

from tinker_sync.errors import WireError
from tinker_sync.wire.proto import tables
from tinker_sync.wire.proto.codec import Field, FieldRule, Message, read_message, write_message

TOP_LEVEL = (tables.FORWARD_BACKWARD_REQUEST, tables.FORWARD_BACKWARD_OUTPUT, tables.SAMPLE_RESPONSE)
KINDS = {
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_DOUBLE: "double",
    FieldDescriptor.TYPE_FLOAT: "float",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_ENUM: "enum",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_UINT64: "uint64",
}


# ------------------------------------------------------------------------------------------ the tables


def described(field: FieldDescriptor) -> tuple[Any, ...]:
    kind = field.message_type.name if field.message_type else KINDS[field.type]
    repeated = field.is_repeated
    if repeated and field.message_type and field.message_type.GetOptions().map_entry:
        value = field.message_type.fields_by_name["value"]
        assert field.message_type.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING
        return field.number, field.name, FieldRule.MAP, described(value)[3], ()
    rule = FieldRule.REPEATED if repeated else FieldRule.PRESENT if field.has_presence else FieldRule.PLAIN
    group = field.containing_oneof
    # In the descriptor, an `optional` field is a oneof with one member.
    rivals = {member.name for member in group.fields} - {field.name} if group else set()
    return field.number, field.name, rule, kind, tuple(sorted(rivals))


def tabled(field: Field) -> tuple[Any, ...]:
    kind = field.kind
    if field.rule is FieldRule.MAP:
        assert isinstance(kind, Message)
        kind = kind.by_name["value"].kind
    return field.number, field.name, field.rule, kind.name, tuple(sorted(field.rivals))


def test_tables_are_the_schema() -> None:
    messages: dict[str, Descriptor] = dict(pb.DESCRIPTOR.message_types_by_name)
    unused = {"SamplingParams", "StopStrings", "StopTokens"}  # sampling requests are JSON
    assert {table.name for table in MESSAGES} == set(messages) - unused
    for table in MESSAGES:
        expected = [described(field) for field in messages[table.name].fields]
        assert [tabled(field) for field in table.fields] == sorted(expected)


def test_enum_numbers_are_the_schema() -> None:
    for enum in pb.DESCRIPTOR.enum_types_by_name.values():
        for value in enum.values:
            assert getattr(tables, value.name) == value.number


# ------------------------------------------------------------------------------------------ conversions


def to_reference(table: Message, value: dict[str, Any], message: Any = None) -> Any:
    """Return a message of the reference client with this content."""
    message = getattr(pb, table.name)() if message is None else message
    for name, item in value.items():
        field = table.by_name[name]
        inside = field.kind.by_name["value"].kind if field.rule is FieldRule.MAP else field.kind
        target = getattr(message, name)
        if field.rule is FieldRule.MAP:
            for key, entry in item.items():
                if isinstance(inside, Message):
                    to_reference(inside, entry, target[key])
                else:
                    target[key] = entry
        elif field.rule is FieldRule.REPEATED and isinstance(inside, Message):
            for element in item:
                to_reference(inside, element, target.add())
        elif field.rule is FieldRule.REPEATED:
            target.extend(item)
        elif isinstance(inside, Message):
            target.SetInParent()
            to_reference(inside, item, target)
        else:
            setattr(message, name, item)
    return message


def from_reference(table: Message, message: Any) -> dict[str, Any]:
    """Return the content of the reference client's message in the form of this package's reader."""
    value: dict[str, Any] = {}
    for field in table.fields:
        found = getattr(message, field.name)
        inside = field.kind.by_name["value"].kind if field.rule is FieldRule.MAP else field.kind
        if field.rule is FieldRule.MAP:
            found = {key: _plain(inside, found[key]) for key in found}
        elif field.rule is FieldRule.REPEATED:
            found = [_plain(inside, element) for element in found]
        elif field.rule is FieldRule.PRESENT:
            found = _plain(inside, found) if message.HasField(field.name) else None
        if found or (field.rule is FieldRule.PRESENT and found is not None):
            value[field.name] = found
    return value


def _plain(kind: Any, value: Any) -> Any:
    return from_reference(kind, value) if isinstance(kind, Message) else value


def parsed(table: Message, data: bytes) -> Any:
    message = getattr(pb, table.name)()
    message.ParseFromString(data)
    return message


# ------------------------------------------------------------------------------------------ the message layer


def check_both_ways(table: Message, value: dict[str, Any]) -> None:
    expected = comparable(value)
    reference = to_reference(table, value)
    ours = write_message(table, value)
    joined = ours.join()
    assert len(joined) == ours.size
    assert comparable(from_reference(table, parsed(table, joined))) == expected
    assert comparable(read_message(table, joined)) == expected
    assert comparable(read_message(table, reference.SerializeToString())) == expected


@pytest.mark.parametrize("table", MESSAGES, ids=lambda table: table.name)
def test_random_messages_of_every_kind(table: Message) -> None:
    rng = random.Random(zlib.crc32(table.name.encode()))
    for _ in range(20_000):
        check_both_ways(table, random_message(rng, table))


@pytest.mark.parametrize("table", MESSAGES, ids=lambda table: table.name)
def test_damaged_bytes_mean_the_same_or_are_refused_by_both(table: Message) -> None:
    rng = random.Random(zlib.crc32(table.name.encode()) + 1)
    seeds = [write_message(table, random_message(rng, table)).join() for _ in range(200)]
    rounds = 20_000 if table in TOP_LEVEL else 2_000
    accepted = 0
    for _ in range(rounds):
        data = mutated(rng, rng.choice(seeds), seeds)
        ours = outcome(read_message, table, data)
        message = outcome(parsed, table, data)
        if laxer_than_the_format(ours, message) or keeps_entries_as_unknown(table, message):
            continue
        theirs = message if isinstance(message, Exception) else from_reference(table, message)
        assert isinstance(ours, Exception) == isinstance(theirs, Exception), (data.hex(), ours, theirs)
        if not isinstance(ours, Exception):
            accepted += 1
            assert comparable(ours) == comparable(theirs), data.hex()
    assert rounds // 10 < accepted < rounds * 9 // 10  # both outcomes occur often


def outcome(call: Callable[[Message, bytes], Any], table: Message, data: bytes) -> Any:
    try:
        return call(table, data)
    except (DecodeError, WireError) as error:
        return error


def laxer_than_the_format(ours: Any, theirs: Any) -> bool:
    """Return True if only this package refuses a field number 0.

    The reference accepts it in unknown groups, though the format forbids it.
    """
    refused = isinstance(ours, WireError) and "0 is not a field number" in str(ours)
    return refused and not isinstance(theirs, Exception)


def keeps_entries_as_unknown(table: Message, message: Any) -> bool:
    """Return True if the reference has kept a map entry as an unknown field.

    It does so if the entry has an unknown field. This package skips only that field.
    """
    if isinstance(message, Exception):
        return False
    aside = {(field.number, 2) for field in table.fields if field.rule is FieldRule.MAP}
    if any((field.field_number, field.wire_type) in aside for field in UnknownFieldSet(message)):
        return True
    for field in table.fields:
        kind = field.kind.by_name["value"].kind if field.rule is FieldRule.MAP else field.kind
        if isinstance(kind, Message):
            found = getattr(message, field.name)
            inner = found.values() if field.rule is FieldRule.MAP else found
            inner = inner if field.rule in (FieldRule.MAP, FieldRule.REPEATED) else [inner]
            if any(keeps_entries_as_unknown(kind, one) for one in inner):
                return True
    return False


@pytest.mark.parametrize("table", TOP_LEVEL, ids=lambda table: table.name)
@settings(max_examples=120)
@given(first=st.data(), second=st.data())
def test_messages_one_behind_the_other_are_merged_alike(
    table: Message, first: st.DataObject, second: st.DataObject
) -> None:
    both = b"".join(write_message(table, part.draw(messages(table))).join() for part in (first, second))
    assert comparable(read_message(table, both)) == comparable(from_reference(table, parsed(table, both)))


# ------------------------------------------------------------------------------------------ the golden files


def test_the_golden_files_are_what_the_reference_writes() -> None:
    made = golden_messages()
    assert {path.stem for path in GOLDEN.glob("*.hex")} == set(made)
    for name, message in made.items():
        assert (GOLDEN / f"{name}.hex").read_text() == golden_hex(message)
        assert (GOLDEN / f"{name}.json").read_text(encoding="utf-8") == golden_json(message)
