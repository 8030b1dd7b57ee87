"""Unpacking an archive that nobody vouches for: a tar file, compressed with gzip or not.

Read here, byte by byte, since the standard library's reader ends in silence at a broken header, takes headers
of any size into memory, and means something else in each version of Python. Guarantees:

- Nothing is written outside the directory, which is new, and nothing stays in it unless all of it is good.
- Only regular files and directories come to be. A link becomes a second name of the file it means, if that is
  a file of the same archive; any other link, a device, a sparse file or an unknown entry is refused.
- Every name is safe on every system, and none comes twice, also where case or accents do not count.
- Size, number and compression ratio are limited, memory is flat, and the archive must reach its own end.

Runs on one thread; knows nothing of where the archive came from.
"""

from __future__ import annotations

import gzip
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final

from attrs import frozen

from tinker_sync.errors import TransferError, UnsafeArchiveError
from tinker_sync.transfer.names import Names, Parts, UnsafeName, safe_parts

_BLOCK: Final = 512
_PIECE: Final = 1 << 20
_GZIP: Final = b"\x1f\x8b"
# The extended headers of one entry: a path of 32 directories is 8 kB.
_MAX_EXTENSION: Final = 1 << 16
_MAX_EXTENSIONS: Final = 4
_FILE, _HARD, _SOFT, _DIRECTORY = b"0", b"1", b"2", b"5"
_REFUSED: Final = {b"3": "a device", b"4": "a device", b"6": "a pipe", b"S": "a sparse file"}


@frozen(kw_only=True)
class ArchiveLimits:
    """What an archive may grow to. The free space of the disk is a limit anyway.

    >>> ArchiveLimits().of(1_000_000)
    468435456
    """

    entries: int = 10_000
    """A checkpoint has a few dozen."""
    ratio: int = 200
    """Weights hardly compress; a fresh optimizer state, all zeros, makes up most of no checkpoint."""
    allowance_bytes: int = 1 << 28
    """Small archives may grow to this whatever their ratio."""
    total_bytes: int | None = None

    def of(self, size_bytes: int) -> int:
        """How many bytes may come out of an archive of so many."""
        grown = self.allowance_bytes + self.ratio * size_bytes
        return grown if self.total_bytes is None else min(grown, self.total_bytes)


@frozen
class Unpacked:
    """A file that came out of an archive."""

    name: str
    size_bytes: int


@frozen
class _Entry:
    """A member of the archive, its extended headers applied."""

    kind: bytes
    name: str
    link: str
    size_bytes: int


def unpack(
    archive: Path,
    into: Path,
    *,
    limits: ArchiveLimits | None = None,
    went_on: Callable[[int], object] = lambda _: None,
) -> list[Unpacked]:
    """Unpack an archive into a new directory.

    Args:
        archive: the file.
        into: made here; must not exist.
        limits: what it may grow to.
        went_on: told, after each piece, how many bytes of files it was; may raise to stop.

    Raises:
        UnsafeArchiveError: it holds what must not be unpacked.
        TransferError: it is broken, or the disk is full.
    """
    into.mkdir(parents=True)
    try:
        with _Plain(archive, limits or ArchiveLimits()) as plain:
            return _Unpacker(plain, into, went_on).run()
    except BaseException as error:
        shutil.rmtree(into, ignore_errors=True)
        if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)):
            raise TransferError(f"the archive is broken: {error}") from error
        if isinstance(error, OSError):
            raise TransferError(f"the archive cannot be unpacked: {error.strerror or error}") from error
        raise


