"""The parts of errors: records of request and response, and the message in the body of an error status.

`errors` re-exports the two records. Their constructors mask the credentials in headers and addresses, and
`read_body` masks those in a body. The module has no state, so any thread may use it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from attrs import field, frozen

from tinker_sync._base.policy import NO_SUCH_CALL
from tinker_sync._base.secret import HeaderMap, Secret, mask_headers, mask_json, mask_text, mask_url

# Limits: an error keeps and prints only a part of a large answer.
MAX_KEPT_BYTES: Final = 64 * 1024
_LONGEST_SECRET: Final = 8 * 1024
_MAX_MESSAGE: Final = 2000
_MAX_TITLE: Final = 200
_MAX_PROBLEMS: Final = 20


_API: Final = "/api/v1"
_NO_ENTRY: Final = (401, 403)
# The end of a base URL that names a version of the API.
_VERSION: Final = re.compile(rf"(/(?:api|v\d+)){_API}/")


def _mask_map(headers: Mapping[str, str] | Iterable[tuple[str, str]]) -> HeaderMap:
    return HeaderMap(mask_headers(headers))


def _truncate(content: bytes) -> bytes:
    return bytes(content[:MAX_KEPT_BYTES])


@frozen(kw_only=True)
class RequestInfo:
    """A record of the request that an error is about, without credentials.

    >>> RequestInfo(method="GET", url="https://host/x?token=abc", headers={"X-API-Key": "tml-secret"})
    RequestInfo(method='GET', url='https://host/x?token=***', headers=HeaderMap({'X-API-Key': '***'}))
    """

    method: str
    url: str = field(converter=mask_url)
    headers: HeaderMap = field(factory=HeaderMap, converter=_mask_map)

    @property
    def path(self) -> str:
        """The path of the address, without its query."""
        rest = re.split(r"[?#]", self.url, maxsplit=1)[0].split("://", 1)[-1]
        return "/" + rest.partition("/")[2]

    @classmethod
    def of(cls, request: Any) -> RequestInfo | None:
        """Convert the request object of an HTTP library to a `RequestInfo`.

        A `RequestInfo` and None stay as they are.
        """
        if request is None or isinstance(request, RequestInfo):
            return request
        return cls(
            method=str(getattr(request, "method", None) or ""),
            url=str(getattr(request, "url", None) or ""),
            headers=_copy_headers(request),
        )


@frozen(kw_only=True)
class ResponseInfo:
    """A record of the response that an error is about: status, headers, 64 KiB of the body, and the request.

    The headers have no credentials.

    >>> ResponseInfo(status_code=404, content=b'{"detail": "no such run"}').json()
    {'detail': 'no such run'}
    """

    status_code: int
    headers: HeaderMap = field(factory=HeaderMap, converter=_mask_map)
    content: bytes = field(default=b"", converter=_truncate, repr=False)
    request: RequestInfo | None = None

    @property
    def text(self) -> str:
        """The body as text; invalid UTF-8 becomes replacement characters."""
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        """Parse the body as JSON, or raise `ValueError`."""
        return json.loads(self.content)

    @classmethod
    def of(cls, response: Any) -> ResponseInfo | None:
        """Convert the response object of an HTTP library to a `ResponseInfo`.

        A `ResponseInfo` and None stay as they are.
        """
        if response is None or isinstance(response, ResponseInfo):
            return response
        content, request = b"", None
        # Libraries raise various errors for an unread body or an answer without request.
        with contextlib.suppress(Exception):
            content = read_body(response.content, ())[1]
        with contextlib.suppress(Exception):
            request = RequestInfo.of(response.request)
        return cls(
            status_code=int(response.status_code),
            headers=_copy_headers(response),
            content=content,
            request=request,
        )


def find_server_message(body: Any) -> str:
    """Return the server's message from the body of an error status.

    The body may be `{"error": ...}`, `{"detail": text}`, `{"detail": [{"loc": ..., "msg": ...}]}`,
    `{"error_message": ...}`, `{"message": ...}` or plain text. Other JSON is the message as it is. An empty
    body gives "", and a long message is cut.

    >>> find_server_message({"detail": [{"loc": ["body", "seq_id"], "msg": "Field required"}]})
    'body.seq_id: Field required'
    >>> answer = {"error": "unknown model", "category": "user"}
    >>> find_server_message(answer), find_server_message("Bad gateway\\n")
    ('unknown model', 'Bad gateway')
    """
    message = _find_message(body, 0).strip()
    return (
        message
        if len(message) <= _MAX_MESSAGE
        else f"{message[:_MAX_MESSAGE]}... ({len(message)} characters)"
    )


def read_body(content: bytes, secrets: Iterable[str | Secret]) -> tuple[Any, bytes]:
    """Return the body of an error status in two forms, with secrets masked: servers may echo them.

    The given `secrets` are masked, and those that the functions of `_base.secret` recognise.

    Returns:
        The parsed body (JSON, else text, else None), and the bytes of the body.
    """
    known = tuple(secrets)
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        # Truncate after masking, because half a secret would not be recognised.
        text = content[: MAX_KEPT_BYTES + _LONGEST_SECRET].decode("utf-8", "replace")
        masked = mask_text(text, known)
        kept = content if masked == text else masked.encode()
        return masked[:MAX_KEPT_BYTES] or None, kept
    masked_tree = mask_json(tree, known)
    return masked_tree, content if masked_tree == tree else json.dumps(masked_tree).encode()


def hint_wrong_server(response: ResponseInfo | None, request: RequestInfo | None) -> str:
    """Return a hint if the answer seems not to be from a Tinker server, or the base URL is wrong; else "".

    >>> page = ResponseInfo(status_code=404, headers={"Content-Type": "text/html; charset=utf-8"})
    >>> print(hint_wrong_server(page, RequestInfo(method="GET", url="http://host/pre/api/v1/x")))
    http://host/pre answers with text/html, as no Tinker server does: check the base URL, and what may stand \
