"""What an error keeps of a request and its answer, and what a server says in the body of a refusal.

A leaf next to `errors`, which offers the two records under its own name. Nothing here holds a credential: the
records mask headers and addresses as they are made, whoever makes them. No state; any thread may come in.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final

from attrs import field, frozen

from tinker_sync._secret import HeaderMap, Secret, mask_headers, mask_json, mask_text, mask_url

# An error must not keep a large answer alive, nor print pages of it.
MAX_KEPT_BYTES: Final = 64 * 1024
_LONGEST_SECRET: Final = 8 * 1024
_MAX_WORDS: Final = 2000
_MAX_PAGE_WORDS: Final = 200
_MAX_COMPLAINTS: Final = 20


_API: Final = "/api/v1"
_NO_SUCH_CALL: Final = (404, 405, 501)
_NO_ENTRY: Final = (401, 403)


def _masked_map(headers: Mapping[str, str] | Iterable[tuple[str, str]]) -> HeaderMap:
    return HeaderMap(mask_headers(headers))


def _bounded(content: bytes) -> bytes:
    return bytes(content[:MAX_KEPT_BYTES])


@frozen(kw_only=True)
class RequestInfo:
    """What an error keeps of the request: no credentials, whatever it was made from.

    >>> RequestInfo(method="GET", url="https://host/x?token=abc", headers={"X-API-Key": "tml-secret"})
    RequestInfo(method='GET', url='https://host/x?token=***', headers=HeaderMap({'X-API-Key': '***'}))
    """

    method: str
    url: str = field(converter=mask_url)
    headers: HeaderMap = field(factory=HeaderMap, converter=_masked_map)

    @property
    def path(self) -> str:
        """The path of the address, without query."""
        rest = re.split(r"[?#]", self.url, maxsplit=1)[0].split("://", 1)[-1]
        return "/" + rest.partition("/")[2]

    @classmethod
    def of(cls, request: Any) -> RequestInfo | None:
        """Take over our own record, or the request object of an HTTP library."""
        if request is None or isinstance(request, RequestInfo):
            return request
        return cls(
            method=str(getattr(request, "method", None) or ""),
            url=str(getattr(request, "url", None) or ""),
            headers=_headers_of(request),
        )


@frozen(kw_only=True)
class ResponseInfo:
    """What an error keeps of the answer: status, headers without credentials, the first 64 KiB of the body.

    >>> ResponseInfo(status_code=404, content=b'{"detail": "no such run"}').json()
    {'detail': 'no such run'}
    """

    status_code: int
    headers: HeaderMap = field(factory=HeaderMap, converter=_masked_map)
    content: bytes = field(default=b"", converter=_bounded, repr=False)
    request: RequestInfo | None = None

    @property
    def text(self) -> str:
        """The body as text; bytes that are no UTF-8 become replacement characters."""
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        """Parse the body as JSON; `ValueError` when it is none."""
        return json.loads(self.content)

    @classmethod
    def of(cls, response: Any) -> ResponseInfo | None:
        """Take over our own record, or the answer object of an HTTP library."""
        if response is None or isinstance(response, ResponseInfo):
            return response
        content, request = b"", None
        # Libraries raise their own errors for a body that was never read or an answer without request.
        with contextlib.suppress(Exception):
            content = read_body(response.content, ())[1]
        with contextlib.suppress(Exception):
            request = RequestInfo.of(response.request)
        return cls(
            status_code=int(response.status_code),
            headers=_headers_of(response),
            content=content,
            request=request,
        )


def words_of(body: Any) -> str:
    """Find what a server says went wrong, whichever of the known forms the body of its answer has.

    Known are `{"error": ...}`, `{"detail": text}`, `{"detail": [{"loc": ..., "msg": ...}]}`,
    `{"error_message": ...}`, `{"message": ...}` and plain text.

    >>> words_of({"detail": [{"loc": ["body", "seq_id"], "msg": "Field required"}]})
    'body.seq_id: Field required'
    >>> words_of({"error": "unknown model", "category": "user"}), words_of("Bad gateway\\n")
    ('unknown model', 'Bad gateway')
    """
    words = _find_words(body, 0).strip()
    return words if len(words) <= _MAX_WORDS else f"{words[:_MAX_WORDS]}... ({len(words)} characters)"


def read_body(content: bytes, secrets: Iterable[str | Secret]) -> tuple[Any, bytes]:
    """Parse the body of a refusal (JSON, else text, else None), and give the bytes of it that may be kept.

    In both, what the server repeats of our secrets is masked.
    """
    known = tuple(secrets)
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        # Cut after masking: half a secret would not be recognised.
        text = content[: MAX_KEPT_BYTES + _LONGEST_SECRET].decode("utf-8", "replace")
        masked = mask_text(text, known)
        kept = content if masked == text else masked.encode()
        return masked[:MAX_KEPT_BYTES] or None, kept
    masked_tree = mask_json(tree, known)
    return masked_tree, content if masked_tree == tree else json.dumps(masked_tree).encode()


def doubt(response: ResponseInfo | None, request: RequestInfo | None) -> str:
    """Say so where an answer is not that of a Tinker server, or calls are looked for at a place that is not.

    >>> page = ResponseInfo(status_code=404, headers={"Content-Type": "text/html; charset=utf-8"})
    >>> print(doubt(page, RequestInfo(method="GET", url="http://host/pre/api/v1/x")))
    http://host/pre answers with text/html, as no Tinker server does: check the base URL, and what may stand \
