"""Events that wait to be sent: few, small, numbered in the order in which they came."""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import field, frozen

CAPACITY: Final = 1000


@frozen
class Draft:
    """An event before it has a number.

    >>> Draft("SESSION_START", "INFO", 1_750_000_000.0).key is None
    True
    """

    event: str
    severity: str
    time_s: float
    fields: Mapping[str, Any] = field(factory=dict)
    key: object = None
    """Of several with the same key only the first is kept until it is sent; None: it is always kept."""
    event_id: str = field(factory=lambda: str(uuid.uuid4()), kw_only=True)
    """By which the service tells a repetition."""


@frozen
class Numbered:
    """A draft and its place among all events of the process."""

    index: int
    draft: Draft


class EventBuffer:
    """A bounded queue of events. What does not fit is dropped: news of failures must not become one.
    Thread-safe.

    >>> buffer = EventBuffer(capacity=1)
    >>> buffer.add(Draft("SESSION_START", "INFO", 0.0)), buffer.add(Draft("SESSION_END", "INFO", 1.0))
    (True, False)
    >>> [event.index for event in buffer.take(100)], buffer
    ([0], <EventBuffer 0 waiting, 1 dropped>)
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._waiting: deque[Numbered] = deque()  # guarded by _lock
        self._keys: set[object] = set()  # guarded by _lock; of those that wait
        self._next = 0  # guarded by _lock
        self._dropped = 0  # guarded by _lock
        self._closed = False  # guarded by _lock; final

    def add(self, draft: Draft) -> bool:
        """Number an event and keep it; False when it is dropped."""
        with self._lock:
            if self._closed or draft.key in self._keys:
                return False
            if len(self._waiting) >= self._capacity:
                self._dropped += 1
                return False
            if draft.key is not None:
                self._keys.add(draft.key)
            self._waiting.append(Numbered(self._next, draft))
            self._next += 1
            return True

    def take(self, most: int) -> list[Numbered]:
        """Remove the oldest events."""
        with self._lock:
            taken = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            self._keys.difference_update(event.draft.key for event in taken)
            return taken

    def put_back(self, events: Sequence[Numbered]) -> None:
        """Keep what could not be sent, before all others."""
        with self._lock:
            if not self._closed:
                self._waiting.extendleft(reversed(events))
                self._keys.update(event.draft.key for event in events if event.draft.key is not None)

    def clear(self) -> None:
        """Forget what waits."""
        with self._lock:
            self._waiting.clear()
            self._keys.clear()

    def close(self) -> None:
        """Forget what waits, and whatever comes later."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._keys.clear()

    @property
    def closed(self) -> bool:
        """Whether nothing is kept any more."""
        with self._lock:
            return self._closed

    def renew_after_fork(self) -> None:
        """The parent's events are sent by the parent."""
        self._lock = threading.Lock()
        self._waiting, self._keys, self._next = deque(), set(), 0

    def __len__(self) -> int:
        with self._lock:
            return len(self._waiting)

    def __repr__(self) -> str:
        with self._lock:
            closed = ", closed" if self._closed else ""
            return f"<EventBuffer {len(self._waiting)} waiting, {self._dropped} dropped{closed}>"