class _Plain:
    """The archive without its compression, read from front to end, counted."""

    def __init__(self, archive: Path, limits: ArchiveLimits) -> None:
        self._raw = archive.open("rb")
        size_bytes = os.fstat(self._raw.fileno()).st_size
        self._limits = limits
        self._allowed = limits.of(size_bytes)
        self._read_bytes = 0
        compressed = self._raw.read(2) == _GZIP
        self._raw.seek(0)
        self._file: IO[bytes] = gzip.GzipFile(fileobj=self._raw, mode="rb") if compressed else self._raw  # type: ignore[assignment]  # as good as one

    def __enter__(self) -> _Plain:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not self._raw:
            self._file.close()
        self._raw.close()

    @property
    def limits(self) -> ArchiveLimits:
        return self._limits

    def read(self, count: int) -> bytes:
        """Exactly so many bytes."""
        data = self._file.read(count)
        while len(data) < count:
            more = self._file.read(count - len(data))
            if not more:
                raise EOFError("it ends in the middle")
            data += more
        self._read_bytes += count
        self.refuse_beyond(self._read_bytes)
        return data

    def drain(self) -> None:
        """Read to the end, where gzip keeps its checksum."""
        while data := self._file.read(_PIECE):
            self._read_bytes += len(data)
            self.refuse_beyond(self._read_bytes)

    def refuse_beyond(self, size_bytes: int) -> None:
        """Refuse an archive that would grow to this size."""
        if size_bytes > self._allowed:
            raise UnsafeArchiveError(f"the archive grows to more than {self._allowed} bytes", "its size")


class _Unpacker:
    """One archive on its way into one directory."""

    def __init__(self, plain: _Plain, into: Path, went_on: Callable[[int], object]) -> None:
        self._plain = plain
        self._into = into
        self._went_on = went_on
        self._names = Names()
        self._links: dict[Parts, Parts] = {}
        self._sizes: dict[Parts, int] = {}

    def run(self) -> list[Unpacked]:
        total_bytes = 0
        for entry in _entries(self._plain):
            parts = self._take_name(entry)
            total_bytes += entry.size_bytes
            self._plain.refuse_beyond(total_bytes)
            if entry.kind == _FILE:
                self._write(parts, entry.size_bytes)
            elif entry.kind == _DIRECTORY:
                self._place(parts).mkdir(parents=True, exist_ok=True)
            else:
                self._links[parts] = _meant(entry, parts)
        self._plain.drain()
        self._make_links()
        return [Unpacked("/".join(parts), size) for parts, size in sorted(self._sizes.items())]

    def _take_name(self, entry: _Entry) -> Parts:
        try:
            parts = safe_parts(entry.name)
            if entry.kind == _DIRECTORY:
                self._names.add_directory(parts)
            else:
                self._names.add_file(parts)
        except UnsafeName as problem:
            raise UnsafeArchiveError(str(problem), entry.name) from None
        return parts

    def _place(self, parts: Parts) -> Path:
        return self._into.joinpath(*parts)

    def _write(self, parts: Parts, size_bytes: int) -> None:
        place = self._place(parts)
        place.parent.mkdir(parents=True, exist_ok=True)
        if size_bytes > shutil.disk_usage(self._into).free:
            raise TransferError(f"the disk is too full to unpack {'/'.join(parts)!r}, {size_bytes} bytes")
        with place.open("xb") as file:
            left = size_bytes
            while left:
                piece = self._plain.read(min(left, _PIECE))
                file.write(piece)
                left -= len(piece)
                self._went_on(len(piece))
        self._plain.read(-size_bytes % _BLOCK)
        self._sizes[parts] = size_bytes

    def _make_links(self) -> None:
        """Give files their second names. Links to links are followed, within the archive alone."""
        for parts in self._links:
            target = self._links[parts]
            for _ in range(len(self._links)):
                target = self._links.get(target, target)
            if target not in self._sizes:
                raise UnsafeArchiveError("it is a link to no file of the archive", "/".join(parts))
            place, source = self._place(parts), self._place(target)
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, place)
            except OSError:  # not on every file system
                shutil.copyfile(source, place)
        self._sizes.update({parts: self._place(parts).stat().st_size for parts in self._links})


def _meant(entry: _Entry, parts: Parts) -> Parts:
    """What a link leads to: from the root of the archive, or for soft ones from where they are."""
    if entry.link.startswith("/"):
        raise UnsafeArchiveError("it is a link to the root", entry.name)
    way = list(parts[:-1]) if entry.kind == _SOFT else []
    for part in entry.link.split("/"):
        if part == "..":
            if not way:
                raise UnsafeArchiveError("it is a link that leads outside", entry.name)
            way.pop()
        elif part not in ("", "."):
            way.append(part)
    return tuple(way)


# ---------------------------------------------------------------------------------------- the format


