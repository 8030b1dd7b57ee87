"""The codec of any message: its table of fields, the writer, and the reader.

- A `Message` has `Field`s, and each `Field` has a kind and a rule. `tables` has the messages of the protocol.
- The writer converts a dict to bytes, in pieces, so that large payloads are not copied. Numbers out of range
  are refused.
- The reader converts bytes to a dict of the fields that are present: a field with presence if it was set, any
  other one if it differs from its default. So two messages have the same meaning exactly when their dicts are
  equal. `bytes` fields are views of the received buffer; the caller copies them if necessary.

The reader stays within the given bytes, checks each announced length before it uses it, needs time and memory
in proportion to the input, and raises `WireError` for all damage. It follows proto3: unknown fields are
skipped, the last of several singular values counts, repeated submessages are merged, packed and unpacked
lists are accepted, enums are open, text must be UTF-8.

A `FieldFault` has a path that grows while the exception propagates, so that valid messages cost nothing. The
outermost function converts the fault to the public error. Tables are immutable, and any thread may use this
module; a `Buffers` belongs to one thread while it grows.
"""

from __future__ import annotations

import enum
import operator
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import attrs

from tinker_sync.errors import InvalidInputError, WireError

_LONGEST_KEY = 60
"""The longest map key in a path; keys can be as long as the message."""


def name_entry(name: str, key: object) -> str:
    """Return the path segment of a map entry.

    >>> name_entry("fields", "logprobs")
    "fields['logprobs']"
    """
    shown = key if not isinstance(key, str) or len(key) <= _LONGEST_KEY else f"{key[:_LONGEST_KEY]}…"
    return f"{name}[{shown!r}]"


class FieldFault(Exception):
    """The error for a value or bytes that do not fit a field.

    Public functions convert it to the error that `undecodable` or `unencodable` returns.
    """

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path

    def under(self, segment: str) -> FieldFault:
        """Prepend a segment to the path of the fault, and return the fault."""
        dot = "." if self.path and not self.path.startswith("[") else ""
        self.path = f"{segment}{dot}{self.path}"
        return self


@contextmanager
def translate_refusals(segment: str) -> Iterator[None]:
    """Convert an `InvalidInputError` of the block to a `FieldFault`, and put the segment before its path.

    A `FieldFault` of the block gets the segment too.
    """
    try:
        yield
    except FieldFault as fault:
        raise fault.under(segment) from None
    except InvalidInputError as error:
        raise FieldFault(str(error), segment) from None


def undecodable(message: str, error: FieldFault | InvalidInputError) -> WireError:
    """Return the public error for a received message.

    `error` is the fault of a field, or the error that the class of the decoded message has raised.
    """
    if isinstance(error, FieldFault):
        return WireError(f"cannot decode {message}: {error.reason}", path=error.path or "$")
    return WireError(f"cannot decode {message}: {error}", path="$")


def unencodable(message: str, fault: FieldFault) -> InvalidInputError:
    """Return the public error for a user's value that does not fit a field of a message."""
    return InvalidInputError(f"{fault.path or message}: {fault.reason}")


VARINT, FIXED64, LENGTH, GROUP_START, GROUP_END, FIXED32 = range(6)
"""The wire types, the low three bits of a tag."""

_ONE_BYTE = tuple(bytes((n,)) for n in range(0x80))
_MASK64 = 0xFFFF_FFFF_FFFF_FFFF

GROUP_DEPTH = 100
"""The deepest nesting of unknown groups, as in other protobuf implementations."""


