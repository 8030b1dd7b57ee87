"""The classes of the field tables: a `Message` holds `Field`s, a `Field` its kind and its rule.

Tables are immutable data, which the reader and the writer walk. Any thread may use them.
"""

from __future__ import annotations

import enum

import attrs

from tinker_sync.wire.proto._scalars import STRING, Scalar
from tinker_sync.wire.proto._varint import LENGTH, varint


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
    """One row of a table."""

    number: int
    name: str
    kind: Scalar | Message
    rule: FieldRule
    rivals: tuple[str, ...] = ()
    """The other members of its oneof; setting one clears them."""
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
    """A table: the fields of one message, by name and by each tag that a sender may use.

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
    """Return a proto3 field without presence."""
    return Field(number, name, kind, FieldRule.PLAIN)


def present(number: int, name: str, kind: Scalar | Message) -> Field:
    """Return an `optional` scalar field or a submessage field."""
    return Field(number, name, kind, FieldRule.PRESENT)


def repeated(number: int, name: str, kind: Scalar | Message) -> Field:
    """Return a repeated field."""
    return Field(number, name, kind, FieldRule.REPEATED)


def mapping(number: int, name: str, kind: Scalar | Message) -> Field:
    """Return a map from text; on the wire it is a list of messages with 1 the key, 2 the value."""
    entry = Message(f"{name} entry", plain(1, "key", STRING), present(2, "value", kind))
    return Field(number, name, entry, FieldRule.MAP)


def oneof(*members: Field) -> tuple[Field, ...]:
    """Return fields of which at most one may be set."""
    names = [member.name for member in members]
    return tuple(
        attrs.evolve(member, rivals=tuple(name for name in names if name != member.name))
        for member in members
    )
