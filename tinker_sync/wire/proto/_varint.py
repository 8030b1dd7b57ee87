"""Varints, lengths and skipping: the arithmetic below the fields.

Each reader takes a flat view of bytes, a position and an end, and reads nothing beyond the end. Any thread
may use this.
"""

from __future__ import annotations

from tinker_sync.wire.proto._fault import FieldFault

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
    """Return the start and the end of the payload announced at `at`; all its bytes are present."""
    length, at = read_varint(view, at, end)
    if length > end - at:
        raise FieldFault(f"{length} bytes announced, {end - at} present")
    return at, at + length


def skip(view: memoryview, at: int, end: int, tag: int) -> int:
    """Return the position behind an unknown field whose tag ends at `at`; skip groups as a whole."""
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
