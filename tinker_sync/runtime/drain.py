"""`Drain`: a queue of items for a few workers. A single worker begins, and more join if items pile up.

Threads that share one interpreter gain nothing from more workers. Any thread may add items.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeVar

from tinker_sync.runtime.tickets import Runner

T = TypeVar("T")

# One more worker starts for each group of this many waiting items.
_ITEMS_PER_WORKER: Final = 32
_MOST_WORKERS: Final = 8


class Drain(Generic[T]):
    """A queue of items that workers handle in order. Thread-safe. Owners make a new one in a forked child.

    Args:
        workers: the pool that runs `handle`.
        handle: handles one item; it may block, and must not raise.
        refuse: receives an item and the reason why no worker takes it.
    """

    def __init__(
        self, workers: Runner, handle: Callable[[T], object], refuse: Callable[[T, Exception], object]
    ) -> None:
        self._workers = workers
        self._handle = handle
        self._refuse = refuse
        self.items: deque[T] = deque()
        """The waiting items; a worker takes the first one in one atomic step."""
        self._lock = threading.Lock()
        self._busy = 0  # guarded by _lock; the workers that handle items

    @property
    def first(self) -> T | None:
        """The next item to handle; None if no item waits."""
        try:
            return self.items[0]
        except IndexError:
            return None

    def add(self, items: Iterable[T], *, held_up: bool = False) -> None:
        """Add items. With `held_up`, start one more worker, because the busy workers make no progress."""
        self.items.extend(items)
        with self._lock:
            start = self._busy < _MOST_WORKERS and (
                len(self.items) > self._busy * _ITEMS_PER_WORKER or (held_up and bool(self.items))
            )
            self._busy += start
        if not start:
            return
        try:
            self._workers.run(self._work)
        except RuntimeError as error:
            with self._lock:
                self._busy -= 1
            while (item := self._take()) is not None:
                self._refuse(item, error)

    def _take(self) -> T | None:
        try:
            return self.items.popleft()
        except IndexError:
            return None

    def _work(self) -> None:
        """Handle items on one worker until no item is left."""
        while True:
            item = self._take()
            if item is None:
                with self._lock:
                    if not self.items:
                        self._busy -= 1
                        return
                continue
            try:
                self._handle(item)
            except BaseException:
                with self._lock:
                    self._busy -= 1
                self.add(())
                raise