def varint(number: int) -> bytes:
    """Encode a number as a varint; a negative one as its 64-bit two's complement, in ten bytes.

    >>> varint(300).hex(), varint(-1).hex()
    ('ac02', 'ffffffffffffffffff01')
    """
    if 0 <= number < 0x80:
        return _ONE_BYTE[number]
    if 0 <= number < 0x4000:  # most lengths: the arrays of a datum have some kilobytes
        return bytes((number & 0x7F | 0x80, number >> 7))
    number &= _MASK64
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def read_varint(view: memoryview, at: int, end: int) -> tuple[int, int]:
    """Return the unsigned 64-bit number at `at`, and the position after it.

    >>> read_varint(memoryview(b"\\xac\\x02"), 0, 2)
    (300, 2)
    """
    number = shift = 0
    while at < end:
        byte = view[at]
        at += 1
        if byte < 0x80:
            # The tenth byte can exceed 64 bits; readers drop the rest.
            return number | byte << shift if shift < 63 else (number | byte << shift) & _MASK64, at
        number |= (byte & 0x7F) << shift
        shift += 7
        if shift == 70:
            raise FieldFault("a varint is longer than 10 bytes")
    raise FieldFault("a varint does not end")


def read_tag(view: memoryview, at: int, end: int) -> tuple[int, int]:
    """Return the tag (field number and wire type) at `at`, and the position after it."""
    tag, at = read_varint(view, at, end)
    if not 8 <= tag <= 0xFFFF_FFFF:
        raise FieldFault(f"{tag >> 3} is not a field number")
    return tag, at


def read_length(view: memoryview, at: int, end: int) -> tuple[int, int]:
    """Read the length at `at`. Return the start and the end of the bytes that it announces.

    Raises:
        FieldFault: some of these bytes are missing.
    """
    length = view[at] if at < end else 0x80
    if length < 0x80:
        at += 1
    elif at + 1 < end and view[at + 1] < 0x80:  # most lengths: the arrays of an answer have some kilobytes
        length, at = length & 0x7F | view[at + 1] << 7, at + 2
    else:
        length, at = read_varint(view, at, end)
    if length > end - at:
        raise FieldFault(f"{length} bytes announced, {end - at} present")
    return at, at + length


def skip(view: memoryview, at: int, end: int, tag: int) -> int:
    """Return the position after an unknown field whose tag ends at `at`. A group is skipped as a whole."""
    open_groups: list[int] = []
    while True:
        wire = tag & 7
        if wire == GROUP_START:
            open_groups.append(tag >> 3)
            if len(open_groups) > GROUP_DEPTH:
                raise FieldFault(f"groups nest deeper than {GROUP_DEPTH}")
        elif wire == GROUP_END:
            if not open_groups or open_groups.pop() != tag >> 3:
                raise FieldFault("a group ends that did not begin")
        else:
            at = _skip_value(view, at, end, wire)
        if not open_groups:
            return at
        if at >= end:
            raise FieldFault("a group does not end")
        tag, at = read_tag(view, at, end)


def _skip_value(view: memoryview, at: int, end: int, wire: int) -> int:
    if wire == VARINT:
        return read_varint(view, at, end)[1]
    if wire == LENGTH:
        return read_length(view, at, end)[1]
    if wire not in (FIXED64, FIXED32):
        raise FieldFault(f"{wire} is not a wire type")
    size = 8 if wire == FIXED64 else 4
    if size > end - at:
        raise FieldFault(f"a fixed {size}-byte value ends after {end - at}")
    return at + size


Reader = Callable[[memoryview, int, int], "tuple[Any, int]"]


@attrs.frozen(eq=False)
class Scalar:
    """A scalar kind of protobuf, such as int32, with its reader and its writer. Immutable."""

    name: str
    wire: int
    read: Reader = attrs.field(repr=False)
    """Return a value and the position behind it; for text and bytes, the bounds of the value."""
    write: Callable[[Any], bytes] = attrs.field(repr=False)
    default: Any


# --------------------------------------------------------------------------------------------- whole numbers


