"""Safe unpacking of an untrusted tar archive, plain or compressed with gzip.

`tarfile` reads the format, member by member, and this module decides what is written. Guarantees:

- All files go into the given directory, which is new. If the unpacking fails, the directory is removed.
- Only regular files and directories are created. A link becomes a second name of a file in the same archive;
  any other link, a device, a sparse file or an unknown member is refused.
- Every name is safe on every system and unique, even where the file system ignores case or accents.
- Size, number of members and compression ratio are limited, the memory used does not depend on the size, and
  the archive must have its end mark, because `tarfile` takes a header that it cannot read for the end.

It runs on one thread.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from attrs import frozen

from tinker_sync.errors import TransferError, UnsafeArchiveError
from tinker_sync.transport.files.names import Names, Parts, UnsafeName, safe_parts

if TYPE_CHECKING:
    from typing_extensions import Self

_PIECE: Final = 1 << 20
_READ_AHEAD: Final = 1 << 16
_GZIP: Final = b"\x1f\x8b"
# The most bytes of headers before the content of a member. A path of 32 directories takes 8 kB.
_MAX_HEADERS: Final = 1 << 17
# Files, links and directories, and the extended headers that `tarfile` applies to them.
_ALLOWED: Final = frozenset({b"\0", b"0", b"7", b"1", b"2", b"5"} | {b"x", b"g", b"X", b"L", b"K"})
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
        if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError)):
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
        self.headers_end: int | None = None
        """Where the headers of the next member must have ended; None in the content of a member."""
        compressed = self._raw.read(2) == _GZIP
        self._raw.seek(0)
        self._file: IO[bytes] = gzip.GzipFile(fileobj=self._raw, mode="rb") if compressed else self._raw  # type: ignore[assignment]  # GzipFile has the methods used here

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not self._raw:
            self._file.close()
        self._raw.close()

    def read(self, count: int) -> bytes:
        """Return the next bytes, at most `count`. Raise EOFError at the end, which `tarfile` forgives."""
        data = self._file.read(count)
        if not data:
            raise EOFError("it ends in the middle")
        self._read_bytes += len(data)
        self.refuse_beyond(self._read_bytes)
        if self.headers_end is not None and self._read_bytes > self.headers_end:
            raise UnsafeArchiveError("its extended headers are too long", f"byte {self.headers_end}")
        return data

    def begin_headers(self) -> None:
        """Limit the bytes that are read from now on until `headers_end` is None again."""
        self.headers_end = self._read_bytes + _MAX_HEADERS

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
        for member, content in _read_members(self._plain):
            if member.isdir() and _names_root(member.name):
                continue  # it is `into`, which exists
            parts = self._take_name(member)
            total_bytes += member.size
            self._plain.refuse_beyond(total_bytes)
            if content is not None:
                self._write(parts, member.size, content)
            elif member.isdir():
                self._place(parts).mkdir(parents=True, exist_ok=True)
            else:
                self._links[parts] = _resolve_link(member, parts)
        self._plain.drain()
        self._make_links()
        return {"/".join(parts): size for parts, size in sorted(self._sizes.items())}

    def _take_name(self, member: tarfile.TarInfo) -> Parts:
        try:
            parts = safe_parts(member.name)
            if member.isdir():
                self._names.add_directory(parts)
            else:
                self._names.add_file(parts)
        except UnsafeName as problem:
            raise UnsafeArchiveError(str(problem), member.name) from None
        self._plain.refuse_more(len(self._names))  # with the directories that the names of members imply
        return parts

    def _place(self, parts: Parts) -> Path:
        return self._into.joinpath(*parts)

    def _write(self, parts: Parts, size_bytes: int, content: IO[bytes]) -> None:
        place = self._place(parts)
        place.parent.mkdir(parents=True, exist_ok=True)
        if size_bytes > shutil.disk_usage(self._into).free:
            raise TransferError(f"the disk is too full to unpack {'/'.join(parts)!r}, {size_bytes} bytes")
        with place.open("xb") as file:
            left = size_bytes
            while left:
                piece = content.read(min(left, _PIECE))
                file.write(piece)
                left -= len(piece)
                self._on_progress(len(piece))
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


def _resolve_link(member: tarfile.TarInfo, parts: Parts) -> Parts:
    """Return the target of a link.

    A hard link names the target from the root of the archive, a soft link from the directory of the link.
    """
    if member.linkname.startswith("/"):
        raise UnsafeArchiveError("it is a link to the root", member.name)
    way = list(parts[:-1]) if member.issym() else []
    for part in member.linkname.split("/"):
        if part == "..":
            if not way:
                raise UnsafeArchiveError("it is a link that leads outside", member.name)
            way.pop()
        elif part not in ("", "."):
            way.append(part)
    try:
        return safe_parts("/".join(way))  # a name that no member can have would only take memory
    except UnsafeName:
        raise UnsafeArchiveError("it is a link to no file of the archive", member.name) from None


# ---------------------------------------------------------------------------------------- the format


def _read_members(plain: _Plain) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """Yield each member with its content, None if it is no file. The caller reads all of the content."""
    ended = False

    class Header(tarfile.TarInfo):
        @classmethod
        def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
            nonlocal ended
            ended = len(buf) == tarfile.BLOCKSIZE and not buf.strip(b"\0")
            header = super().frombuf(buf, encoding, errors)
            if header.size < 0:
                raise TransferError("the archive is broken: a size is negative")
            if header.type not in _ALLOWED:
                what = _REFUSED.get(header.type, f"of the unknown kind {header.type!r}")
                raise UnsafeArchiveError(f"it is {what}", header.name)
            return header

    def next_member() -> tarfile.TarInfo | None:
        plain.begin_headers()
        with _naming_what_is_broken():
            found: tarfile.TarInfo | None = tar.next()
        plain.headers_end = None
        return found

    source: Any = plain  # `tarfile` only reads from a stream
    plain.begin_headers()
    with _naming_what_is_broken():
        tar: Any = tarfile.open(  # noqa: SIM115  # there is nothing to close; it reads the first headers
            fileobj=source, mode="r|", bufsize=_READ_AHEAD, tarinfo=Header, encoding="utf-8", errors="strict"
        )
    count = 0
    while (member := next_member()) is not None:
        count += 1
        plain.refuse_more(count)
        _refuse_member(member, tar.pax_headers)
        yield member, tar.extractfile(member) if member.isreg() else None
        tar.members = []  # the reader keeps all of them
    if not ended:
        raise TransferError("the archive is broken: a header cannot be read")


@contextmanager
def _naming_what_is_broken() -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise UnsafeArchiveError("it is not text", repr(error.object)[2:102]) from None
    except (ValueError, RecursionError) as error:
        raise TransferError(f"the archive is broken: {error}") from error


def _refuse_member(member: tarfile.TarInfo, for_all: Mapping[str, str]) -> None:
    """Raise UnsafeArchiveError for a member that must not be unpacked."""
    if any(key.startswith("GNU.sparse") for key in (*member.pax_headers, *for_all)):
        raise UnsafeArchiveError("it is a sparse file", member.name)
    if {"path", "linkpath", "size"} & for_all.keys():
        raise UnsafeArchiveError("a header sets one name or size for all members", member.name)
    if member.size and not member.isreg():
        raise UnsafeArchiveError("it has content although it is not a file", member.name)
    if member.size < 0:
        raise TransferError("the archive is broken: a size is negative")
