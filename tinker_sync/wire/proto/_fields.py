"""The field tables: a `Message` has `Field`s, and each `Field` has a kind and a rule.

Tables are immutable data, which the reader and the writer walk. The module has the parts that both need:

- A `FieldFault` has a path that grows while the exception passes up: each level prepends its part, so valid
  messages cost nothing extra. The outermost function converts the fault to the public error.
- Each reader of a varint, a length or a scalar takes a flat view of bytes, a position and an end, and reads
  nothing beyond the end. A `write` of a scalar returns the bytes that follow the tag.

Any thread may use this module.
"""

from __future__ import annotations

import enum
import operator
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
    """Return the unsigned 64-bit number at `at`, and the position behind it.

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
    """Return the tag (field number and wire type) at `at`, and the position behind it."""
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
    """Return the position behind an unknown field whose tag ends at `at`. A group is skipped as a whole."""
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
    """The number of occurrences of a field, and the meaning of its absence."""

    PLAIN = "plain"
    """Once; absence equals the default value."""
    PRESENT = "present"
    """Once, with visible presence: `optional`, members of a oneof, submessages."""
    REPEATED = "repeated"
    MAP = "map"
    """Entries with a text key; a dict in the plain form."""


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
        return self.rule is FieldRule.REPEATED and isinstance(self.kind, Scalar) and self.kind.wire != LENGTH

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
    return Field(number, name, kind, FieldRule.PLAIN)


def present(number: int, name: str, kind: Scalar | Message) -> Field:
    """Return a singular field with presence: an `optional` scalar or a submessage."""
    return Field(number, name, kind, FieldRule.PRESENT)


def repeated(number: int, name: str, kind: Scalar | Message) -> Field:
    """Return a field for a list of values."""
    return Field(number, name, kind, FieldRule.REPEATED)


def mapping(number: int, name: str, kind: Scalar | Message) -> Field:
    """Return a field that maps text to values.

    On the wire it is a list of messages, in which field 1 is the key and field 2 the value.
    """
    entry = Message(f"{name} entry", plain(1, "key", STRING), present(2, "value", kind))
    return Field(number, name, entry, FieldRule.MAP)


def oneof(*members: Field) -> tuple[Field, ...]:
    """Return the fields of a oneof: at most one of them may be set."""
    names = [member.name for member in members]
    return tuple(
        attrs.evolve(member, rivals=tuple(name for name in names if name != member.name))
        for member in members
    )
