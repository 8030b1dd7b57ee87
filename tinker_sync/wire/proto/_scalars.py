"""The scalar kinds of proto3, each a pair of pure functions.

A `read` takes a flat view of bytes, a position and an end, and returns the value and the position behind it.
A `write` returns the bytes that follow the tag. Neither knows about fields. Any thread may use this.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable
from typing import Any

import attrs

from tinker_sync.wire.proto._fault import FieldFault
from tinker_sync.wire.proto._varint import (
    FIXED32,
    FIXED64,
    LENGTH,
    VARINT,
    read_length,
    read_varint,
    varint,
)

Reader = Callable[[memoryview, int, int], "tuple[Any, int]"]


@attrs.frozen(eq=False)
class Scalar:
    """One scalar kind. Immutable."""

    name: str
    wire: int
    read: Reader = attrs.field(repr=False)
    write: Callable[[Any], bytes] = attrs.field(repr=False)
    default: Any


# --------------------------------------------------------------------------------------------- whole numbers


def _make_integer(name: str, bits: int, signed: bool) -> Scalar:
    """Make a varint kind. The reader keeps the low bits, as protobuf readers do; the writer refuses more."""
    mask, half = (1 << bits) - 1, 1 << (bits - 1)
    low, high = (-half, half - 1) if signed else (0, mask)

    def read(view: memoryview, at: int, end: int) -> tuple[int, int]:
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


def _read_string(view: memoryview, at: int, end: int) -> tuple[str, int]:
    start, stop = read_length(view, at, end)
    try:
        return str(view[start:stop], "utf-8"), stop
    except UnicodeDecodeError as error:
        raise FieldFault(f"the text is not UTF-8 at byte {error.start}") from None


def _write_string(value: Any) -> bytes:
    if not isinstance(value, str):
        raise FieldFault(f"expected text, got {type(value).__name__}")
    try:
        encoded = value.encode()
    except UnicodeEncodeError as error:
        raise FieldFault(f"the text has no UTF-8 form: a lone surrogate at {error.start}") from None
    return varint(len(encoded)) + encoded


def _read_bytes(view: memoryview, at: int, end: int) -> tuple[memoryview, int]:
    start, stop = read_length(view, at, end)
    return view[start:stop], stop


def _refuse_non_bytes(value: Any) -> bytes:
    """Refuse a value; the writer takes bytes as pieces of the message and calls this for other types."""
    raise FieldFault(f"expected bytes, got {type(value).__name__}")


STRING = Scalar("string", LENGTH, _read_string, _write_string, "")
BYTES = Scalar("bytes", LENGTH, _read_bytes, _refuse_non_bytes, b"")
