"""`Telemetry`: an observer that sends what it sees to the service, in batches, now and then.

It must never be felt: noting an event takes no longer than appending it to a list, sending happens on a
thread of its own with short limits, and a server that does not want it is not asked again. `close` is the
only one that waits, no longer than it is told to.

The thread is `tinker-telemetry`; it starts with the first event and ends when there is none left.
"""

from __future__ import annotations

import logging
import platform
import threading
import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync._observe import CallFailed, Event, SessionEnded, SessionStarted
from tinker_sync.errors import APIStatusError
from tinker_sync.runtime import _fork
from tinker_sync.runtime.calls import make_call
from tinker_sync.telemetry.buffer import Draft, EventBuffer, Numbered
from tinker_sync.telemetry.reports import draft_of_failure
from tinker_sync.types.events import (
    GenericEvent,
    SessionEndEvent,
    SessionStartEvent,
    TelemetrySendRequest,
    UnhandledExceptionEvent,
)

if TYPE_CHECKING:
    from tinker_sync.config import Settings
    from tinker_sync.transport.caller import Caller

BATCH: Final = 100
FLUSH_S: Final = 10.0
_LONGEST_PAUSE_S: Final = 300.0
_POST_LIMIT_S: Final = 5.0
# A batch is dropped after so many failures, which takes some minutes.
_MOST_TRIES: Final = 6
# Who answers like this will go on doing so: there is no such call, or not for us.
_UNWANTED: Final = frozenset({401, 403, 404, 405, 410, 501})
_PASSING: Final = frozenset({408, 425, 429})

_log = logging.getLogger(__name__)


