"""The state of an unfinished download, kept on disk so that a later call, or a later process, can go on.

- `PartialDirectory` is the working directory, which only a download may have created.
- `DownloadState` is the state of one file. It is replaced as a whole, and only after the bytes that it lists
  are on the disk. So it never lists bytes that are not there, even if the machine stops.

Any thread may save a state.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from tinker_sync._base.files import replacing, try_lock
from tinker_sync.errors import TransferError

_VERSION: Final = 2
_MARK: Final = "tinker-sync-download.txt"
_MARK_TEXT: Final = """\
tinker_sync keeps an unfinished download in this directory.
Download the same checkpoint to the same place to go on, or delete the directory.
"""
# The names that a download creates in its directory, including drafts of JSON files left by a killed process.
_OWN: Final = re.compile(
    # The drafts of versions before 0.3 ended with a number.
    r"lock|files|journals|unpacked|old|archive|(?:download|archive)\.json(?:\.\d+\.new)?"
    r"|\.(?:download|archive)\.json\.\w+\.new"
)
# Directories that are not searched for links: a target that the user replaces may hold some.
_NOT_OPENED: Final = frozenset({"old", "unpacked"})


class PartialDirectory:
    """The directory `<target>.partial` that holds an unfinished download.

    Its mark is a file that a download creates together with the directory. A directory without the mark, or
    with files that no download creates, belongs to the user: nothing in it is changed or removed.

    >>> target = Path(tempfile.mkdtemp()) / "model"
    >>> with PartialDirectory(target).hold() as partial:
    ...     _ = (partial.path / "archive").write_bytes(b"")
    ...     partial.remove()
    >>> partial.path.exists()
    False
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self.path = target.with_name(f"{target.name}.partial")

    @contextmanager
    def hold(self) -> Iterator[PartialDirectory]:
        """Create the directory, or take the one of an earlier download, and lock it until the block ends.

        If an earlier process ended just after it had moved the old target away, the target is moved back.

        Raises:
            TransferError: the directory was not created by a download, or another download holds its lock.
        """
        if not os.path.lexists(self.path):
            self._create()
        self._refuse_foreign()
        with (self.path / "lock").open("ab") as file:
            if not try_lock(file):
                raise TransferError(f"another download to {self._target} is under way")
            # The last steps of a download move the old target away and the new one in its place. A process
            # that ended between them left no target, so the old one is moved back.
            if os.path.lexists(self.path / "old") and not os.path.lexists(self._target):
                os.replace(self.path / "old", self._target)
            yield self

    def clear(self) -> None:
        """Remove the content of the directory, except its lock file and the file that marks it."""
        for entry in self.path.iterdir():
            if _OWN.fullmatch(entry.name) and entry.name != "lock":
                remove(entry)

    def remove(self) -> None:
        """Remove the directory with what a download created in it, as far as the system permits."""
        with suppress(OSError):
            self.clear()
            (self.path / "lock").unlink(missing_ok=True)
            (self.path / _MARK).unlink(missing_ok=True)
            self.path.rmdir()

    def _create(self) -> None:
        """Create the directory and, in the same step, the file that marks it as one of a download.

        Do nothing if another download has just created it.
        """
        parent = self.path.parent
        parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=parent, prefix=f".{self.path.name}."))
        try:
            (draft / _MARK).write_text(_MARK_TEXT, encoding="utf-8")
            os.rename(draft, self.path)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            if not os.path.lexists(self.path):
                raise

    def _refuse_foreign(self) -> None:
        """Refuse a directory that no download created, before anything in it changes.

        Raises:
            TransferError: the directory, or something in it, is the user's.
        """
        if self.path.is_symlink() or not self.path.is_dir():
            raise self._refusal("is not a directory")
        mark = self.path / _MARK
        if mark.is_symlink() or not mark.is_file():
            raise self._refusal("was not created by a download")
        for folder, folders, files in os.walk(self.path):
            top = Path(folder) == self.path
            for name in (*folders, *files):
                entry = Path(folder, name)
                if top and name != _MARK and not _OWN.fullmatch(name):
                    raise self._refusal(f"has something in it that no download created, {name!r}")
                if entry.is_symlink() and name not in _NOT_OPENED:
                    raise self._refusal(f"has a link in it, {str(entry.relative_to(self.path))!r}")
            if top:
                folders[:] = [name for name in folders if name not in _NOT_OPENED]

    def _refusal(self, reason: str) -> TransferError:
        return TransferError(
            f"{self.path} {reason}; nothing was done. A download to {self._target.name!r} is kept there "
            "until it is complete: move the directory away, or download to another name"
        )


