"""`Telemetry`: an observer that sends events to the service in batches.

It does not delay the user: `observe` only appends to a queue, a separate thread sends with short limits, and
sending stops when the server refuses telemetry. Only `close` waits, for a limited time.

The thread `tinker-telemetry` starts when an event comes, and ends when the queue is empty.
"""

from __future__ import annotations

import logging
import platform
import threading
import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, Final

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync._base.events import CallFailed, Event, SessionEnded, SessionStarted
from tinker_sync._base.policy import Meaning, Stage, delay_s, rule_for
from tinker_sync.errors import APIStatusError
from tinker_sync.runtime import _fork
from tinker_sync.runtime.calls import make_call
from tinker_sync.telemetry.reports import Draft, EventBuffer, NumberedEvent, draft_failure
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
# A batch is dropped after this many failures, which takes some minutes.
_MOST_TRIES: Final = 6

_log = logging.getLogger(__name__)


class Telemetry:
    """A sender of the events of one client. Thread-safe, but only one thread may call `step` at a time.

    Args:
        caller: makes the requests.
        settings: the settings of the client.
        buffer: the queue for the events; None for a new one.
        clock: measures time.
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
        self._session_id = f"sessionless-{uuid.uuid4()}"  # replaced when a session starts
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
        self._running = False  # guarded by _lock; the thread exists
        self._noted = False  # guarded by _lock; an event has come since the thread last looked
        self._closed = False  # written under _lock, read without it; final

    # -------------------------------------------------------------------------------------- for any thread

    def observe(self, event: Event) -> None:
        """Queue the start or end of a session or the failure of a call; ignore other events."""
        draft = self._draft(event)
        if draft is not None and self._buffer.add(draft):
            self._start_thread()

    def close(self, limit_s: float) -> None:
        """Send the queued events, then stop and drop those that are left. A second call has no effect.

        The wait for the thread that sends now and the sending take at most `limit_s` together.
        """
        give_up_at = self._clock.now() + limit_s
        with self._lock:
            self._closed = True
        self._wake.set()
        if limit_s > 0 and self._turn.acquire(timeout=limit_s):
            try:
                while len(self._buffer) and self._clock.now() < give_up_at:
                    if not self.step(min(give_up_at - self._clock.now(), _POST_LIMIT_S)):
                        break
            finally:
                self._turn.release()
        self._buffer.close()

    def renew_after_fork(self) -> None:
        """Drop the events of the parent, which the parent sends, and begin as a new process."""
        closed = self._closed
        self._begin()
        self._closed = closed
        self._buffer.renew_after_fork()
        self._process_uuid = str(uuid.uuid4())

    def __repr__(self) -> str:
        return f"<Telemetry {self._buffer!r}>"

    # -------------------------------------------------------------------------------------- sending

    def step(self, limit_s: float = _POST_LIMIT_S) -> bool:
        """Send one batch of at most `BATCH` events. Never raises.

        Return False if there was no event, or if the thread must pause or stop before the next batch.
        """
        batch = self._buffer.take(BATCH)
        if not batch:
            return False
        try:
            self._post(batch, limit_s)
        except APIStatusError as error:
            return self._note_refusal(batch, error)
        except Exception as error:  # noqa: BLE001  # telemetry never raises into the user's program
            return self._note_failure(batch, error)
        self._failures = 0
        return True

    def _post(self, batch: Sequence[NumberedEvent], limit_s: float) -> None:
        request = TelemetrySendRequest(
            events=[_make_event(numbered) for numbered in batch],
            platform=platform.system(),
            sdk_version=self._settings.sdk_version,
            session_id=self._session_id,
            process_uuid=self._process_uuid,
        )
        call = make_call("telemetry", self._settings, request, deadline_s=limit_s)
        self._caller.call(call.but(max_retries=0))

    def _note_refusal(self, batch: Sequence[NumberedEvent], error: APIStatusError) -> bool:
        status = error.status_code
        meaning = rule_for(status, Stage.TELEMETRY).meaning
        if meaning is Meaning.UNWANTED:
            _log.debug("the server refuses telemetry; sending stops: %s", error)
            self._buffer.close()
            return False
        if meaning is Meaning.DROPPED:
            _log.debug("the server rejects this batch of telemetry; it is dropped: %s", error)
            return True
        return self._note_failure(batch, error)

    def _note_failure(self, batch: Sequence[NumberedEvent], error: Exception) -> bool:
        _log.debug("telemetry could not be sent: %s", error)
        self._failures += 1
        if self._failures % _MOST_TRIES:
            self._buffer.put_back(batch)
        elif not self._warned:
            self._warned = True
            _log.warning("telemetry could not be sent and is dropped: %s", error)
        return False

    # -------------------------------------------------------------------------------------- the thread

    def _start_thread(self) -> None:
        with self._lock:
            self._noted = True
            start = not self._running and not self._closed
            self._running = self._running or start
        if start:
            try:
                threading.Thread(target=self._loop, name="tinker-telemetry", daemon=True).start()
            except RuntimeError:  # the system gives no thread; `close` may still send the event
                with self._lock:
                    self._running = False

    def _loop(self) -> None:
        while self._go_on():
            self._clock.wait(
                self._wake, delay_s(self._failures + 1, draw=1.0, first_s=FLUSH_S, longest_s=_LONGEST_PAUSE_S)
            )
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

    def _draft(self, event: Event) -> Draft | None:
        now_s = self._clock.time()
        if isinstance(event, SessionStarted):
            self._session_id, self._began_s = event.session_id, self._clock.now()
            return Draft("SESSION_START", "INFO", now_s)
        if isinstance(event, SessionEnded):
            duration = timedelta(seconds=self._clock.now() - self._began_s)
            return Draft("SESSION_END", "INFO", now_s, {"duration": str(duration)})
        if isinstance(event, CallFailed):
            return draft_failure(event.error, now_s)
        return None


_KINDS: Final[dict[str, type[Any]]] = {
    "SESSION_START": SessionStartEvent,
    "SESSION_END": SessionEndEvent,
    "UNHANDLED_EXCEPTION": UnhandledExceptionEvent,
    "GENERIC_EVENT": GenericEvent,
}


def _make_event(numbered: NumberedEvent) -> Any:
    draft = numbered.draft
    return _KINDS[draft.event](
        event=draft.event,
        event_id=draft.event_id,
        event_session_index=numbered.index,
        severity=draft.severity,
        timestamp=datetime.fromtimestamp(draft.time_s, tz=timezone.utc),
        **draft.fields,
    )
