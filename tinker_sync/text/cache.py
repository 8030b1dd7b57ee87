"""Loaded tokenizers, each loaded once however many threads ask for it at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from tinker_sync.runtime import _fork
from tinker_sync.runtime.once import Once

T = TypeVar("T")


class LoadedOnce(Generic[T]):
    """The last values by their keys. Failures are told to all who waited, then forgotten. Thread-safe.

    >>> loaded = LoadedOnce(2)
    >>> loaded.get("a", lambda: "first"), loaded.get("a", lambda: "second")
    ('first', 'first')
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Once[T]] = (
            OrderedDict()
        )  # guarded by _lock; the last used at the end
        _fork.renew_in_child(self)

    def get(self, key: Hashable, load: Callable[[], T]) -> T:
        """The value of a key; whoever asks first loads it, whoever asks meanwhile waits."""
        new: Once[T] = Once()
        with self._lock:
            once = self._kept.setdefault(key, new)
            self._kept.move_to_end(key)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return once.get(load)

    def clear(self) -> None:
        """Forget everything; who holds a value keeps it."""
        with self._lock:
            self._kept.clear()

    def renew_after_fork(self) -> None:
        """The lock may be held by a thread that only the parent has."""
        self._lock = threading.Lock()
