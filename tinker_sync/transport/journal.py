"""Reports about requests, for the log and for the stream of the events of a client.

Log lines show headers and bodies with secrets masked, and only the beginning of a body. Most lines are at
DEBUG, and are formatted only if that level is enabled. The rules for secrets (their names and forms) are in
`tinker_sync._base.secret`, because errors follow them too. Any thread may call the methods.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from tinker_sync._base.events import (
    Events,
    Redirected,
    ReplyReceived,
    RequestLost,
    RequestSent,
    RetryScheduled,
)
from tinker_sync._base.log import Log
from tinker_sync._base.secret import (
    MASK,
    HeaderMap,
    Secret,
    is_secret_header,
    is_secret_name,
    mask_headers,
    mask_json,
    mask_text,
)
from tinker_sync.transport.body import PiecedBody
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.transport.request import API_KEY, Headers

_logger: Final = Log(__name__)

# The part of a body that a log line shows: a longer one is of no use in a log.
_SHOWN_CHARACTERS: Final = 2048
_TEXT_BYTES: Final = 64 * 1024
# A placeholder in a body for a shell variable. Its private characters occur in no text, and no encoder
# escapes them.
_SLOT: Final = re.compile("\ue000(\\w+)\ue001")
# curl writes these itself; a length would be wrong after the shell has replaced the variables.
_OF_THE_CONNECTION: Final = frozenset({"host", "content-length", "connection", "accept-encoding"})

_VARIABLES: Final[Mapping[str, str]] = {
    "x-api-key": "TINKER_API_KEY",
    "cf-access-client-id": "CLOUDFLARE_ACCESS_CLIENT_ID",
    "cf-access-client-secret": "CLOUDFLARE_ACCESS_CLIENT_SECRET",
}

_FROM_FILE: Final = ["--data-binary", "@body.bin"]


class Journal:
    """A reporter of the events of requests, to the log and to the stream. Thread-safe; never raises.

    Args:
        events: the stream of the client; None for one that nobody gets.
        base_url: the base of the addresses in curl lines.
        as_curl: True to log each request as a curl line, too, at DEBUG.
        secrets: returns the values to mask in the log.
    """

    def __init__(
        self,
        events: Events | None = None,
        *,
        base_url: str = "",
        as_curl: bool = False,
        secrets: Callable[[], Iterable[Secret]] = lambda: (),
    ) -> None:
        self.events = events or Events()
        """Exchanges check who wants events, and the level of `log`, before they report a request."""
        self.log = _logger
        self._base_url = base_url
        self._as_curl = as_curl
        self._secrets = secrets

    def sent(self, call: Call, headers: Headers) -> None:
        """Report that a request was sent with these headers."""
        size_bytes = len(call.body or b"")
        if self.events.wants(RequestSent):
            self.events.notify(
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
        if self.events.wants(ReplyReceived):
            self.events.notify(
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
        self.events.notify(
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
        self.events.notify(
            Redirected(method=call.method, path=call.path, status=status, same_origin=same_origin)
        )
        if same_origin:
            _logger.debug("%s %s: redirected (%d)", call.method, call.path, status)
        else:
            # This explains to a user with http:// or an old host why the server does not accept the key.
            _logger.info("%s %s: redirected to %s, without credentials", call.method, call.path, to)

    def retrying(self, call: Call, delay_s: float, reason: str) -> None:
        """Report that the client repeats the call after a pause."""
        self.events.notify(
            RetryScheduled(
                method=call.method, path=call.path, attempt=call.attempt, delay_s=delay_s, reason=reason
            )
        )
        _logger.debug("%s %s: again in %.2f s (%s)", call.method, call.path, delay_s, reason)


# ---------------------------------------------------- bodies and curl lines


def redact_body(
    content: bytes | PiecedBody | None, content_type: str, secrets: Iterable[str | Secret] = ()
) -> str:
    """Return the beginning of a text body with secrets masked.

    Of a body of another type, or of more than 64 KiB, return only the size and the type.

    >>> redact_body(b'{"path": "p", "weights_access_token": "abc"}', "application/json")
    '{"path": "p", "weights_access_token": "***"}'
    >>> redact_body(b"\\x0a\\x05probe", "application/x-protobuf")
    '<7 bytes of application/x-protobuf>'
    """
    if not content:
        return ""
    is_text = "json" in content_type or content_type.startswith("text/")
    if not is_text or isinstance(content, PiecedBody) or len(content) > _TEXT_BYTES:
        return f"<{len(content)} bytes of {content_type or 'unknown type'}>"
    shown = _masked(content, tuple(secrets))
    if len(shown) <= _SHOWN_CHARACTERS:
        return shown
    return f"{shown[:_SHOWN_CHARACTERS]}... ({len(content)} bytes)"


def curl(
    call: Call, base_url: str, headers: Mapping[str, str] | None = None, secrets: Iterable[str | Secret] = ()
) -> str:
    """Return a curl command line that repeats a call, once the variables in it are set.

    Secrets appear as variables: the key as `$TINKER_API_KEY`, others under the name of their header or field.
    If the body is long, encoded, or not JSON, the command line reads it from a file `body.bin`, which this
    function does not write.

    Args:
        call: the call.
        base_url: the base of its address.
        headers: the headers as sent, with the credential; None means those that follow from the call alone.
        secrets: the values to mask wherever they appear.

    >>> call = Call(method="POST", path="/api/v1/auth/token", body=b"{}")
    >>> print(curl(call, "https://host/pre"))
    curl -sS --compressed -X POST https://host/pre/api/v1/auth/token -H 'Accept: application/json' \
