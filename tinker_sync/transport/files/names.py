"""Safety checks of the file names from a server or an archive, before a file is opened. Pure.

A safe name means the same file on every operating system and stays inside its directory: it has no root, no
drive, no `..` and no Windows device, and no file system treats it as equal to another name of the directory.
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
    """The error for a name that must not be used. Its text is the reason, as a clause to follow the name."""


def safe_parts(name: str) -> Parts:
    """Return the parts of a relative name.

    Raises:
        UnsafeName: the name is not safe on every operating system.

    >>> safe_parts("./a/b.bin"), safe_parts("dir/")
    (('a', 'b.bin'), ('dir',))
    >>> safe_parts("a/../../b")
    Traceback (most recent call last):
        ...
    tinker_sync.transport.files.names.UnsafeName: it leads upwards
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
    """The names below one directory. A name that some file system cannot distinguish from another is refused.

    >>> names = Names()
    >>> names.add_file(("Dir", "a.bin"))
    >>> names.add_file(("Dir", "A.BIN"))
    Traceback (most recent call last):
        ...
    tinker_sync.transport.files.names.UnsafeName: it is there already, written 'Dir/a.bin'
    """

    def __init__(self) -> None:
        self._taken: dict[Parts, tuple[Parts, bool]] = {}

    def __len__(self) -> int:
        """Return the number of names, those of directories included."""
        return len(self._taken)

    def add_file(self, parts: Parts) -> None:
        """Add the name of a file, and the names of its directories.

        Raises:
            UnsafeName: the name is empty or already taken, or a parent directory exists as a file or under a
                different spelling.
        """
        if not parts:
            raise UnsafeName("it is empty")
        self.add_directory(parts[:-1])
        there = self._taken.setdefault(_fold(parts), (parts, False))
        if there[0] is not parts:
            raise UnsafeName(f"it is there already, written {'/'.join(there[0])!r}")

    def add_directory(self, parts: Parts) -> None:
        """Add the name of a directory, if it is not present.

        Raises:
            UnsafeName: the name is present as a file, or in another spelling.
        """
        folded = _fold(parts)
        for depth in range(1, len(parts) + 1):
            whole = parts[:depth]
            there, is_directory = self._taken.setdefault(folded[:depth], (whole, True))
            if not is_directory or there != whole:
                raise UnsafeName(f"it is there already, written {'/'.join(there)!r}")


def _fold(parts: Parts) -> Parts:
    return tuple(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", p).casefold()) for p in parts)