def remove(place: Path) -> None:
    """Remove a file, a link or a directory, if it exists."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


Stretch = tuple[int, int]
"""A range of bytes of a file: the first one, and the one after the last."""


class Coverage:
    """The bytes of a file that have arrived, as disjoint ranges. Not thread-safe.

    >>> have = Coverage([(0, 10), (20, 30)])
    >>> have.add(10, 15)
    >>> list(have), have.total, list(have.gaps(40))
    ([(0, 15), (20, 30)], 25, [(15, 20), (30, 40)])
    """

    def __init__(self, stretches: Iterable[Stretch] = ()) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        self.total = 0
        for begin, end in stretches:
            self.add(begin, end)

    def add(self, begin: int, end: int) -> None:
        """Add a range, which may overlap with others."""
        if end <= begin:
            return
        first = bisect_left(self._ends, begin)  # the first stretch that touches the new one
        last = bisect_right(self._begins, end)  # the one after the last stretch that touches it
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        pairs = zip(self._begins[first:last], self._ends[first:last], strict=True)
        self.total += end - begin - sum(e - b for b, e in pairs)
        self._begins[first:last] = [begin]
        self._ends[first:last] = [end]

    def gaps(self, size: int) -> Iterator[Stretch]:
        """Yield the missing ranges of the first `size` bytes."""
        at = 0
        for begin, end in self:
            if at < min(begin, size):
                yield at, min(begin, size)
            at = max(at, end)
        if at < size:
            yield at, size

    def __iter__(self) -> Iterator[Stretch]:
        return zip(list(self._begins), list(self._ends), strict=True)

    def __repr__(self) -> str:
        return f"Coverage({list(self)})"


@frozen(kw_only=True)
class FileVersion:
    """The version of a file on the server. Another file under the same name has another size, etag or date.

    >>> FileVersion(size=5, etag='"a"').may_equal(FileVersion(size=5, etag='"b"'))
    False
    """

    size: int | None = None
    etag: str | None = None
    modified: str | None = None

    @property
    def condition(self) -> str | None:
        """The value of `If-Range`; None if the server sends neither etag nor date, or a weak etag."""
        if self.etag is not None:
            return None if self.etag.startswith("W/") else self.etag
        return self.modified

    @property
    def named(self) -> bool:
        """True if the server sends an etag or a date for the file."""
        return self.etag is not None or self.modified is not None

    def may_equal(self, other: FileVersion) -> bool:
        """Return False if a field that both versions have differs."""
        pairs = ((self.size, other.size), (self.etag, other.etag), (self.modified, other.modified))
        return all(one is None or two is None or one == two for one, two in pairs)


Run = tuple[int, int, int]
"""Bytes of a file that arrived in order: the first one, the one after the last, and their CRC-32."""


@frozen
class DownloadState:
    """The state of an incomplete file: its version, its checksum, and the bytes that are on the disk."""

    version: FileVersion
    checksum: tuple[str, str] | None
    runs: tuple[Run, ...]

    def save(self, place: Path) -> None:
        """Write the state to a file, replacing the previous one."""
        tree = {
            "version": _VERSION,
            "size": self.version.size,
            "etag": self.version.etag,
            "modified": self.version.modified,
            "checksum": self.checksum,
            "runs": self.runs,
        }
        write_json(place, tree)

    @classmethod
    def load(cls, place: Path) -> DownloadState | None:
        """Return the state in a file, or None when the file is missing, damaged, or of another format."""
        try:
            tree = read_json(place)
            if tree["version"] != _VERSION:
                return None
            checksum = tree["checksum"]
            runs = tuple((int(begin), int(end), int(crc)) for begin, end, crc in tree["runs"])
            if any(not 0 <= begin < end for begin, end, _ in runs):
                return None
            return cls(
                FileVersion(size=tree["size"], etag=tree["etag"], modified=tree["modified"]),
                (str(checksum[0]), str(checksum[1])) if checksum else None,
                runs,
            )
        except (ValueError, LookupError, TypeError):
            return None


def write_json(place: Path, tree: Mapping[str, Any]) -> None:
    """Write or atomically replace a small JSON file."""
    with replacing(place) as file:
        file.write(json.dumps(tree).encode())


def read_json(place: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file, or an empty one when the file is missing or damaged."""
    with suppress(OSError, ValueError):
        tree = json.loads(place.read_text(encoding="utf-8"))
        if isinstance(tree, dict):
            return tree
    return {}
