"""Reports about requests, for the log and for observers, the objects that receive the events of a client.

Log lines show headers and bodies with secrets masked, and only the beginning of a body. Most lines are at
DEBUG, and are formatted only if that level is enabled. Any thread may call the methods.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from tinker_sync._base.events import (
    Event,
    Observer,
    Redirected,
    ReplyReceived,
    RequestLost,
    RequestSent,
    RetryScheduled,
)
from tinker_sync._base.secret import Secret, mask_headers, mask_text
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.transport.redact import curl, redact_body
from tinker_sync.transport.request import Headers

_logger: Final = logging.getLogger(__name__)


class Journal:
    """A reporter of the events of requests, to the log and to observers. Thread-safe; never raises.

    Args:
        observer: receives every event; None for no observer.
        base_url: the base of the addresses in curl lines.
        as_curl: True to log each request as a curl line, too, at DEBUG.
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
        self.observers: list[Observer] = [] if observer is None else [observer]
        """The observers, which any thread may add and remove. Exchanges check whether there are any, and the
        level of `log`, before they report a request or an answer.
        """
        self.log = _logger
        self._base_url = base_url
        self._as_curl = as_curl
        self._secrets = secrets

    def listen(self, observer: Observer) -> Callable[[], None]:
        """Add an observer, and return a function that removes it."""
        self.observers.append(observer)

        def stop() -> None:
            with suppress(ValueError):  # a second call has no effect
                self.observers.remove(observer)

        return stop

    def sent(self, call: Call, headers: Headers) -> None:
        """Report that a request was sent with these headers."""
        size_bytes = len(call.body or b"")
        if self.observers:
            self._notify(
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
            call.method, call.path, call.attempt, size_bytes, mask_headers(sent, secrets), shown,
        )  # fmt: skip

    def answered(self, call: Call, reply: Reply, duration_s: float) -> None:
        """Report that the whole answer has arrived."""
        if self.observers:
            self._notify(
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
            mask_headers(reply.headers, secrets), shown,
        )  # fmt: skip

    def lost(self, call: Call, failed: SendFailed, duration_s: float) -> None:
        """Report that the attempt has ended without an answer."""
        self._notify(
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
            text = mask_text(failed.message, self._secrets())
            _logger.debug("%s %s: no answer after %.3f s: %s", call.method, call.path, duration_s, text)

    def redirected(self, call: Call, status: int, *, same_origin: bool, to: str) -> None:
        """Report that the client follows a redirect."""
        self._notify(Redirected(method=call.method, path=call.path, status=status, same_origin=same_origin))
        if same_origin:
            _logger.debug("%s %s: redirected (%d)", call.method, call.path, status)
        else:
            # This explains to a user with http:// or an old host why the server does not accept the key.
            _logger.info("%s %s: redirected to %s, without credentials", call.method, call.path, to)

    def retrying(self, call: Call, delay_s: float, reason: str) -> None:
        """Report that the client repeats the call after a pause."""
        self._notify(
            RetryScheduled(
                method=call.method, path=call.path, attempt=call.attempt, delay_s=delay_s, reason=reason
            )
        )
        _logger.debug("%s %s: again in %.2f s (%s)", call.method, call.path, delay_s, reason)

    def _notify(self, event: Event) -> None:
        for observer in tuple(self.observers):
            try:
                observer.observe(event)
            except Exception:
                _logger.exception("an observer raised; the request goes on")
