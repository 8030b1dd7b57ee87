"""Notice when code makes a Python list of a long array."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def long_lists(longer_than: int = 64) -> Iterator[list[int]]:
    """The sizes of the arrays whose `tolist` this thread calls inside the block, short ones left out.

    numpy's method cannot be replaced, and the code under test strips off a subclass that counts; but
    the interpreter's profiler sees every call.
    """
    sizes: list[int] = []

    def look(_: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ == "tolist" and called.__self__.size > longer_than:
            sizes.append(called.__self__.size)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield sizes
    finally:
        sys.setprofile(before)
