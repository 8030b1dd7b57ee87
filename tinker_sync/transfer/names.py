"""Names of files that a server or an archive gives us, before anything is opened by them. Pure.

A name is only good if it means the same file on every system we may run on, inside the directory it is for:
no root, no drive, no way up, no device of Windows, no two names that some file system takes for one.
"""

from __future__ import annotations

import unicodedata
from typing import Final

Parts = tuple[str, ...]

MAX_DEPTH: Final = 32
_MAX_PART_BYTES: Final = 255
_DEVICES: Final = frozenset(
    {"con", "prn", "aux", "nul", "conin$", "conout$"}
    | {f"{port}{digit}" for port in ("com", "lpt") for digit in "0123456789\u00b9\u00b2\u00b3"}
)
_FORBIDDEN: Final = frozenset('\\:*?"<>|')


class UnsafeName(ValueError):
    """A name that is not used; the text says why, without the name."""


def safe_parts(name: str) -> Parts:
    """The parts of a relative name.

    Raises:
        UnsafeName: it is not safe everywhere.

    >>> safe_parts("./a/b.bin"), safe_parts("dir/")
    (('a', 'b.bin'), ('dir',))
    >>> safe_parts("a/../../b")
    Traceback (most recent call last):
        ...
    tinker_sync.transfer.names.UnsafeName: it leads upwards
    """
    if name.startswith("/"):
        raise UnsafeName("it begins at the root")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if len(parts) > MAX_DEPTH:
        raise UnsafeName(f"it is more than {MAX_DEPTH} directories deep")
    for part in parts:
        _check(part)
    return parts


def _check(part: str) -> None:
    if part == "..":
        raise UnsafeName("it leads upwards")
    bad = next((c for c in part if c in _FORBIDDEN or c < " " or "\x7f" <= c < "\xa0"), None)
    if bad is not None:
        raise UnsafeName(f"it holds {bad!r}")
    if part[-1] in ". ":
        raise UnsafeName("a part of it ends with a dot or a blank")
    if part.partition(".")[0].rstrip().casefold() in _DEVICES:
        raise UnsafeName("it is a device on Windows")
    try:
        long = len(part.encode("utf-8")) > _MAX_PART_BYTES
    except UnicodeEncodeError:
        raise UnsafeName("it is not text") from None
    if long:
        raise UnsafeName(f"a part of it is longer than {_MAX_PART_BYTES} bytes")


class Names:
    """The names that go into one directory: each once, whatever the file system takes for the same.

    >>> names = Names()
    >>> names.add_file(("Dir", "a.bin"))
    >>> names.add_file(("Dir", "A.BIN"))
    Traceback (most recent call last):
        ...
    tinker_sync.transfer.names.UnsafeName: it is there already, written 'Dir/a.bin'
    """

    def __init__(self) -> None:
        self._taken: dict[Parts, tuple[Parts, bool]] = {}

    def add_file(self, parts: Parts) -> None:
        """Take a name for a file, and those of its directories.

        Raises:
            UnsafeName: it is taken, or a directory of it is a file.
        """
        if not parts:
            raise UnsafeName("it is empty")
        self.add_directory(parts[:-1])
        there = self._taken.setdefault(_folded(parts), (parts, False))
        if there[0] is not parts:
            raise UnsafeName(f"it is there already, written {'/'.join(there[0])!r}")

    def add_directory(self, parts: Parts) -> None:
        """Take a name for a directory; it may have been taken for one before.

        Raises:
            UnsafeName: it is taken for a file, or written otherwise.
        """
        for depth in range(1, len(parts) + 1):
            whole = parts[:depth]
            there, is_directory = self._taken.setdefault(_folded(whole), (whole, True))
            if not is_directory or there != whole:
                raise UnsafeName(f"it is there already, written {'/'.join(there)!r}")

    def is_file(self, parts: Parts) -> bool:
        """Whether this very name was taken for a file."""
        return self._taken.get(_folded(parts)) == (parts, False)


def _folded(parts: Parts) -> Parts:
    return tuple(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", p).casefold()) for p in parts)
