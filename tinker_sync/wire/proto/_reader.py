"""The reader: converts the bytes of a message into dicts keyed by field name, with the help of the tables.

A dict contains the fields that are present: a field with presence if it was set, any other field if it
differs from its default, a list or a map if it is not empty. So two messages have the same meaning exactly
when their dicts are equal. `bytes` fields are views of the received buffer; the caller copies them if
necessary.

Guarantees: the reader stays within the given bytes, checks each announced length before it uses it, needs
time and memory in proportion to the input, and raises `WireError` for all damage. It follows proto3: unknown
fields are skipped, the last of several singular values counts, repeated submessages are merged, packed and
unpacked lists are accepted, enums are open, text must be UTF-8. Any thread may use this module.
"""

from __future__ import annotations

from typing import Any

from tinker_sync.wire.proto._fields import (
    BOOL,
    BYTES,
    LENGTH,
    STRING,
    VARINT,
    Field,
    FieldFault,
    FieldRule,
    Message,
    name_entry,
    read_length,
    read_tag,
    skip,
    undecodable,
)

Plain = dict[str, Any]
Readable = bytes | bytearray | memoryview

_MOST_NOTED = 100


def read_message(table: Message, data: Readable, unknown: set[str] | None = None) -> Plain:
    """Read a message into a dict.

    Args:
        table: the table of the message.
        data: the bytes of the message.
        unknown: a set, to which the names of unknown fields are added, such as `Datum.17`; at most a hundred.

    Raises:
        WireError: the bytes are not such a message; `path` names the field.

    >>> from tinker_sync.wire.proto.tables import LOSS_CONFIG_VALUE
    >>> read_message(LOSS_CONFIG_VALUE, bytes.fromhex("120568656c6c6f"))
    {'text': 'hello'}
    """
    view = memoryview(data).cast("B")
    message: Plain = {}
    try:
        _read(table, view, 0, len(view), message, unknown)
    except FieldFault as fault:
        raise undecodable(table.name, fault) from None
    return message


def _read(  # noqa: C901  # one loop over bytes; calls would double its cost
    table: Message, view: memoryview, at: int, end: int, into: Plain, unknown: set[str] | None
) -> None:
    """Read the fields between `at` and `end`, and merge them into a dict that may already have fields."""
    field = None
    by_tag = table.by_tag
    try:
        while at < end:
            field = None
            tag = view[at]
            if 8 <= tag < 0x80:
                at += 1
            else:
                tag, at = read_tag(view, at, end)
            field = by_tag.get(tag)
            if field is None:
                at = skip(view, at, end, tag)
                if unknown is not None and len(unknown) < _MOST_NOTED:
                    unknown.add(f"{table.name}.{tag >> 3}")
            elif (kind := field.kind) is BYTES or kind is STRING or isinstance(kind, Message):
                size = view[at] if at < end else 0x80
                if size < 0x80 and size < end - at:  # a length of one byte, and all its bytes are present
                    start, at = at + 1, at + 1 + size
                else:
                    start, at = read_length(view, at, end)
                if isinstance(kind, Message):
                    _read_submessage(field, kind, view, start, at, into, unknown)
                else:
                    part = view[start:at]
                    _keep(field, part if kind is BYTES else str(part, "utf-8"), into)
            elif field.rule is FieldRule.REPEATED:
                at = _read_list(field, view, at, end, tag, into)
            elif kind.wire == VARINT and kind is not BOOL and at < end and view[at] < 0x80:
                _keep(field, view[at], into)
                at += 1
            else:
                value, at = kind.read(view, at, end)
                _keep(field, value, into)
    except FieldFault as fault:
        if field is not None:
            fault.under(_segment(field, into))
        raise
    except UnicodeDecodeError as error:
        assert field is not None  # noqa: S101  # only a text of this message raises it
        not_text = FieldFault(f"the text is not UTF-8 at byte {error.start}")
        raise not_text.under(_segment(field, into)) from None


def _segment(field: Field, into: Plain) -> str:
    if field.rule is FieldRule.REPEATED:
        return f"{field.name}[{len(into.get(field.name, ()))}]"
    return field.name


def _keep(field: Field, value: Any, into: Plain) -> None:
    if field.rule is FieldRule.REPEATED:
        into.setdefault(field.name, []).append(value)
    elif value or field.rule is FieldRule.PRESENT:
        into[field.name] = value
        for rival in field.rivals:
            into.pop(rival, None)
    else:
        into.pop(field.name, None)  # the last value counts, and it is the default


def _read_list(field: Field, view: memoryview, at: int, end: int, tag: int, into: Plain) -> int:
    read = field.kind.read  # type: ignore[union-attr]  # _read_submessage reads lists of messages
    if not (field.packed and tag & 7 == LENGTH):
        value, at = read(view, at, end)
        into.setdefault(field.name, []).append(value)
        return at
    at, stop = read_length(view, at, end)
    if at < stop:
        values = into.setdefault(field.name, [])
        while at < stop:
            value, at = read(view, at, stop)
            values.append(value)
    return stop


def _read_submessage(
    field: Field, table: Message, view: memoryview, at: int, end: int, into: Plain, unknown: set[str] | None
) -> None:
    if field.rule is FieldRule.REPEATED:
        child: Plain = {}
        _read(table, view, at, end, child, unknown)
        into.setdefault(field.name, []).append(child)
    elif field.rule is FieldRule.MAP:
        _read_entry(field, table, view, at, end, into, unknown)
    else:
        child = into.get(field.name, {})
        _read(table, view, at, end, child, unknown)
        _keep(field, child, into)


def _read_entry(
    field: Field, table: Message, view: memoryview, at: int, end: int, into: Plain, unknown: set[str] | None
) -> None:
    """Read the entry of a map. An absent key or value has its default; the last entry of a key counts."""
    read: Plain = {}
    try:
        _read(table, view, at, end, read, unknown)
    except FieldFault as fault:
        # The path names the map and the key, not the entry's own fields.
        fault.path = fault.path.removeprefix("value").removeprefix("key").removeprefix(".")
        fault.under(name_entry("", read.get("key", "")))
        raise
    kind = table.by_name["value"].kind
    default = {} if isinstance(kind, Message) else kind.default
    into.setdefault(field.name, {})[read.get("key", "")] = read.get("value", default)
