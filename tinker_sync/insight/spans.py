"""`Spans`: an OpenTelemetry span for each request of the user's calls, made when it ends."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tinker_sync._base.events import CallMade, Events, ReplyReceived, RequestLost
from tinker_sync._base.log import Log
from tinker_sync.errors import MissingExtraError
from tinker_sync.insight.following import CallFollower, CallRecord

if TYPE_CHECKING:
    from typing_extensions import Self

    from tinker_sync._base.clock import Clock
    from tinker_sync.runtime.futures import APIFuture

    Submit = Callable[[Callable[[], object]], object]

_log: Final = Log(__name__)
_PATIENCE_S: Final = 5.0
# What the start of a phase is called as an event of a span. The span itself begins with the first phase.
_EVENTS: Final = {"sending_s": "sending", "accepted_s": "accepted by the server", "decoding_s": "answered"}


class Spans(CallFollower):
    """What `ServiceClient.spans` returns, in force until its `with` block ends, or `close`. Thread-safe."""

    def __init__(self, events: Events, clock: Clock, run: Submit, tracer: Any = None) -> None:
        try:
            self._api: Any = importlib.import_module("opentelemetry.trace")
            self._context: Any = importlib.import_module("opentelemetry.context")
        except ImportError as error:
            raise MissingExtraError("otel", feature="ServiceClient.spans") from error
        super().__init__(clock)
        self._run = (
            run  # on a worker, because a processor of spans may send them, and the reactor never waits
        )
        self._tracer = self._api.get_tracer("tinker_sync") if tracer is None else tracer
        self._begun: dict[APIFuture[Any], tuple[Any, Any]] = {}
        """The context of each call that is under way, and the client's part that knows its model."""
        self._in_the_making: dict[threading.Event, None] = {}
        self._stop = events.listen(self, CallMade, ReplyReceived, RequestLost)

    def close(self) -> None:
        """Make the spans of calls that have ended, wait some seconds for that, and end. Idempotent."""
        self._stop()
        self._catch_up()
        for made in list(self._in_the_making):
            made.wait(_PATIENCE_S)
        self._under_way.clear()
        self._begun.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def observe(self, event: Any) -> None:
        """Follow a call, or note when an answer came."""
        if isinstance(event, CallMade):
            self._begun[event.future] = (self._context.get_current(), event.line)
            self._follow(event)
        else:
            self._note_answer(event, self._clock.now())

    def _ended(self, future: APIFuture[Any], record: CallRecord) -> None:
        made = threading.Event()
        self._in_the_making[made] = None  # first, so that `close` finds each span begun or in the making
        begun = self._begun.pop(future, None)
        if begun is None:
            del self._in_the_making[made]
            made.set()
            return
        self._claim(future)
        job = partial(self._make, future, record, *begun, made)
        try:
            self._run(job)
        except RuntimeError:  # the client is closed
            job()

    def _make(
        self, future: APIFuture[Any], record: CallRecord, context: Any, line: Any, made: threading.Event
    ) -> None:
        since_epoch_s = self._clock.time() - self._clock.now()

        def nanoseconds(moment_s: float) -> int:
            return int((since_epoch_s + moment_s) * 1e9)

        try:
            span = self._tracer.start_span(
                record.method,
                context=context,
                kind=self._api.SpanKind.CLIENT,
                attributes=_attributes(future, record, line),
                start_time=nanoseconds(record.queued_s),
            )
            for field, name in _EVENTS.items():
                moment_s = getattr(record, field)
                if moment_s is not None:
                    span.add_event(name, timestamp=nanoseconds(moment_s))
            if record.outcome not in ("ok", "cancelled"):
                span.set_status(self._api.Status(self._api.StatusCode.ERROR, record.outcome))
            span.end(end_time=nanoseconds(record.completed_s))
        except Exception:  # noqa: BLE001  # a tracer must not disturb the client
            _log.exception("a span cannot be made; the client goes on")
        finally:
            self._in_the_making.pop(made, None)
            made.set()


def _attributes(future: APIFuture[Any], record: CallRecord, line: Any) -> dict[str, str]:
    found = {
        "tinker.method": record.method,
        "tinker.outcome": record.outcome,
        "tinker.request_id": future.request_id,
        "tinker.model": getattr(line, "model_id", None) or getattr(line, "sampling_session_id", None),
        "tinker.base_model": getattr(line, "base_model", None),
        "error.type": None if record.outcome in ("ok", "cancelled") else record.outcome,
    }
    return {name: value for name, value in found.items() if value}
