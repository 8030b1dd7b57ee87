"""Safe unpacking of an untrusted tar archive, plain or compressed with gzip.

This module parses the format itself: the standard library's reader ignores what follows a broken header,
reads headers of any size into memory, and filters members differently in each version of Python. Guarantees:

- All files go into the given directory, which is new. If the unpacking fails, the directory is removed.
- Only regular files and directories are created. A link becomes a second name of a file in the same archive;
  any other link, a device, a sparse file or an unknown member is refused.
- Every name is safe on every system and unique, even where the file system ignores case or accents.
- Size, number of members and compression ratio are limited, the memory used does not depend on the size, and
  the archive must have its end mark.

It runs on one thread.
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
# The largest size of the extended headers of one entry. A path of 32 directories takes 8 kB.
_MAX_EXTENSION: Final = 1 << 16
_MAX_EXTENSIONS: Final = 4
_FILE, _HARD, _SOFT, _DIRECTORY = b"0", b"1", b"2", b"5"
_REFUSED: Final = {b"3": "a device", b"4": "a device", b"6": "a pipe", b"S": "a sparse file"}


@frozen(kw_only=True)
class ArchiveLimits:
    """The limits on the content of an archive. The free space of the disk is checked apart from them.

    >>> ArchiveLimits().max_bytes(1_000_000)
    468435456
    """

    entries: int = 10_000
    """The largest number of members; a checkpoint has a few dozen."""
    ratio: int = 200
    """The largest ratio of unpacked to packed size. Weights hardly compress. A new optimizer state compresses
    well, because it is zeros, but it is only a part of a checkpoint."""
    allowance_bytes: int = 1 << 28
    """An archive may always grow to this size, whatever its ratio."""

    def max_bytes(self, size_bytes: int) -> int:
        """Return the largest allowed unpacked size of an archive of `size_bytes`."""
        return self.allowance_bytes + self.ratio * size_bytes


@frozen
class _Member:
    """A member of the archive, with its extended headers applied."""

    kind: bytes
    name: str
    link: str
    size_bytes: int


def unpack(
    archive: Path,
    into: Path,
    *,
    limits: ArchiveLimits | None = None,
    on_progress: Callable[[int], object] = lambda _: None,
) -> dict[str, int]:
    """Unpack an archive into a new directory, and return the sizes of its files by their sorted names.

    Args:
        archive: the file.
        into: the directory to create; it must not exist.
        limits: the limits on size and number of members.
        on_progress: called with the size of each piece written; may raise to stop.

    Raises:
        UnsafeArchiveError: the archive holds something that must not be unpacked, or exceeds the limits.
        TransferError: the archive is broken, or cannot be written to the disk.
        FileExistsError: the directory exists.
    """
    into.mkdir(parents=True)
    try:
        with _Plain(archive, limits or ArchiveLimits()) as plain:
            return _Unpacker(plain, into, on_progress).run()
    except BaseException as error:
        shutil.rmtree(into, ignore_errors=True)
        if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)):
            raise TransferError(f"the archive is broken: {error}") from error
        if isinstance(error, OSError):
            raise TransferError(f"the archive cannot be unpacked: {error.strerror or error}") from error
        raise


class _Plain:
    """The bytes of a tar archive, decompressed if it is gzip, read once from front to end.

    A read raises `UnsafeArchiveError` beyond the size that the limits allow.
    """

    def __init__(self, archive: Path, limits: ArchiveLimits) -> None:
        self._raw = archive.open("rb")
        size_bytes = os.fstat(self._raw.fileno()).st_size
        self.limits = limits
        self._allowed = limits.max_bytes(size_bytes)
        self._read_bytes = 0
        compressed = self._raw.read(2) == _GZIP
        self._raw.seek(0)
        self._file: IO[bytes] = gzip.GzipFile(fileobj=self._raw, mode="rb") if compressed else self._raw  # type: ignore[assignment]  # GzipFile has the methods used here

    def __enter__(self) -> _Plain:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not self._raw:
            self._file.close()
        self._raw.close()

    def read(self, count: int) -> bytes:
        """Return exactly `count` bytes, or raise EOFError if fewer are left."""
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
        """Read to the end, so that gzip compares its checksum."""
        while data := self._file.read(_PIECE):
            self._read_bytes += len(data)
            self.refuse_beyond(self._read_bytes)

    def refuse_beyond(self, size_bytes: int) -> None:
        """Raise UnsafeArchiveError if an unpacked size of `size_bytes` is beyond the limit."""
        if size_bytes > self._allowed:
            raise UnsafeArchiveError(f"the archive grows to more than {self._allowed} bytes", "its size")

    def refuse_more(self, count: int) -> None:
        """Raise UnsafeArchiveError if `count` entries are more than the limit."""
        if count > self.limits.entries:
            raise UnsafeArchiveError(f"there are more than {self.limits.entries} entries", "their number")


class _Unpacker:
    def __init__(self, plain: _Plain, into: Path, on_progress: Callable[[int], object]) -> None:
        self._plain = plain
        self._into = into
        self._on_progress = on_progress
        self._names = Names()
        self._links: dict[Parts, Parts] = {}
        self._sizes: dict[Parts, int] = {}

    def run(self) -> dict[str, int]:
        total_bytes = 0
        for entry in _read_members(self._plain):
            if entry.kind == _DIRECTORY and _names_root(entry.name):
                continue  # it is `into`, which exists
            parts = self._take_name(entry)
            total_bytes += entry.size_bytes
            self._plain.refuse_beyond(total_bytes)
            if entry.kind == _FILE:
                self._write(parts, entry.size_bytes)
            elif entry.kind == _DIRECTORY:
                self._place(parts).mkdir(parents=True, exist_ok=True)
            else:
                self._links[parts] = _resolve_link(entry, parts)
        self._plain.drain()
        self._make_links()
        return {"/".join(parts): size for parts, size in sorted(self._sizes.items())}

    def _take_name(self, entry: _Member) -> Parts:
        try:
            parts = safe_parts(entry.name)
            if entry.kind == _DIRECTORY:
                self._names.add_directory(parts)
            else:
                self._names.add_file(parts)
        except UnsafeName as problem:
            raise UnsafeArchiveError(str(problem), entry.name) from None
        self._plain.refuse_more(len(self._names))  # with the directories that the names of members imply
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
                self._on_progress(len(piece))
        self._plain.read(-size_bytes % _BLOCK)
        self._sizes[parts] = size_bytes

    def _make_links(self) -> None:
        """Create each link as a second name of the file that it leads to, also through other links."""
        ends: dict[Parts, Parts] = {}
        total_bytes = sum(self._sizes.values())
        for parts in self._links:
            target = self._follow(parts, ends)
            if target not in self._sizes:
                raise UnsafeArchiveError("it is a link to no file of the archive", "/".join(parts))
            place, source = self._place(parts), self._place(target)
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, place)
            except OSError:  # some file systems have no hard links
                total_bytes += self._sizes[target]
                self._plain.refuse_beyond(total_bytes)
                shutil.copyfile(source, place)
        self._sizes.update({parts: self._place(parts).stat().st_size for parts in self._links})

    def _follow(self, parts: Parts, ends: dict[Parts, Parts]) -> Parts:
        """Return the end of a chain of links. Note it in `ends` for each link of the chain."""
        chain: list[Parts] = []
        while parts in self._links and parts not in ends:
            ends[parts] = ()  # no file has this name, so a circle leads to no file
            chain.append(parts)
            parts = self._links[parts]
        end = ends.get(parts, parts)
        ends.update(dict.fromkeys(chain, end))
        return end


def _names_root(name: str) -> bool:
    """Return True for a name of the archive's root: `/`, `./` and the like.

    >>> _names_root("/"), _names_root("./"), _names_root("/etc/"), _names_root("../")
    (True, True, False, False)
    """
    return {"", "."}.issuperset(name.split("/"))


def _resolve_link(entry: _Member, parts: Parts) -> Parts:
    """Return the target of a link.

    A hard link names the target from the root of the archive, a soft link from the directory of the link.
    """
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
    try:
        return safe_parts("/".join(way))  # a name that no member can have would only take memory
    except UnsafeName:
        raise UnsafeArchiveError("it is a link to no file of the archive", entry.name) from None


# ---------------------------------------------------------------------------------------- the format


def _read_members(plain: _Plain) -> Iterator[_Member]:
    """Yield the members up to the end mark. The caller reads the content before it asks for the next."""
    count = 0
    more: dict[str, str] = {}
    extensions = 0
    while (header := plain.read(_BLOCK)).strip(b"\0"):
        count += 1
        plain.refuse_more(count)
        kind, name, link, size_bytes = _read_header(header)
        if kind in b"xgLK":
            extensions += 1
            if size_bytes > _MAX_EXTENSION or extensions > _MAX_EXTENSIONS:
                raise UnsafeArchiveError("its extended header is too long", name)
            body = plain.read(size_bytes)
            plain.read(-size_bytes % _BLOCK)
            more.update(_read_extension(kind, body, name))
            continue
        entry = _make_member(kind, name, link, size_bytes, more)
        more, extensions = {}, 0
        yield entry
    if extensions:
        raise TransferError("the archive is broken: it ends with an extended header")


def _make_member(kind: bytes, name: str, link: str, size_bytes: int, more: dict[str, str]) -> _Member:
    """Apply the extended headers in `more`, and refuse a member that must not be unpacked."""
    name, link = more.get("path", name), more.get("linkpath", link)
    if "size" in more:
        if not (more["size"].isascii() and more["size"].isdigit() and len(more["size"]) < 20):
            raise TransferError("the archive is broken: a size is not a number")
        size_bytes = int(more["size"])
    if kind in (b"\0", b"7"):
        kind = _FILE
    if kind == _FILE and name.endswith("/"):  # very old archives mark directories like this
        kind = _DIRECTORY
    if kind not in (_FILE, _HARD, _SOFT, _DIRECTORY):
        raise UnsafeArchiveError(f"it is {_REFUSED.get(kind, f'of the unknown kind {kind!r}')}", name)
    if kind != _FILE and size_bytes:
        raise UnsafeArchiveError("it has content although it is not a file", name)
    return _Member(kind, name, link, size_bytes)


def _read_header(header: bytes) -> tuple[bytes, str, str, int]:
    stated = _number(header[148:156])
    blanked = header[:148] + b" " * 8 + header[156:]
    signed = sum(byte - 256 if byte > 127 else byte for byte in blanked)  # some old programs count so
    if stated not in (sum(blanked), signed):
        raise TransferError("the archive is broken: a header has the wrong checksum")
    name = _text(header[:100])
    if header[257:263] == b"ustar\0" and header[345]:
        name = f"{_text(header[345:500])}/{name}"
    return header[156:157], name, _text(header[157:257]), _number(header[124:136])


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # a binary number, for large sizes
        if field[0] != 0x80:
            raise TransferError("the archive is broken: a negative number")
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if digits.strip(b"01234567"):
        raise TransferError("the archive is broken: a number has other characters than digits")
    return int(digits or b"0", 8)


def _text(field: bytes) -> str:
    text = field.split(b"\0", 1)[0]
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        raise UnsafeArchiveError("it is not text", repr(text)[2:-1]) from None


def _read_extension(kind: bytes, body: bytes, name: str) -> dict[str, str]:
    """Return the fields that an extended header sets for the next member."""
    if kind in b"LK":
        return {"path" if kind == b"L" else "linkpath": _text(body)}
    records = _pax_records(body, name)
    if any(key.startswith("GNU.sparse") for key in records):
        raise UnsafeArchiveError("it is a sparse file", name)
    named: dict[str, str] = {key: records[key] for key in ("path", "linkpath", "size") if key in records}
    if kind == b"g" and named:
        raise UnsafeArchiveError("a header sets one name or size for all members", name)
    return named


def _pax_records(body: bytes, name: str) -> dict[str, str]:
    """Parse records `length key=value` with a line end; the length counts the whole record."""
    records: dict[str, str] = {}
    at = 0
    while at < len(body):
        digits, blank, _ = body[at : at + 10].partition(b" ")
        length = int(digits) if blank and digits.isdigit() else 0
        record = body[at : at + length]
        if not record.endswith(b"\n") or len(record) != length:
            raise TransferError("the archive is broken: an extended header has a wrong length")
        key, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        if not equals or b"\0" in value:
            raise UnsafeArchiveError("its extended header is malformed", name)
        records[_text(key)] = _text(value)
        at += length
    return records