def _make_integer(name: str, bits: int, signed: bool) -> Scalar:
    """Return the kind of whole numbers that are sent as varints.

    The reader keeps the low bits, as protobuf readers do; the writer refuses numbers that do not fit.
    """
    mask, half = (1 << bits) - 1, 1 << (bits - 1)
    low, high = (-half, half - 1) if signed else (0, mask)

    def read(view: memoryview, at: int, end: int) -> tuple[int, int]:
        if at < end and view[at] < 0x80:
            return view[at], at + 1
        number, at = read_varint(view, at, end)
        number &= mask
        return (number - mask - 1 if signed and number >= half else number), at

    def write(value: Any) -> bytes:
        try:
            number = operator.index(value)
        except TypeError:
            raise FieldFault(f"expected a whole number, got {type(value).__name__}") from None
        if not low <= number <= high:
            raise FieldFault(f"{number} does not fit {name}")
        return varint(number)

    return Scalar(name, VARINT, read, write, 0)


def _read_bool(view: memoryview, at: int, end: int) -> tuple[bool, int]:
    number, at = read_varint(view, at, end)
    return number != 0, at


def _write_bool(value: Any) -> bytes:
    if value is True or value is False:
        return b"\x01" if value else b"\x00"
    raise FieldFault(f"expected true or false, got {type(value).__name__}")


INT32 = _make_integer("int32", 32, signed=True)
INT64 = _make_integer("int64", 64, signed=True)
UINT32 = _make_integer("uint32", 32, signed=False)
UINT64 = _make_integer("uint64", 64, signed=False)
ENUM = _make_integer("enum", 32, signed=True)
"""Enums are open: numbers without a name are kept."""
BOOL = Scalar("bool", VARINT, _read_bool, _write_bool, False)


# ---------------------------------------------------------------------------------------------- real numbers


def _make_real(name: str, wire: int, layout: str) -> Scalar:
    codec = struct.Struct(layout)

    def read(view: memoryview, at: int, end: int) -> tuple[float, int]:
        if codec.size > end - at:
            raise FieldFault(f"a {name} ends after {end - at} bytes")
        return codec.unpack_from(view, at)[0], at + codec.size

    def write(value: Any) -> bytes:
        try:
            return codec.pack(value)
        except struct.error:
            raise FieldFault(f"expected a number, got {type(value).__name__}") from None
        except OverflowError:
            raise FieldFault(f"{value} does not fit {name}") from None

    return Scalar(name, wire, read, write, 0.0)


DOUBLE = _make_real("double", FIXED64, "<d")
FLOAT = _make_real("float", FIXED32, "<f")


# -------------------------------------------------------------------------------------------- text and bytes


def _write_string(value: Any) -> bytes:
    if not isinstance(value, str):
        raise FieldFault(f"expected text, got {type(value).__name__}")
    try:
        encoded = value.encode()
    except UnicodeEncodeError as error:
        raise FieldFault(f"the text has no UTF-8 form: a lone surrogate at {error.start}") from None
    return varint(len(encoded)) + encoded


def _refuse_non_bytes(value: Any) -> bytes:
    """Raise a fault for a value that is not bytes. The writer adds bytes to the message without this call."""
    raise FieldFault(f"expected bytes, got {type(value).__name__}")


STRING = Scalar("string", LENGTH, read_length, _write_string, "")
BYTES = Scalar("bytes", LENGTH, read_length, _refuse_non_bytes, b"")


class FieldRule(enum.Enum):
    """The cardinality of a field, and whether its presence is tracked."""

    PLAIN = "plain"
    """Once; absence equals the default value."""
    PRESENT = "present"
    """Once, with visible presence: `optional`, members of a oneof, submessages."""
    REPEATED = "repeated"
    MAP = "map"
    """Entries with a text key; a dict in the plain form."""


# Until Python 3.12, to read a member from its class takes longer than to call a function.
_PLAIN, _PRESENT, _REPEATED, _MAP = FieldRule


