"""A fixed order for blocks of code in several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from support.clock import PATIENCE_S


class Steps:
    """An order of named steps: `with steps("a"):` in any thread waits until all steps before "a" have ended.

    A block that raises breaks the order, and fails all waits for later steps at once.

    >>> steps = Steps("first", "second")
    >>> with steps("first"):
    ...     pass
    >>> steps.left()
    ['second']
    """

    def __init__(self, *names: str) -> None:
        if len(set(names)) != len(names):
            raise ValueError("each step needs a name of its own")
        self._names = names
        self._turn = threading.Condition()
        self._over = 0  # guarded by _turn; the number of steps that have ended
        self._broken: str | None = None  # guarded by _turn; the step that raised

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        place = self._names.index(name)
        with self._turn:
            if not self._turn.wait_for(lambda: self._over >= place or self._broken, PATIENCE_S):
                raise AssertionError(f"{name!r} never got its turn; next was {self._names[self._over]!r}")
            if self._broken:
                raise AssertionError(f"{name!r} cannot come: {self._broken!r} failed")
        try:
            yield
        except BaseException:
            self._end(place, broken=name)
            raise
        self._end(place)

    def left(self) -> list[str]:
        """The steps that have not ended."""
        with self._turn:
            return list(self._names[self._over :])

    def _end(self, place: int, broken: str | None = None) -> None:
        with self._turn:
            assert self._over == place, f"{self._names[place]!r} ran twice"
            self._over += broken is None
            self._broken = broken
            self._turn.notify_all()
