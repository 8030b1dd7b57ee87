"""The state of an unfinished file, kept on disk so that a later call, or a later process, can go on.

The state is replaced as a whole, and only after the bytes it lists are on the disk. It never claims too much,
even when the process or the machine stops at any moment. Any thread may save.
"""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import frozen

_VERSION = 1

Stretch = tuple[int, int]
"""Bytes of a file, the begin included and the end not."""


class Coverage:
    """A set of bytes, as disjoint stretches of a file. Not thread-safe.

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
        """Add a stretch, which may overlap with others."""
        if end <= begin:
            return
        first = bisect_left(self._ends, begin)  # the first stretch that touches the new one
        last = bisect_right(self._begins, end)  # the one after the last that does
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        pairs = zip(self._begins[first:last], self._ends[first:last], strict=True)
        self.total += end - begin - sum(e - b for b, e in pairs)
        self._begins[first:last] = [begin]
        self._ends[first:last] = [end]

    def gaps(self, size: int) -> Iterator[Stretch]:
        """Yield the stretches that are missing from the first `size` bytes."""
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
    """The version of a file on the server. Another file under the same name differs in one of these.

    >>> FileVersion(size=5, etag='"a"').may_equal(FileVersion(size=5, etag='"b"'))
    False
    """

    size: int | None = None
    etag: str | None = None
    modified: str | None = None

    @property
    def condition(self) -> str | None:
        """The value of `If-Range`, or None when the server gives only a weak one."""
        if self.etag is not None:
            return None if self.etag.startswith("W/") else self.etag
        return self.modified

    @property
    def named(self) -> bool:
        """True when the server names the version."""
        return self.etag is not None or self.modified is not None

    def may_equal(self, other: FileVersion) -> bool:
        """Return False when a field known on both sides differs."""
        pairs = (
            (self.size, other.size),
            (self.etag, other.etag),
            (self.modified, other.modified),
        )
        return all(one is None or two is None or one == two for one, two in pairs)


@frozen
class DownloadState:
    """The version of a file, its checksum, and the stretches on the disk."""

    version: FileVersion
    checksum: tuple[str, str] | None
    have: tuple[Stretch, ...]

    def save(self, place: Path) -> None:
        """Write the state to a file, replacing the previous one."""
        tree = {
            "version": _VERSION,
            "size": self.version.size,
            "etag": self.version.etag,
            "modified": self.version.modified,
            "checksum": self.checksum,
            "have": self.have,
        }
        write_json(place, tree)

    @classmethod
    def load(cls, place: Path) -> DownloadState | None:
        """Return the state in a file, or None when the file is missing or damaged."""
        try:
            tree = read_json(place)
            if tree["version"] != _VERSION:
                return None
            checksum = tree["checksum"]
            stretches = tuple((int(begin), int(end)) for begin, end in tree["have"])
            if any(not 0 <= begin < end for begin, end in stretches):
                return None
            return cls(
                FileVersion(size=tree["size"], etag=tree["etag"], modified=tree["modified"]),
                (str(checksum[0]), str(checksum[1])) if checksum else None,
                tuple(Coverage(stretches)),
            )
        except (ValueError, LookupError, TypeError):
            return None


def write_json(place: Path, tree: Mapping[str, Any]) -> None:
    """Replace a small JSON file in one step."""
    # Several threads may write at once: each draft is complete, and the last one stays.
    draft = place.with_name(f"{place.name}.{threading.get_ident()}.new")
    with draft.open("w", encoding="utf-8") as file:
        json.dump(tree, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, place)


def read_json(place: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file, or an empty one when the file is missing or damaged."""
    with suppress(OSError, ValueError):
        tree = json.loads(place.read_text(encoding="utf-8"))
        if isinstance(tree, dict):
            return tree
    return {}