before the server.
    """
    if response is None:
        return ""
    url, status = request.url if request else "", response.status_code
    if status in (*NO_SUCH_CALL, *_NO_ENTRY) and f"{_API}{_API}/" in url:
        return f"The base URL ends with {_API}, which every call adds by itself; leave it out."
    version = _VERSION.search(url) if status in NO_SUCH_CALL else None
    if version is not None:
        return f"The base URL ends with {version[1]}; every call adds {_API} by itself, so try without it."
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Load balancers send pages for other statuses too: rate limits, large bodies, servers that are down.
    page = kind == "text/html" and (status < 400 or status in _NO_ENTRY or status in NO_SUCH_CALL)
    if not page and not (kind == "text/plain" and status in NO_SUCH_CALL):
        return ""
    who = url.rpartition(f"{_API}/")[0] or "The server"
    return (
        f"{who} answers with {kind}, as no Tinker server does: "
        "check the base URL, and what may stand before the server."
    )


def name_status(status_code: int) -> str:
    """Return the standard phrase of a status.

    >>> name_status(404), name_status(599)
    ('Not Found', 'error status')
    """
    try:
        from http import HTTPStatus

        return HTTPStatus(status_code).phrase
    except ValueError:
        return "error status"


def _copy_headers(source: Any) -> dict[str, str]:
    headers = getattr(source, "headers", None)
    return mask_headers(headers) if isinstance(headers, Mapping) else {}


def _find_message(body: Any, depth: int) -> str:
    if isinstance(body, str):
        return _read_title(body)
    if body in (None, {}, []) or depth > 3:
        return ""
    if isinstance(body, dict):
        for name in ("error", "detail", "error_message", "message", "msg", "title"):
            if body.get(name):
                return _find_message(body[name], depth + 1)
    if isinstance(body, list) and all(isinstance(item, dict) and "msg" in item for item in body):
        shown = [_format_problem(item) for item in body[:_MAX_PROBLEMS]]
        more = len(body) - len(shown)
        return "; ".join(shown) + (f"; and {more} more" if more else "")
    return json.dumps(body, ensure_ascii=False)


def _format_problem(item: Mapping[str, Any]) -> str:
    place = item.get("loc")
    where = ".".join(str(part) for part in place) if isinstance(place, list) else ""
    return f"{where}: {item['msg']}" if where else str(item["msg"])


def _read_title(text: str) -> str:
    """Return the title of a proxy's web page, or its text if it has no title. Return other text unchanged."""
    if not text.lstrip().startswith("<"):
        return text
    page = text[:MAX_KEPT_BYTES]
    # Patterns that end at the next "<" take linear time on a page that closes no tag.
    title = re.search(r"<title[^<>]*>([^<]*)", page, re.IGNORECASE)
    message = " ".join((title[1] if title else re.sub(r"<[^<>]*>", " ", page)).split())
    return message if len(message) <= _MAX_TITLE else f"{message[:_MAX_TITLE]}..."
