"""The store's exception, with a message for the client and a kind for the server.

`translate_errors` turns errors of the file system and of SQLite into `StoreError`.
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
# Phrases in SQLite's messages; the exception carries its error code only since Python 3.11.
_SQLITE_PHRASES: Final[tuple[tuple[str, StoreErrorKind], ...]] = (
    ("full", "full"),
    ("not a database", "damaged"),
    ("malformed", "damaged"),
    ("locked", "locked"),
    ("FOREIGN KEY", "not_found"),
    ("UNIQUE", "exists"),
    ("closed database", "closed"),
)


class StoreError(TinkerError):
    """The error of a failed operation of the store, with its cause.

    Attributes:
        kind: the cause. `not_found`, `exists`, `bad_name`: the request. `full`, `unwritable`: the disk.
            `locked`: another server uses the directory. `damaged`, `too_new`: the directory's content.
            `closed`: the store is closed.
        message: a sentence fit for a client.

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


def from_os_error(problem: OSError, what: str) -> StoreError:
    """Convert an error of the file system; `what` begins the message: "the run could not be saved"."""
    if problem.errno in _FULL:
        return StoreError("full", f"{what}: the disk is full ({problem.strerror})")
    return StoreError("unwritable", f"{what}: {problem.strerror or problem}")


def from_sqlite_error(problem: sqlite3.Error, what: str) -> StoreError:
    text = str(problem)
    known = [kind for phrase, kind in _SQLITE_PHRASES if phrase in text]
    if known[:1] == ["full"]:
        return StoreError("full", f"{what}: the disk is full")
    if known[:1] == ["exists"]:
        return StoreError("exists", f"{what}: it exists already")
    return StoreError(known[0] if known else "unwritable", f"{what}: {text}")


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Raise errors of the file system and of SQLite in the block, and for huge numbers, as `StoreError`.

    >>> with translate_errors("the file could not be read"):
    ...     raise OSError(errno.ENOSPC, "No space left on device")
    Traceback (most recent call last):
        ...
    tinker_sync.local.store.errors.StoreError: the file could not be read: the disk is full (No space ...)
    """
    try:
        yield
    except OSError as problem:
        raise from_os_error(problem, what) from problem
    except sqlite3.Error as problem:
        raise from_sqlite_error(problem, what) from problem
    except OverflowError as problem:
        raise StoreError("bad_name", f"{what}: a number has more than 64 bits") from problem