@attrs.frozen(eq=False)
class Field:
    """A field of a message: its number, its name, its kind and its rule."""

    number: int
    name: str
    kind: Scalar | Message
    rule: FieldRule
    rivals: tuple[str, ...] = ()
    """The other members of its oneof. A reader that sets this field clears them."""
    tag: bytes = attrs.field(init=False, repr=False)

    @tag.default
    def _tag(self) -> bytes:
        return varint(self.number << 3 | self.written_wire)

    @property
    def message(self) -> Message:
        """The table of a message field, or of a map's entries."""
        assert isinstance(self.kind, Message)  # noqa: S101 -- the caller knows its table
        return self.kind

    @property
    def packed(self) -> bool:
        """True if the field is written as one run of numbers; readers also accept the unpacked form."""
        return self.rule is _REPEATED and isinstance(self.kind, Scalar) and self.kind.wire != LENGTH

    @property
    def written_wire(self) -> int:
        """The wire type of the written tag."""
        if self.packed or isinstance(self.kind, Message):
            return LENGTH
        return self.kind.wire


@attrs.frozen(eq=False, init=False)
class Message:
    """The table of one message: its fields, by name and by each tag that a sender may use.

    >>> Message("Pair", plain(1, "name", STRING)).by_tag[0x0A].name
    'name'
    """

    name: str
    fields: tuple[Field, ...]
    by_name: dict[str, Field] = attrs.field(repr=False)
    by_tag: dict[int, Field] = attrs.field(repr=False)
    """Tags as numbers. A known field number with another wire type is an unknown field."""

    def __init__(self, name: str, *fields: Field) -> None:
        by_tag = {field.number << 3 | field.written_wire: field for field in fields}
        for field in fields:
            if field.packed and isinstance(field.kind, Scalar):
                by_tag[field.number << 3 | field.kind.wire] = field
        by_name = {field.name: field for field in fields}
        # attrs provides this method to assign frozen fields in a class without a generated __init__.
        self.__attrs_init__(name, fields, by_name, by_tag)


def plain(number: int, name: str, kind: Scalar) -> Field:
    """Return a singular scalar field without presence: its absence means the default value."""
    return Field(number, name, kind, _PLAIN)


def present(number: int, name: str, kind: Scalar | Message) -> Field:
    """Return a singular field with presence: an `optional` scalar or a submessage."""
    return Field(number, name, kind, _PRESENT)


def repeated(number: int, name: str, kind: Scalar | Message) -> Field:
    """Return a field for a list of values."""
    return Field(number, name, kind, _REPEATED)


def mapping(number: int, name: str, kind: Scalar | Message) -> Field:
    """Return a field that maps text to values.

    On the wire it is a list of messages, in which field 1 is the key and field 2 the value.
    """
    entry = Message(f"{name} entry", plain(1, "key", STRING), present(2, "value", kind))
    return Field(number, name, entry, _MAP)


def oneof(*members: Field) -> tuple[Field, ...]:
    """Return the fields of a oneof: at most one of them may be set."""
    names = [member.name for member in members]
    return tuple(
        attrs.evolve(member, rivals=tuple(name for name in names if name != member.name))
        for member in members
    )


# ------------------------------------------------------------------------------------------------- writing

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
    _PLAIN: _write_plain_field,
    _PRESENT: _write_one,
    _REPEATED: _write_list,
    _MAP: _write_map,
}


# ------------------------------------------------------------------------------------------------- reading

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
            elif field.rule is _REPEATED:
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
    if field.rule is _REPEATED:
        return f"{field.name}[{len(into.get(field.name, ()))}]"
    return field.name


def _keep(field: Field, value: Any, into: Plain) -> None:
    if field.rule is _REPEATED:
        into.setdefault(field.name, []).append(value)
    elif value or field.rule is _PRESENT:
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
    if field.rule is _REPEATED:
        child: Plain = {}
        _read(table, view, at, end, child, unknown)
        into.setdefault(field.name, []).append(child)
    elif field.rule is _MAP:
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
