"""One thread for products of small matrices.

numpy's BLAS splits products among all cores. For matrices as small as those of a built-in model that gains
nothing, and where cores are busy it costs dearly: threads wait for each other at every product. Measured on
two busy cores, a pass over one short datum took 20 to 110 ms with two threads and 3.5 ms with one. As long
as a host of small models computes, BLAS has one thread; the host's own two use two cores all the same.

Only OpenBLAS, which numpy's wheels bring along, is known here. With another BLAS nothing happens.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

SMALL: Final = 1024
"""Models up to this width are computed with one thread."""

_PREFIXES: Final = ("scipy_openblas", "openblas")
_SUFFIXES: Final = ("64_", "")


class OneThread:
    """Holds BLAS to one thread from `acquire` until as many `release`. Thread-safe.

    >>> guard = OneThread()
    >>> guard.acquire(); guard.release()
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0  # guarded by _lock
        self._before = 0  # guarded by _lock

    def acquire(self) -> None:
        """From now on."""
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._before = _get_threads()
                _set_threads(1)

    def release(self) -> None:
        """The last one sets it back."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and self._before:
                _set_threads(self._before)


ONE_THREAD: Final = OneThread()
"""The guard of this process."""


def _get_threads() -> int:
    """How many threads BLAS uses; 0 where that is not known."""
    get = _function("get_num_threads")
    return int(get()) if get is not None else 0


def _set_threads(count: int) -> None:
    change = _function("set_num_threads")
    if change is not None:
        change(ctypes.c_int(count))


@cache
def _function(name: str) -> Callable[..., Any] | None:
    """A function of the OpenBLAS that numpy has loaded."""
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