def _entries(plain: _Plain) -> Iterator[_Entry]:
    """The members, until the end mark. Their content is left to whoever asks for the next one."""
    count = 0
    more: dict[str, str] = {}
    extensions = 0
    while (header := plain.read(_BLOCK)).strip(b"\0"):
        count += 1
        if count > plain.limits.entries:
            raise UnsafeArchiveError(f"there are more than {plain.limits.entries} entries", "their number")
        kind, name, link, size_bytes = _read_header(header)
        if kind in b"xgLK":
            extensions += 1
            if size_bytes > _MAX_EXTENSION or extensions > _MAX_EXTENSIONS:
                raise UnsafeArchiveError("its extended header is too long", name)
            body = plain.read(size_bytes)
            plain.read(-size_bytes % _BLOCK)
            more.update(_read_extension(kind, body, name))
            continue
        entry = _extended(kind, name, link, size_bytes, more)
        more, extensions = {}, 0
        yield entry
    if extensions:
        raise TransferError("the archive is broken: it ends with an extended header")


def _extended(kind: bytes, name: str, link: str, size_bytes: int, more: dict[str, str]) -> _Entry:
    name, link = more.get("path", name), more.get("linkpath", link)
    if "size" in more:
        if not (more["size"].isascii() and more["size"].isdigit() and len(more["size"]) < 20):
            raise TransferError("the archive is broken: a size is no number")
        size_bytes = int(more["size"])
    if kind in (b"\0", b"7"):
        kind = _FILE
    if kind == _FILE and name.endswith("/"):  # how very old archives write directories
        kind = _DIRECTORY
    if kind not in (_FILE, _HARD, _SOFT, _DIRECTORY):
        raise UnsafeArchiveError(f"it is {_REFUSED.get(kind, f'of the unknown kind {kind!r}')}", name)
    if kind != _FILE and size_bytes:
        raise UnsafeArchiveError("it is no file and yet has content", name)
    return _Entry(kind, name, link, size_bytes)


def _read_header(header: bytes) -> tuple[bytes, str, str, int]:
    stated = _number(header[148:156])
    blanked = header[:148] + b" " * 8 + header[156:]
    signed = sum(byte - 256 if byte > 127 else byte for byte in blanked)  # as some old programs counted
    if stated not in (sum(blanked), signed):
        raise TransferError("the archive is broken: a header has the wrong checksum")
    name = _text(header[:100])
    if header[257:263] == b"ustar\0" and header[345]:
        name = f"{_text(header[345:500])}/{name}"
    return header[156:157], name, _text(header[157:257]), _number(header[124:136])


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # large ones are binary
        if field[0] != 0x80:
            raise TransferError("the archive is broken: a negative number")
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if digits.strip(b"01234567"):
        raise TransferError("the archive is broken: a number is none")
    return int(digits or b"0", 8)


def _text(field: bytes) -> str:
    text = field.split(b"\0", 1)[0]
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        raise UnsafeArchiveError("it is not text", repr(text)[2:-1]) from None


def _read_extension(kind: bytes, body: bytes, name: str) -> dict[str, str]:
    """What an extended header says of the member behind it."""
    if kind in b"LK":
        return {"path" if kind == b"L" else "linkpath": _text(body)}
    records = _pax_records(body, name)
    if any(key.startswith("GNU.sparse") for key in records):
        raise UnsafeArchiveError("it is a sparse file", name)
    named: dict[str, str] = {key: records[key] for key in ("path", "linkpath", "size") if key in records}
    if kind == b"g" and named:
        raise UnsafeArchiveError("a header gives one name or size to all", name)
    return named


def _pax_records(body: bytes, name: str) -> dict[str, str]:
    """Records as `length key=value` and a line end each, the length that of the whole record."""
    records: dict[str, str] = {}
    at = 0
    while at < len(body):
        digits, blank, _ = body[at : at + 10].partition(b" ")
        length = int(digits) if blank and digits.isdigit() else 0
        record = body[at : at + length]
        if not record.endswith(b"\n") or len(record) != length:
            raise TransferError("the archive is broken: an extended header makes no sense")
        key, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        if not equals or b"\0" in value:
            raise UnsafeArchiveError("its extended header makes no sense", name)
        records[_text(key)] = _text(value)
        at += length
    return records