class Telemetry:
    """Sends events of one client. Thread-safe; `step` is for one thread at a time.

    Args:
        caller: makes the calls.
        settings: of the client.
        clock: what time it is.
    """

    def __init__(
        self,
        caller: Caller,
        settings: Settings,
        *,
        buffer: EventBuffer | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._caller = caller
        self._settings = settings
        self._clock = clock
        self._buffer = EventBuffer() if buffer is None else buffer
        self._session_id = f"sessionless-{uuid.uuid4()}"  # replaced once there is a session
        self._process_uuid = str(uuid.uuid4())
        self._began_s = clock.now()
        self._failures = 0  # only `step` touches it
        self._warned = False  # likewise
        self._begin()
        _fork.renew_in_child(self)

    def _begin(self) -> None:
        self._wake = threading.Event()
        self._turn = threading.Semaphore()  # one thread sends at a time; a permit, since sending is I/O
        self._lock = threading.Lock()
        self._running = False  # guarded by _lock; there is a thread
        self._noted = False  # guarded by _lock; an event has come since the thread last looked
        self._closed = False  # written under _lock, read without; final

    # -------------------------------------------------------------------------------------- for everybody

    def observe(self, event: Event) -> None:
        """Take note of an event, if it is one to be sent."""
        draft = self._draft_of(event)
        if draft is not None and self._buffer.add(draft):
            self._have_sent()

    def close(self, limit_s: float) -> None:
        """Send what there is, within `limit_s`; then stop. May be called again."""
        with self._lock:
            self._closed = True
        self._wake.set()
        if limit_s > 0 and self._turn.acquire(timeout=limit_s):
            try:
                give_up_at = self._clock.now() + limit_s
                while len(self._buffer) and self._clock.now() < give_up_at:
                    if not self.step(min(give_up_at - self._clock.now(), _POST_LIMIT_S)):
                        break
            finally:
                self._turn.release()
        self._buffer.close()

    def renew_after_fork(self) -> None:
        """The child is another process; what the parent has seen is the parent's to tell."""
        closed = self._closed
        self._begin()
        self._closed = closed
        self._buffer.renew_after_fork()
        self._process_uuid = str(uuid.uuid4())

    def __repr__(self) -> str:
        return f"<Telemetry {self._buffer!r}>"

    # -------------------------------------------------------------------------------------- sending

    def step(self, limit_s: float = _POST_LIMIT_S) -> bool:
        """Send one batch; whether it, or the next, is worth sending at once."""
        batch = self._buffer.take(BATCH)
        if not batch:
            return False
        try:
            self._post(batch, limit_s)
        except APIStatusError as error:
            return self._refused(batch, error)
        except Exception as error:  # noqa: BLE001  # whatever it is, the user is not to be bothered
            return self._failed(batch, error)
        self._failures = 0
        return True

    def _post(self, batch: Sequence[Numbered], limit_s: float) -> None:
        request = TelemetrySendRequest(
            events=[_event_of(numbered) for numbered in batch],
            platform=platform.system(),
            sdk_version=self._settings.sdk_version,
            session_id=self._session_id,
            process_uuid=self._process_uuid,
        )
        call = make_call("telemetry", self._settings, request, deadline_s=limit_s)
        self._caller.call(evolve(call, max_retries=0))

    def _refused(self, batch: Sequence[Numbered], error: APIStatusError) -> bool:
        status = error.status_code
        if status in _UNWANTED:
            _log.debug("the server wants no telemetry: %s", error)
            self._buffer.close()
            return False
        if 400 <= status < 500 and status not in _PASSING:
            _log.debug("the server does not understand our telemetry; it is dropped: %s", error)
            return True
        return self._failed(batch, error)

    def _failed(self, batch: Sequence[Numbered], error: Exception) -> bool:
        _log.debug("telemetry could not be sent: %s", error)
        self._failures += 1
        if self._failures % _MOST_TRIES:
            self._buffer.put_back(batch)
        elif not self._warned:
            self._warned = True
            _log.warning("telemetry could not be sent and is dropped: %s", error)
        return False

    # -------------------------------------------------------------------------------------- the thread

    def _have_sent(self) -> None:
        with self._lock:
            self._noted = True
            start = not self._running and not self._closed
            self._running = self._running or start
        if start:
            try:
                threading.Thread(target=self._loop, name="tinker-telemetry", daemon=True).start()
            except RuntimeError:  # no thread is to be had; `close` may still send it
                with self._lock:
                    self._running = False

    def _loop(self) -> None:
        while self._go_on():
            self._clock.wait(self._wake, min(FLUSH_S * 2.0 ** min(self._failures, 8), _LONGEST_PAUSE_S))
            with self._turn:
                while not self._closed and self.step():
                    pass

    def _go_on(self) -> bool:
        with self._lock:
            self._noted = False
        waiting = len(self._buffer) > 0
        with self._lock:
            self._running = not self._closed and (waiting or self._noted)
            return self._running

    # -------------------------------------------------------------------------------------- events

    def _draft_of(self, event: Event) -> Draft | None:
        now_s = self._clock.time()
        if isinstance(event, SessionStarted):
            self._session_id, self._began_s = event.session_id, self._clock.now()
            return Draft("SESSION_START", "INFO", now_s)
        if isinstance(event, SessionEnded):
            duration = timedelta(seconds=self._clock.now() - self._began_s)
            return Draft("SESSION_END", "INFO", now_s, {"duration": str(duration)})
        if isinstance(event, CallFailed):
            return draft_of_failure(event.error, now_s)
        return None


_KINDS: Final[dict[str, type[Any]]] = {
    "SESSION_START": SessionStartEvent,
    "SESSION_END": SessionEndEvent,
    "UNHANDLED_EXCEPTION": UnhandledExceptionEvent,
    "GENERIC_EVENT": GenericEvent,
}


def _event_of(numbered: Numbered) -> Any:
    draft = numbered.draft
    return _KINDS[draft.event](
        event=draft.event,
        event_id=draft.event_id,
        event_session_index=numbered.index,
        severity=draft.severity,
        timestamp=datetime.fromtimestamp(draft.time_s, tz=timezone.utc),
        **draft.fields,
    )
