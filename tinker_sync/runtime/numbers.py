"""Numbers in order, for whoever has to draw one."""

from __future__ import annotations

import itertools
from collections.abc import Callable


def numbers(start: int = 0) -> Callable[[], int]:
    """Draws `start`, `start + 1` and so on; any thread may draw, for one step of the counter is indivisible.

    >>> draw = numbers()
    >>> draw(), draw()
    (0, 1)
    """
    counter = itertools.count(start)
    return lambda: next(counter)
