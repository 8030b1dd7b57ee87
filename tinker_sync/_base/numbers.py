"""Numbers and keys that several threads draw from one iterator, each a different one."""

from __future__ import annotations

import itertools
import sys
import threading
import uuid
from collections.abc import Iterator
from typing import Final

# `next` of a count is one step under the global lock, and in each build of Python 3.14 and later. In 3.13
# without a global lock, two threads may get the same number.
_ATOMIC: Final = sys.version_info >= (3, 14) or "t" not in getattr(sys, "abiflags", "")


def numbers(first: int = 0) -> Iterator[int]:
    """Return an iterator of the numbers from `first` on, for any threads and signal handlers.

    >>> drawn = numbers(5)
    >>> next(drawn), next(drawn)
    (5, 6)
    """
    return itertools.count(first) if _ATOMIC else _Locked(first)


def unique_keys() -> Iterator[str]:
    """Return an iterator of globally unique keys. Thread-safe.

    >>> keys = unique_keys()
    >>> next(keys) != next(keys)
    True
    """
    return map(f"{uuid.uuid4()}-{{}}".format, numbers())


class _Locked(Iterator[int]):
    """A count that one thread at a time draws from."""

    def __init__(self, first: int) -> None:
        self._count = itertools.count(first)
        self._lock = threading.RLock()  # a signal handler may draw on top of a draw

    def __next__(self) -> int:
        with self._lock:
            return next(self._count)
