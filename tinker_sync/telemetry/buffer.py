"""A bounded queue of numbered events that wait to be sent. Any thread may use it."""

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
    """An event without a number.

    >>> Draft("SESSION_START", "INFO", 1_750_000_000.0).key is None
    True
    """

    event: str
    severity: str
    time_s: float
    fields: Mapping[str, Any] = field(factory=dict)
    key: object = None
    """The queue holds at most one event with a given key. None: no key."""
    event_id: str = field(factory=lambda: str(uuid.uuid4()), kw_only=True)
    """Lets the service recognize an event that is sent twice."""


@frozen
class NumberedEvent:
    """A draft and its number among all events of the process."""

    index: int
    draft: Draft


class EventBuffer:
    """A bounded queue of events, which drops events beyond its capacity. Thread-safe.

    >>> buffer = EventBuffer(capacity=1)
    >>> buffer.add(Draft("SESSION_START", "INFO", 0.0)), buffer.add(Draft("SESSION_END", "INFO", 1.0))
    (True, False)
    >>> [event.index for event in buffer.take(100)], buffer
    ([0], <EventBuffer 0 waiting, 1 dropped>)
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._waiting: deque[NumberedEvent] = deque()  # guarded by _lock
        self._keys: set[object] = set()  # guarded by _lock; the keys of waiting events
        self._next = 0  # guarded by _lock
        self._dropped = 0  # guarded by _lock
        self._closed = False  # guarded by _lock; final

    def add(self, draft: Draft) -> bool:
        """Number an event and queue it. Return False if it is dropped."""
        with self._lock:
            if self._closed or draft.key in self._keys:
                return False
            if len(self._waiting) >= self._capacity:
                self._dropped += 1
                return False
            if draft.key is not None:
                self._keys.add(draft.key)
            self._waiting.append(NumberedEvent(self._next, draft))
            self._next += 1
            return True

    def take(self, most: int) -> list[NumberedEvent]:
        """Remove and return the oldest events, at most `most`."""
        with self._lock:
            taken = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            self._keys.difference_update(event.draft.key for event in taken)
            return taken

    def put_back(self, events: Sequence[NumberedEvent]) -> None:
        """Put unsent events back to the front of the queue."""
        with self._lock:
            if not self._closed:
                self._waiting.extendleft(reversed(events))
                self._keys.update(event.draft.key for event in events if event.draft.key is not None)

    def clear(self) -> None:
        """Drop all events."""
        with self._lock:
            self._waiting.clear()
            self._keys.clear()

    def close(self) -> None:
        """Drop all events, and every later one."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._keys.clear()

    @property
    def closed(self) -> bool:
        """True after `close`."""
        with self._lock:
            return self._closed

    def renew_after_fork(self) -> None:
        """Drop the events of the parent process, which sends them itself."""
        self._lock = threading.Lock()
        self._waiting, self._keys, self._next = deque(), set(), 0

    def __len__(self) -> int:
        with self._lock:
            return len(self._waiting)

    def __repr__(self) -> str:
        with self._lock:
            closed = ", closed" if self._closed else ""
            return f"<EventBuffer {len(self._waiting)} waiting, {self._dropped} dropped{closed}>"
