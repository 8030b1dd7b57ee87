"""Reports about requests, for the log and the observers.

The log lines have headers and bodies redacted, and bodies cut. Most are at DEBUG, and are formatted only if
that level is enabled. Any thread may call the methods.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

from tinker_sync._observe import (
    Event,
    Observer,
    Redirected,
    ReplyReceived,
    RequestLost,
    RequestSent,
    RetryScheduled,
)
from tinker_sync._secret import Secret
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.transport.redact import curl, redact_body, redact_headers, redact_text
from tinker_sync.transport.request import Headers

_logger: Final = logging.getLogger(__name__)


class Journal:
    """A reporter of the events of requests, to the log and to observers. Thread-safe; never raises.

    Args:
        observer: receives every event; None for no observer.
        base_url: the base of the addresses in curl lines.
        as_curl: True to log each request as a curl line, too.
        secrets: returns the values to mask in the log.
    """

    def __init__(
        self,
        observer: Observer | None = None,
        *,
        base_url: str = "",
        as_curl: bool = False,
        secrets: Callable[[], Iterable[Secret]] = lambda: (),
    ) -> None:
        self.observers: tuple[Observer, ...] = () if observer is None else (observer,)
        """The observers: a tuple that is replaced, never changed. Callers check it and the level of `log`
        before they report.
        """
        self.log = _logger
        self._base_url = base_url
        self._as_curl = as_curl
        self._secrets = secrets

    def listen(self, observer: Observer) -> Callable[[], None]:
        """Add an observer, and return a function that removes it."""
        self.observers = (*self.observers, observer)

        def stop() -> None:
            self.observers = tuple(one for one in self.observers if one is not observer)

        return stop

    def sent(self, call: Call, headers: Headers) -> None:
        """Report that a request was sent with these headers."""
        size_bytes = len(call.body or b"")
        if self.observers:
            self._tell(
                RequestSent(method=call.method, path=call.path, attempt=call.attempt, size_bytes=size_bytes)
            )
        if not _logger.isEnabledFor(logging.DEBUG):
            return
        sent, secrets = dict(headers.values()), tuple(self._secrets())
        if self._as_curl:
            _logger.debug("%s", curl(call, self._base_url, sent, secrets))
        shown = redact_body(call.body, call.content_type, secrets)
        _logger.debug(
            "%s %s, attempt %d, %d bytes, headers %s %s",
            call.method, call.path, call.attempt, size_bytes, redact_headers(sent, secrets), shown,
        )  # fmt: skip

    def answered(self, call: Call, reply: Reply, duration_s: float) -> None:
        """Report that the whole answer has arrived."""
        if self.observers:
            self._tell(
                ReplyReceived(
                    method=call.method,
                    path=call.path,
                    attempt=call.attempt,
                    status=reply.status,
                    size_bytes=len(reply.body),
                    duration_s=duration_s,
                )
            )
        if not _logger.isEnabledFor(logging.DEBUG):
            return
        secrets = tuple(self._secrets())
        shown = redact_body(reply.body, reply.headers.get("content-type", ""), secrets)
        _logger.debug(
            "%s %s: %d in %.3f s, %d bytes, headers %s %s",
            call.method, call.path, reply.status, duration_s, len(reply.body),
            redact_headers(reply.headers, secrets), shown,
        )  # fmt: skip

    def lost(self, call: Call, failed: SendFailed, duration_s: float) -> None:
        """Report that the attempt has ended without an answer."""
        self._tell(
            RequestLost(
                method=call.method,
                path=call.path,
                attempt=call.attempt,
                reason=type(failed.cause or failed).__name__,
                maybe_received=failed.maybe_received,
                duration_s=duration_s,
            )
        )
        if _logger.isEnabledFor(logging.DEBUG):
            text = redact_text(failed.message, self._secrets())
            _logger.debug("%s %s: no answer after %.3f s: %s", call.method, call.path, duration_s, text)

    def redirected(self, call: Call, status: int, *, same_origin: bool, to: str) -> None:
        """Report that the client follows a redirect."""
        self._tell(Redirected(method=call.method, path=call.path, status=status, same_origin=same_origin))
        if same_origin:
            _logger.debug("%s %s: redirected (%d)", call.method, call.path, status)
        else:
            # This explains to a user with http:// or an old host why the server does not accept the key.
            _logger.info("%s %s: redirected to %s, without credentials", call.method, call.path, to)

    def retrying(self, call: Call, delay_s: float, reason: str) -> None:
        """Report that the client repeats the call after a pause."""
        self._tell(
            RetryScheduled(
                method=call.method, path=call.path, attempt=call.attempt, delay_s=delay_s, reason=reason
            )
        )
        _logger.debug("%s %s: again in %.2f s (%s)", call.method, call.path, delay_s, reason)

    def _tell(self, event: Event) -> None:
        for observer in self.observers:
            try:
                observer.observe(event)
            except Exception:
                _logger.exception("an observer raised; the request goes on")