before the server.
    """
    if response is None:
        return ""
    url, status = request.url if request else "", response.status_code
    if status in _NO_SUCH_CALL and f"{_API}{_API}/" in url:
        return f"The base URL ends with {_API}, which every call adds by itself; leave it out."
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Of other refusals balancers make pages too: of floods, of large bodies, of servers that are down.
    page = kind == "text/html" and (status < 400 or status in _NO_ENTRY or status in _NO_SUCH_CALL)
    if not page and not (kind == "text/plain" and status in _NO_SUCH_CALL):
        return ""
    who = url.rpartition(f"{_API}/")[0] or "The server"
    return (
        f"{who} answers with {kind}, as no Tinker server does: "
        "check the base URL, and what may stand before the server."
    )


def reason(status_code: int) -> str:
    """Name a status.

    >>> reason(404), reason(599)
    ('Not Found', 'error status')
    """
    try:
        return HTTPStatus(status_code).phrase
    except ValueError:
        return "error status"


def _headers_of(source: Any) -> dict[str, str]:
    headers = getattr(source, "headers", None)
    return mask_headers(headers) if isinstance(headers, Mapping) else {}


def _find_words(body: Any, depth: int) -> str:
    if isinstance(body, str):
        return _title_of_page(body)
    if body in (None, {}, []) or depth > 3:
        return ""
    if isinstance(body, dict):
        for name in ("error", "detail", "error_message", "message", "msg", "title"):
            if body.get(name):
                return _find_words(body[name], depth + 1)
    if isinstance(body, list) and all(isinstance(item, dict) and "msg" in item for item in body):
        shown = [_complaint(item) for item in body[:_MAX_COMPLAINTS]]
        more = len(body) - len(shown)
        return "; ".join(shown) + (f"; and {more} more" if more else "")
    return json.dumps(body, ensure_ascii=False)


def _complaint(item: Mapping[str, Any]) -> str:
    place = item.get("loc")
    where = ".".join(str(part) for part in place) if isinstance(place, list) else ""
    return f"{where}: {item['msg']}" if where else str(item["msg"])


def _title_of_page(text: str) -> str:
    """Proxies answer with web pages; their title is the part to read."""
    if not text.lstrip().startswith("<"):
        return text
    page = text[:MAX_KEPT_BYTES]
    title = re.search(r"<title[^>]*>(.*?)</title>", page, re.IGNORECASE | re.DOTALL)
    words = " ".join((title[1] if title else re.sub(r"<[^>]*>", " ", page)).split())
    return words if len(words) <= _MAX_PAGE_WORDS else f"{words[:_MAX_PAGE_WORDS]}..."
