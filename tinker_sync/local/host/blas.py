"""A limit of one BLAS thread for products of small matrices.

numpy's BLAS splits products among all cores. For the small matrices of the built-in model this gains nothing,
and on busy cores its threads wait for each other at every product: on two busy cores, a pass over one short
datum took 20 to 110 ms with two threads and 3.5 ms with one. So BLAS has one thread from the first
computation of a host of small models until the host is closed. The host's own two threads still use two
cores.

The limit works with OpenBLAS, which numpy's wheels include. With another BLAS it has no effect.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

SMALL_WIDTH: Final = 1024
"""A host whose models have at most this hidden size limits BLAS to one thread."""

_PREFIXES: Final = ("scipy_openblas", "openblas")
_SUFFIXES: Final = ("64_", "")


class BlasThreadGuard:
    """A limit of one BLAS thread, in force while there is at least one holder. Thread-safe.

    A holder has called `acquire` and has not called `release` yet.

    >>> guard = BlasThreadGuard()
    >>> guard.acquire(); guard.release()
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0  # guarded by _lock
        self._before = 0  # guarded by _lock

    def acquire(self) -> None:
        """Add a holder; the first one sets the limit."""
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._before = count_threads()
                set_threads(1)

    def release(self) -> None:
        """Remove a holder; the last one restores the number of threads."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and self._before:
                set_threads(self._before)


ONE_BLAS_THREAD: Final = BlasThreadGuard()
"""The guard of this process."""


def count_threads() -> int:
    """Return the number of BLAS threads, or 0 if numpy's BLAS is not OpenBLAS."""
    get = _find_function("get_num_threads")
    return int(get()) if get is not None else 0


def set_threads(count: int) -> None:
    """Set the number of BLAS threads if numpy's BLAS is OpenBLAS."""
    change = _find_function("set_num_threads")
    if change is not None:
        change(ctypes.c_int(count))


@cache
def _find_function(name: str) -> Callable[..., Any] | None:
    """Return a function of numpy's OpenBLAS, or None if there is no OpenBLAS.

    `name` lacks the prefix and the suffix, which depend on the build of the library.
    """
    numpy = Path(np.__file__).parent
    for folder in (numpy.parent / "numpy.libs", numpy / ".dylibs", numpy / ".libs"):
        for path in sorted(folder.glob("*openblas*")):
            try:
                library = ctypes.CDLL(str(path))
            except OSError:
                continue
            for prefix in _PREFIXES:
                for suffix in _SUFFIXES:
                    found: Callable[..., Any] | None = getattr(library, f"{prefix}_{name}{suffix}", None)
                    if found is not None:
                        return found
    return None
