"""Plain values to bytes: the reverse of the reader, as a list of pieces so that big payloads are not copied.

Guarantees: what is written is read back as the same dict; numbers are never cut to fit; the only exception
is `InvalidInputError`. Any thread may use this; one `Buffers` belongs to one thread while it grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tinker_sync.wire.proto._fault import Fault, encoding, entry
from tinker_sync.wire.proto._fields import Field, Message, Rule
from tinker_sync.wire.proto._scalars import BYTES, Scalar
from tinker_sync.wire.proto._varint import varint

Piece = bytes | bytearray | memoryview

MAX_SIZE = 0x7FFF_FFFF
"""No protobuf implementation reads a message of 2 GiB or more."""


class Buffers:
    """An encoded message: pieces of bytes in order, and their total size.

    Pieces that are views show the arrays they came from: join or send them before the arrays change. Belongs
    to one thread while it grows.

    >>> parts = Buffers([b"ab", memoryview(b"cd")])
    >>> parts.size, parts.join()
    (4, b'abcd')
    """

    __slots__ = ("pieces", "size")

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self.pieces: list[Piece] = list(pieces)
        self.size = sum(memoryview(piece).nbytes for piece in self.pieces)

    def put(self, before: bytes, payload: memoryview, after: bytes = b"") -> None:
        """Put a payload at the end, and a few bytes around it."""
        self.pieces += (before, payload, after) if after else (before, payload)
        self.size += len(before) + payload.nbytes + len(after)

    def append(self, piece: bytes) -> None:
        """Put a few bytes at the end."""
        self.pieces.append(piece)
        self.size += len(piece)

    def extend(self, other: Buffers) -> None:
        """Put another message's pieces at the end."""
        self.pieces += other.pieces
        self.size += other.size

    def join(self) -> bytes:
        """One bytes object of it all; the only copy that is made."""
        return b"".join(self.pieces)

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.pieces)

    def __repr__(self) -> str:
        return f"<Buffers of {self.size} bytes in {len(self.pieces)} pieces>"


def write_message(table: Message, value: Mapping[str, Any]) -> Buffers:
    """The message as buffers.

    Args:
        table: which message.
        value: a dict as the reader makes it. None stands for absent; a `bytes` field and a submessage may
            also be a `Buffers`, whose pieces are then taken over.

    Raises:
        InvalidInputError: something does not fit its field; the text names the path.

    >>> from tinker_sync.wire.proto.tables import LOSS_CONFIG_VALUE
    >>> write_message(LOSS_CONFIG_VALUE, {"text": "hello"}).join().hex()
    '120568656c6c6f'
    """
    with encoding(table.name):
        out = write_plain(table, value)
        check_size(out.size)
    return out


def check_size(size: int) -> None:
    """Refuse a message nobody could read."""
    if size > MAX_SIZE:
        raise Fault(f"the message has {size} bytes; at most {MAX_SIZE} can be sent")


def write_plain(table: Message, value: Mapping[str, Any]) -> Buffers:
    """As `write_message`, for callers inside the package: raises `Fault`."""
    if not value.keys() <= table.by_name.keys():
        unknown = ", ".join(sorted(map(repr, value.keys() - table.by_name.keys())))
        raise Fault(f"{table.name} has no field {unknown}")
    out = Buffers()
    for field in table.fields:
        given = value.get(field.name)
        if given is None:
            continue
        if any(value.get(rival) is not None for rival in field.rivals):
            raise Fault(f"only one of {', '.join((field.name, *field.rivals))} can be set")
        try:
            _WRITERS[field.rule](field, given, out)
        except Fault as fault:
            raise fault.under(field.name) from None
    return out


def _write_one(field: Field, value: Any, out: Buffers) -> None:
    """A field that is there at most once, or one element of a list."""
    kind = field.kind
    if isinstance(value, Buffers):
        out.append(field.tag + varint(value.size))
        out.extend(value)
    elif isinstance(kind, Message):
        if not isinstance(value, Mapping):
            raise Fault(f"expected {kind.name}, got {type(value).__name__}")
        _write_one(field, write_plain(kind, value), out)
    elif kind is BYTES and isinstance(value, (bytes, bytearray, memoryview)):
        _write_one(field, Buffers([value]), out)  # an image is large, too
    else:
        out.append(field.tag + kind.write(value))


def _write_plain_field(field: Field, value: Any, out: Buffers) -> None:
    start = len(out.pieces), out.size
    _write_one(field, value, out)  # checks the value, also where nothing need be written
    if not (value.size if isinstance(value, Buffers) else value):
        del out.pieces[start[0] :]
        out.size = start[1]


def _write_list(field: Field, values: Any, out: Buffers) -> None:
    index = 0
    packed: list[Piece] = []
    try:
        for index, value in enumerate(values):  # noqa: B007 -- used when a value does not fit
            if field.packed and isinstance(field.kind, Scalar):
                packed.append(field.kind.write(value))
            else:
                _write_one(field, value, out)
    except Fault as fault:
        raise fault.under(f"[{index}]") from None
    if packed:
        _write_one(field, Buffers(packed), out)


def _write_map(field: Field, entries: Any, out: Buffers) -> None:
    key = None
    try:
        for key, value in entries.items():
            _write_one(field, _entry(field.kind, key, value), out)
    except Fault as fault:
        raise fault.under(entry("", key)) from None


def _entry(table: Any, key: Any, value: Any) -> Buffers:
    """Key and value are always written, also when they are defaults, as other writers do."""
    out = Buffers()
    _write_one(table.by_name["key"], key, out)
    _write_one(table.by_name["value"], value, out)
    return out


_WRITERS = {
    Rule.PLAIN: _write_plain_field,
    Rule.PRESENT: _write_one,
    Rule.REPEATED: _write_list,
    Rule.MAP: _write_map,
}