-H 'Content-Type: application/json' -H 'X-API-Key: '"$TINKER_API_KEY" --data-raw '{}'
    """
    from shlex import quote

    address = base_url + call.path + (f"?{call.query}" if call.query else "")
    known = tuple(secrets)
    words = ["curl", "-sS", "--compressed", "-X", call.method, quote(mask_text(address, known))]
    for name, value in (headers if headers is not None else _headers_of(call)).items():
        if name.lower() not in _OF_THE_CONNECTION:
            words += ["-H", _quoted_header(name, value, known)]
    if call.body is not None:
        words += _data(call, call.body, known)
    return " ".join(words)


def _masked(content: bytes, known: tuple[str | Secret, ...]) -> str:
    """Return a body as text with its secrets masked.

    JSON is masked field by field. Some servers repeat a whole body as text in a field, and the secrets in it
    can be recognised only after the field is decoded.
    """
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return mask_text(content.decode("utf-8", "replace"), known)
    return json.dumps(mask_json(tree, known), ensure_ascii=False)


def _headers_of(call: Call) -> dict[str, str]:
    headers = {"Accept": call.accept}
    if call.method not in ("GET", "HEAD"):
        headers["Content-Type"] = call.content_type
    headers.update(call.headers)
    if call.credential != "none":
        headers[API_KEY] = MASK
    return headers


def _data(call: Call, body: bytes | PiecedBody, known: tuple[str | Secret, ...]) -> list[str]:
    encoded = "content-encoding" in HeaderMap(call.headers)
    if isinstance(body, PiecedBody) or len(body) > _TEXT_BYTES:
        return _FROM_FILE
    if call.content_type.startswith("application/json") and not encoded:
        text = _quoted_json(body, known)
        if text:
            return ["--data-raw", text]
    return _FROM_FILE


def _quoted_header(name: str, value: str, known: tuple[str | Secret, ...]) -> str:
    from shlex import quote

    if is_secret_header(name):
        return f'{quote(f"{name}: ")}"${_variable(name)}"'
    return quote(f"{name}: {mask_text(str(value), known)}")


def _quoted_json(body: bytes, known: tuple[str | Secret, ...]) -> str:
    """Return a JSON body as a quoted shell word with variables for its secrets; empty if it is not JSON."""
    from shlex import quote

    try:
        text = json.dumps(_with_slots(json.loads(body), known), ensure_ascii=False)
    except (ValueError, RecursionError):
        return ""
    return _SLOT.sub(lambda match: f"'\"${match[1]}\"'", quote(text))


def _with_slots(tree: Any, known: tuple[str | Secret, ...], slot: str = "") -> Any:
    """Return a JSON tree with placeholders for the texts in its secret fields; `slot` if it is in one."""
    if isinstance(tree, dict):
        return {
            name: _with_slots(
                value, known, slot or (f"\ue000{_variable(name)}\ue001" if is_secret_name(name) else "")
            )
            for name, value in tree.items()
        }
    if isinstance(tree, list):
        return [_with_slots(item, known, slot) for item in tree]
    return slot or mask_text(tree, known) if isinstance(tree, str) else tree


def _variable(name: str) -> str:
    return _VARIABLES.get(name.lower()) or re.sub(r"\W", "_", name, flags=re.ASCII).upper()
