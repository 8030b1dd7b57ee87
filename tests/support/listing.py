"""A check that code makes no Python list of a long array."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def long_lists(longer_than: int = 64) -> Iterator[list[int]]:
    """Yield a list that gets the size of each array whose `tolist` this thread calls in the block.

    Arrays of up to `longer_than` cells are ignored. The calls are counted with the profiler of the
    interpreter: numpy's method cannot be replaced, and the code under test converts subclasses to plain
    arrays.
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
