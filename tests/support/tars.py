"""Tar archives made byte by byte, so that they can be invalid or hostile."""

from __future__ import annotations

import gzip
from pathlib import Path

END = b"\0" * 1024


def member(
    name: bytes | str,
    content: bytes = b"",
    *,
    kind: bytes = b"0",
    link: bytes | str = b"",
    size: int | None = None,
    prefix: bytes = b"",
    magic: bytes = b"ustar\x0000",
    checksum: int | None = None,
    raw_size: bytes | None = None,
) -> bytes:
    """Return the bytes of an entry: header, content and padding."""
    name, link = _bytes(name), _bytes(link)
    length = len(content) if size is None else size
    size_field = b"%011o\0" % length if length < 8**11 else b"\x80" + length.to_bytes(11, "big")
    header = bytearray(512)
    header[0:100] = name.ljust(100, b"\0")
    header[100:124] = b"0000644\0" + b"0000000\0" * 2
    header[124:136] = size_field if raw_size is None else raw_size
    header[136:148] = b"00000000000\0"
    header[148:156] = b" " * 8
    header[156:157] = kind
    header[157:257] = link.ljust(100, b"\0")
    header[257:265] = magic
    header[345:500] = prefix.ljust(155, b"\0")
    header[148:156] = b"%06o\0 " % (sum(header) if checksum is None else checksum)
    return bytes(header) + content + b"\0" * (-len(content) % 512)


def pax(records: dict[str, str] | bytes, *, kind: bytes = b"x") -> bytes:
    """Return the bytes of an extended (pax) header for the next entry."""
    if isinstance(records, dict):
        records = b"".join(_record(key, value) for key, value in records.items())
    return member("pax", records, kind=kind)


def _record(key: str, value: str) -> bytes:
    rest = f" {key}={value}\n".encode("utf-8", "surrogateescape")
    length = len(rest) + 1
    while len(str(length)) + len(rest) != length:
        length += 1
    return str(length).encode() + rest


def write(path: Path, *members: bytes, compress: bool = True, end: bytes = END) -> Path:
    """Write an archive of these entries, and return its path."""
    plain = b"".join(members) + end
    path.write_bytes(gzip.compress(plain, 6, mtime=0) if compress else plain)
    return path


def _bytes(text: bytes | str) -> bytes:
    return text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
