"""The writer: converts dicts into the bytes of a message, in pieces, so that large payloads are not copied.

Guarantees: the reader gives back a dict of the same meaning; numbers out of range are refused.
Any thread may use this module; a `Buffers` belongs to one thread while it grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from tinker_sync.wire.proto._fields import (
    BYTES,
    Field,
    FieldFault,
    FieldRule,
    Message,
    Scalar,
    name_entry,
    unencodable,
    varint,
)

Piece: TypeAlias = Any
"""Bytes, or a contiguous array of any kind."""

MAX_SIZE = 0x7FFF_FFFF
"""The protobuf limit: implementations refuse messages of 2 GiB or more."""


class Buffers:
    """An encoded message: pieces of bytes in order, and their total size.

    Pieces may be views of arrays: join or send them before the arrays change. A buffer belongs to one thread
    while it grows.

    >>> parts = Buffers([b"ab", memoryview(b"cd")])
    >>> parts.size, parts.join()
    (4, b'abcd')
    """

    __slots__ = ("pieces", "size")

    def __init__(self, pieces: Iterable[Piece] = (), size: int | None = None) -> None:
        self.pieces: list[Piece] = [*pieces]
        self.size = sum([memoryview(piece).nbytes for piece in self.pieces]) if size is None else size

    def enclose(self, tag: bytes, other: Buffers) -> None:
        """Append another message as a field: its tag, its size and its pieces."""
        self.append(tag + varint(other.size))
        self.extend(other)

    def append(self, piece: bytes) -> None:
        self.pieces.append(piece)
        self.size += len(piece)

    def extend(self, other: Buffers) -> None:
        self.pieces += other.pieces
        self.size += other.size

    def join(self) -> bytes:
        """Copy all pieces into one bytes object."""
        return b"".join(self.pieces)

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.pieces)

    def __repr__(self) -> str:
        return f"<Buffers of {self.size} bytes in {len(self.pieces)} pieces>"


def write_message(table: Message, value: Mapping[str, Any]) -> Buffers:
    """Write a message to buffers.

    Args:
        table: the table of the message.
        value: a dict in the form that `read_message` returns. None means absent; a `bytes` field or a
            submessage may also be a `Buffers`, whose pieces the result shares.

    Raises:
        InvalidInputError: a value does not fit its field; the message names the path.

    >>> from tinker_sync.wire.proto.tables import LOSS_CONFIG_VALUE
    >>> write_message(LOSS_CONFIG_VALUE, {"text": "hello"}).join().hex()
    '120568656c6c6f'
    """
    try:
        out = write_plain(table, value)
        check_size(out.size)
    except FieldFault as fault:
        raise unencodable(table.name, fault) from None
    return out


def check_size(size: int) -> None:
    """Raise `FieldFault` for a message that is larger than protobuf allows."""
    if size > MAX_SIZE:
        raise FieldFault(f"the message has {size} bytes; at most {MAX_SIZE} can be sent")


def write_plain(table: Message, value: Mapping[str, Any]) -> Buffers:
    """Write a message like `write_message`, but raise `FieldFault`, and leave `check_size` to the caller.

    For callers within `wire.proto`.
    """
    if not value.keys() <= table.by_name.keys():
        unknown = ", ".join(sorted(map(repr, value.keys() - table.by_name.keys())))
        raise FieldFault(f"{table.name} has no field {unknown}")
    out = Buffers()
    for field in table.fields:
        given = value.get(field.name)
        if given is None:
            continue
        if any(value.get(rival) is not None for rival in field.rivals):
            raise FieldFault(f"only one of {', '.join((field.name, *field.rivals))} can be set")
        try:
            _WRITERS[field.rule](field, given, out)
        except FieldFault as fault:
            raise fault.under(field.name) from None
    return out


def _write_one(field: Field, value: Any, out: Buffers) -> None:
    """Write a singular field or one element of a list."""
    kind = field.kind
    if isinstance(value, Buffers):
        out.enclose(field.tag, value)
    elif isinstance(kind, Message):
        if not isinstance(value, Mapping):
            raise FieldFault(f"expected {kind.name}, got {type(value).__name__}")
        _write_one(field, write_plain(kind, value), out)
    elif kind is BYTES and isinstance(value, (bytes, bytearray, memoryview)):
        _write_one(field, Buffers([value]), out)  # do not copy: images are large
    else:
        out.append(field.tag + kind.write(value))


def _write_plain_field(field: Field, value: Any, out: Buffers) -> None:
    start = len(out.pieces), out.size
    _write_one(field, value, out)  # checks the value even if it is a default and is dropped below
    if not (value.size if isinstance(value, Buffers) else value):
        del out.pieces[start[0] :]
        out.size = start[1]


def _write_list(field: Field, values: Any, out: Buffers) -> None:
    index = 0
    packed: list[Piece] = []
    try:
        for index, value in enumerate(values):  # noqa: B007 -- the except clause uses it
            if field.packed and isinstance(field.kind, Scalar):
                packed.append(field.kind.write(value))
            else:
                _write_one(field, value, out)
    except FieldFault as fault:
        raise fault.under(f"[{index}]") from None
    if packed:
        _write_one(field, Buffers(packed), out)


def _write_map(field: Field, entries: Any, out: Buffers) -> None:
    key = None
    try:
        for key, value in entries.items():
            _write_one(field, _write_entry(field.kind, key, value), out)
    except FieldFault as fault:
        raise fault.under(name_entry("", key)) from None


def _write_entry(table: Any, key: Any, value: Any) -> Buffers:
    """Write one entry of a map. Key and value are written even if they are defaults, as other writers do."""
    out = Buffers()
    _write_one(table.by_name["key"], key, out)
    _write_one(table.by_name["value"], value, out)
    return out


_WRITERS = {
    FieldRule.PLAIN: _write_plain_field,
    FieldRule.PRESENT: _write_one,
    FieldRule.REPEATED: _write_list,
    FieldRule.MAP: _write_map,
}
