"""What can go wrong with the store, in words for whoever asked and in a kind for code that answers them.

The one border where errors of the file system and of SQLite become ours.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

from tinker_sync.errors import TinkerError

StoreErrorKind = Literal[
    "not_found", "exists", "bad_name", "full", "unwritable", "locked", "damaged", "too_new", "closed"
]

_FULL: Final = frozenset({errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)})
# What SQLite says; its numbers are in the exception only from Python 3.11 on.
_SQLITE_SAYS: Final[tuple[tuple[str, StoreErrorKind], ...]] = (
    ("full", "full"),
    ("not a database", "damaged"),
    ("malformed", "damaged"),
    ("locked", "locked"),
    ("FOREIGN KEY", "not_found"),
    ("UNIQUE", "exists"),
    ("closed database", "closed"),
)


class StoreError(TinkerError):
    """The store did not do what it was asked to do, and nothing else has changed.

    Attributes:
        kind: `not_found`, `exists`, `bad_name`: the request. `full`, `unwritable`: the disk. `locked`:
            another server uses the directory. `damaged`, `too_new`: what is in it. `closed`: the store.
        message: a sentence that may be shown to a client.

    >>> error = StoreError("not_found", "there is no session s-1")
    >>> error.kind, str(error)
    ('not_found', 'there is no session s-1')
    """

    kind: StoreErrorKind
    message: str

    def __init__(self, kind: StoreErrorKind, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return self.message


def of_os(problem: OSError, what: str) -> StoreError:
    """What an error of the file system means for `what`, such as "the checkpoint could not be saved"."""
    if problem.errno in _FULL:
        return StoreError("full", f"{what}: the disk is full ({problem.strerror})")
    return StoreError("unwritable", f"{what}: {problem.strerror or problem}")


def of_sqlite(problem: sqlite3.Error, what: str) -> StoreError:
    """What an error of the database means for `what`."""
    text = str(problem)
    said = [kind for words, kind in _SQLITE_SAYS if words in text]
    kind = said[0] if said else "unwritable"
    if kind == "full":
        return StoreError("full", f"{what}: the disk is full")
    return StoreError(kind, f"{what}: {text}")


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Let no error of the file system or of SQLite out as it is.

    >>> with translated("the file could not be read"):
    ...     raise OSError(errno.ENOSPC, "No space left on device")
    Traceback (most recent call last):
        ...
    tinker_sync.local.store.errors.StoreError: the file could not be read: the disk is full (No space ...)
    """
    try:
        yield
    except OSError as problem:
        raise of_os(problem, what) from problem
    except sqlite3.Error as problem:
        raise of_sqlite(problem, what) from problem
