"""Which bytes of a file are there: disjoint stretches, begin included and end not. Pure, not thread-safe."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Stretch = tuple[int, int]


class Coverage:
    """A set of bytes by their places.

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
        """Add a stretch; it may overlap with what is there."""
        if end <= begin:
            return
        first = bisect_left(self._ends, begin)  # the first that touches
        last = bisect_right(self._begins, end)  # behind the last that does
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        pairs = zip(self._begins[first:last], self._ends[first:last], strict=True)
        self.total += end - begin - sum(e - b for b, e in pairs)
        self._begins[first:last] = [begin]
        self._ends[first:last] = [end]

    def gaps(self, size: int) -> Iterator[Stretch]:
        """What is missing of the first `size` bytes."""
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
