"""How a table says what a message is made of: `Message` holds `Field`s, a `Field` its kind and its rule.

Tables are data; the reader and the writer walk them. Immutable once made, any thread may use them.
"""

from __future__ import annotations

import enum

import attrs

from tinker_sync.wire.proto._scalars import STRING, Scalar
from tinker_sync.wire.proto._varint import LENGTH, varint


class Rule(enum.Enum):
    """How often a field may be there, and whether its absence can be seen."""

    PLAIN = "plain"
    """Once; a default value and an absent one are the same."""
    PRESENT = "present"
    """Once, and seen when there: `optional`, members of a oneof, submessages."""
    REPEATED = "repeated"
    MAP = "map"
    """Entries with a text key; in the plain form a dict."""


@attrs.frozen(eq=False)
class Field:
    """One row of a table."""

    number: int
    name: str
    kind: Scalar | Message
    rule: Rule
    rivals: tuple[str, ...] = ()
    """The other members of its oneof; setting one clears them."""
    tag: bytes = attrs.field(init=False, repr=False)

    @tag.default
    def _tag(self) -> bytes:
        return varint(self.number << 3 | self.written_wire)

    @property
    def message(self) -> Message:
        """The table of a field that holds messages; for a map that of its entries."""
        assert isinstance(self.kind, Message)  # noqa: S101 -- the caller knows its table
        return self.kind

    @property
    def packed(self) -> bool:
        """Written as one run of numbers; readers take the loose form too."""
        return self.rule is Rule.REPEATED and isinstance(self.kind, Scalar) and self.kind.wire != LENGTH

    @property
    def written_wire(self) -> int:
        """The wire type of the tag that we write."""
        if self.packed or isinstance(self.kind, Message):
            return LENGTH
        return self.kind.wire


@attrs.frozen(eq=False, init=False)
class Message:
    """A table: the fields of one message, by name and by each tag a sender may use.

    >>> Message("Pair", plain(1, "name", STRING)).by_tag[0x0A].name
    'name'
    """

    name: str
    fields: tuple[Field, ...]
    by_name: dict[str, Field] = attrs.field(repr=False)
    by_tag: dict[int, Field] = attrs.field(repr=False)
    """Tags as whole numbers. A known field number with any other wire type is an unknown field."""

    def __init__(self, name: str, *fields: Field) -> None:
        by_tag = {field.number << 3 | field.written_wire: field for field in fields}
        for field in fields:
            if field.packed and isinstance(field.kind, Scalar):
                by_tag[field.number << 3 | field.kind.wire] = field
        by_name = {field.name: field for field in fields}
        # attrs gives a class without a generated __init__ this one to assign the frozen fields with.
        self.__attrs_init__(name, fields, by_name, by_tag)


def plain(number: int, name: str, kind: Scalar) -> Field:
    """A proto3 field without presence."""
    return Field(number, name, kind, Rule.PLAIN)


def present(number: int, name: str, kind: Scalar | Message) -> Field:
    """An `optional` scalar or a submessage."""
    return Field(number, name, kind, Rule.PRESENT)


def repeated(number: int, name: str, kind: Scalar | Message) -> Field:
    """A list."""
    return Field(number, name, kind, Rule.REPEATED)


def mapping(number: int, name: str, kind: Scalar | Message) -> Field:
    """A map from text; on the wire a list of small messages, 1 the key, 2 the value."""
    entry = Message(f"{name} entry", plain(1, "key", STRING), present(2, "value", kind))
    return Field(number, name, entry, Rule.MAP)


def oneof(*members: Field) -> tuple[Field, ...]:
    """Fields of which at most one is there."""
    names = [member.name for member in members]
    return tuple(
        attrs.evolve(member, rivals=tuple(name for name in names if name != member.name))
        for member in members
    )
