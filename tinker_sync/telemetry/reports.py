"""Events without the user's data, and the bounded queue in which they wait to be sent.

The text of an error may quote a prompt, a key, an address or a path on the user's machine. So the report of
an error is built from fields of known meaning, and a traceback is reduced to this package's frames, as module
and line. Any thread may call this module.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from attrs import field, frozen

from tinker_sync._base.secret import mask_text
from tinker_sync.errors import APIStatusError, InvalidInputError, RequestErrorCategory, RequestFailedError

CAPACITY: Final = 1000


@frozen
class Draft:
    """An event before it is queued, without a number.

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
    """A draft and its number among the events of its queue, from 0."""

    index: int
    draft: Draft


class EventBuffer:
    """A bounded queue of events. While it is full, it drops new events. Thread-safe.

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
        """Number an event, queue it and return True.

        Return False for an event that is dropped, because the queue is full or closed or has an event with
        the same key.
        """
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
        """Put unsent events back to the front of the queue, even a full one. Drop them if it is closed.

        Also drop each event whose key a waiting event has.
        """
        with self._lock:
            if not self._closed:
                events = [event for event in events if event.draft.key not in self._keys]
                self._waiting.extendleft(reversed(events))
                self._keys.update(event.draft.key for event in events if event.draft.key is not None)

    def close(self) -> None:
        """Drop all events, and every later one."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._keys.clear()

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


_PACKAGE: Final = "tinker_sync."
_PLAIN: Final = re.compile(r"[\w.:/%{}\-]{1,300}")
_MAX_FRAMES: Final = 20
_MAX_CHAIN: Final = 8
_MAX_TEXT: Final = 2000
# These attributes have the same meaning in every error of this package.
_SAFE_FIELDS: Final = (
    ("status_code", "status {}"),
    ("category", "category {}"),
    ("method", "{}"),
    ("path", "{}"),
    ("request_id", "request {}"),
    ("attempts", "{} attempts"),
)


def draft_failure(error: BaseException, time_s: float) -> Draft:
    """Return the event for a failure that reached the user: a warning if `is_user_error`, else an error."""
    kind, message = type(error).__name__, describe(error)
    if is_user_error(error):
        data: dict[str, Any] = {"error_type": kind, "message": message}
        status = getattr(error, "status_code", None)
        if isinstance(status, int):
            data["status_code"] = status
        fields: dict[str, Any] = {"event_name": "user_error", "event_data": data}
        return Draft("GENERIC_EVENT", "WARNING", time_s, fields, key=(kind, message))
    fields = {"error_type": kind, "error_message": message, "traceback": locate(error) or None}
    return Draft("UNHANDLED_EXCEPTION", "ERROR", time_s, fields, key=(kind, message))


def describe(error: BaseException) -> str:
    """Return those fields of an error that have a known meaning and no free text, joined into one text.

    >>> describe(APIStatusError("tokens [1, 2, 3] are too many", status_code=413, method="POST"))
    'status 413, POST'
    """
    found = [(pattern, getattr(error, name, None)) for name, pattern in _SAFE_FIELDS]
    text = ", ".join(pattern.format(value) for pattern, value in found if _is_plain(value))
    return mask_text(text)[:_MAX_TEXT]


def _is_plain(value: object) -> bool:
    """Return True for a nonzero number, and for text that looks like a name, a path or an id."""
    return bool(value) and (
        isinstance(value, int) or (isinstance(value, str) and bool(_PLAIN.fullmatch(value)))
    )


def is_user_error(error: BaseException) -> bool:
    """Return True if an error is taken for one of the user: of the input, the key or the account.

    The error, or one of its causes, is then an `InvalidInputError`, a failure of the category `User`, or a
    status 4xx other than 408.

    >>> is_user_error(InvalidInputError("no data")), is_user_error(KeyError("data"))
    (True, False)
    """
    for each in _chain(error):
        if isinstance(each, InvalidInputError):
            return True
        if isinstance(each, RequestFailedError) and each.category is RequestErrorCategory.User:
            return True
        if isinstance(each, APIStatusError) and 400 <= each.status_code < 500 and each.status_code != 408:
            return True
    return False


def locate(error: BaseException) -> str:
    """Return the frames of this package in the tracebacks of an error and its causes, as module and line.

    Of long tracebacks and chains, only a part is returned.
    """
    lines = []
    for each in _chain(error):
        frames = list(_package_frames(each.__traceback__))[-_MAX_FRAMES:]
        lines += [f"{type(each).__name__}:", *(f"  {frame}" for frame in frames)] if frames else []
    return "\n".join(lines)[:_MAX_TEXT]


def _chain(error: BaseException) -> Iterator[BaseException]:
    each: BaseException | None = error
    for _ in range(_MAX_CHAIN):
        if each is None:
            return
        yield each
        each = each.__cause__ or each.__context__


def _package_frames(traceback: TracebackType | None) -> Iterator[str]:
    while traceback is not None:
        module = str(traceback.tb_frame.f_globals.get("__name__"))
        if module.startswith(_PACKAGE):
            yield f"{module}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
