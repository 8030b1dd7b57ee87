"""Readers of the headers of image files and audio tensors: format and size. Pure; they decode no content."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from tinker_sync.errors import InvalidInputError

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_JPEG: Final = b"\xff\xd8\xff"
_JPEG_END: Final = b"\xff\xd9"
_OTHERS: Final = {b"GIF8": "GIF", b"RIFF": "WebP", b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF"}
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""The JPEG segments with the image size; the three excluded markers are tables."""
_BARE: Final = frozenset([0x01, *range(0xD0, 0xD9)])
"""JPEG markers without a length."""
_SCAN: Final = 0xDA


class Picture(NamedTuple):
    """The format and the size that an image's header states."""

    format: Literal["png", "jpeg"]
    width: int
    height: int


def inspect_image(data: bytes, where: str) -> Picture:
    """Read format and size of a complete PNG or JPEG file.

    Args:
        data: the file's bytes.
        where: the name of the data in error messages.

    Raises:
        InvalidInputError: the file is of another format, damaged, truncated or without pixels.
    """
    if data.startswith(_PNG):
        found = _read_png(data)
    elif data.startswith(_JPEG):
        found = _read_jpeg(data)
    else:
        other = next((name for begin, name in _OTHERS.items() if data.startswith(begin)), "something else")
        raise InvalidInputError(f"{where}: expected a PNG or JPEG file, got {other if data else 'nothing'}")
    if found is None:
        raise InvalidInputError(f"{where}: the image file is damaged or cut short")
    if not (found.width and found.height):
        raise InvalidInputError(f"{where}: the image is {found.width} x {found.height} pixels")
    return found


def _read_png(data: bytes) -> Picture | None:
    found: Picture | None = None
    for kind, start, length in _png_chunks(data):
        if found is None:
            if kind != b"IHDR" or length != 13:
                return None
            found = Picture("png", _read_number(data, start, 4), _read_number(data, start + 4, 4))
        if kind == b"IEND":
            return found
    return None


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield the kind of each PNG chunk, and the position and the length of the chunk's data.

    The data of the last chunk may be incomplete, if the file is truncated.
    """
    at = len(_PNG)
    while at + 12 <= len(data):
        length = _read_number(data, at, 4)
        yield data[at + 4 : at + 8], at + 8, length
        at += 12 + length


def _read_jpeg(data: bytes) -> Picture | None:
    found: Picture | None = None
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # padding
            at += 1
            continue
        if marker in _BARE:
            at += 2
            continue
        length = _read_number(data, at + 2, 2)
        if marker in _FRAMES and at + 9 <= len(data):
            found = Picture("jpeg", _read_number(data, at + 7, 2), _read_number(data, at + 5, 2))
        if marker == _SCAN:
            return found if data.find(_JPEG_END, at + 2 + length) >= 0 else None
        at += 2 + max(length, 2)
    return None


def _read_number(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "big")


# ------------------------------------------------------------------------------------------------ audio

_CONSTANT_TENSOR: Final = 254
_LAST_DTYPE: Final = 7
_MAX_VARINT_BITS: Final = 63


def read_container_shape(container: bytes) -> tuple[int, ...]:
    """Return the shape that the header of a serialized tensor states.

    The header has an optional marker, the dtype, the number of dimensions and the size of each dimension.

    Raises:
        InvalidInputError: the header is damaged or cut short, or the tensor has no dimensions.
    """
    octets = iter(container)
    kind = _next_octet(octets)
    if kind == _CONSTANT_TENSOR:
        kind = _next_octet(octets)
    if kind > _LAST_DTYPE:
        raise InvalidInputError(f"DmelChunk.dmel: unknown dtype {kind} in the tensor header")
    dimensions = _next_varint(octets)
    if dimensions == 0:
        raise InvalidInputError("DmelChunk.dmel: the tensor has no dimensions")
    return tuple(_next_varint(octets) for _ in range(dimensions))


def _next_octet(octets: Iterator[int]) -> int:
    octet = next(octets, None)
    if octet is None:
        raise InvalidInputError("DmelChunk.dmel: the tensor header is cut short")
    return octet


def _next_varint(octets: Iterator[int]) -> int:
    value = 0
    for shift in range(0, _MAX_VARINT_BITS + 1, 7):
        octet = _next_octet(octets)
        value |= (octet & 0x7F) << shift
        if octet < 0x80 and value < 2**_MAX_VARINT_BITS:
            return value
    raise InvalidInputError("DmelChunk.dmel: a number in the tensor header is too large")
