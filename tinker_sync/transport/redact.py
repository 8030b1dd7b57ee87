"""Bodies and curl lines for the log, with secrets masked.

`journal` calls this module when it writes a log line. Pure functions; any thread may call them. The rules for
secrets (their names and forms) are in `tinker_sync._base.secret`, because errors follow them too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tinker_sync._base.secret import (
    MASK,
    HeaderMap,
    Secret,
    is_secret_header,
    is_secret_name,
    mask_json,
    mask_text,
)
from tinker_sync.transport.body import PiecedBody
from tinker_sync.transport.call import Call

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
        headers["X-API-Key"] = MASK
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
