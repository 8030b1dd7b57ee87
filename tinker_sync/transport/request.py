"""One request to one address: its headers, its head (request line and headers) as bytes, and its redirects.

Headers come from five sources, and a later source replaces an earlier one: the defaults (`User-Agent`,
`Accept-Encoding`, Cloudflare Access), the user's session, the protocol, the call, and the user's default
headers. Any thread may use this module.

Credentials stay with the origin for which they are meant. A request to another origin carries a short list of
harmless headers, not "all but the secret ones", because users may put secrets into any header.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from functools import lru_cache
from typing import Final
from urllib.parse import SplitResult, urljoin, urlsplit

from attrs import frozen

from tinker_sync._base.secret import HeaderMap, Secret, header_map, mask_json
from tinker_sync._version import __version__
from tinker_sync.config import Settings
from tinker_sync.transport.body import PiecedBody
from tinker_sync.transport.call import Call
from tinker_sync.transport.pools import Origin
from tinker_sync.wire.http1.client import request_head
from tinker_sync.wire.http1.content import accepted_encodings

API_KEY: Final = "X-API-Key"
IDEMPOTENCY_KEY: Final = "X-Idempotency-Key"
RETRY_COUNT: Final = "X-Retry-Count"
MAX_REDIRECTS: Final = 10
REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
# The headers that any server may see. The length is written anew for every hop.
_HARMLESS: Final = frozenset({"accept", "accept-encoding", "user-agent", "content-type", "content-encoding"})
_OF_THE_BODY: Final = frozenset({"content-type", "content-encoding", "x-idempotency-key"})


# The headers that differ from request to request.
_DIFFERING: Final = frozenset(
    {"x-idempotency-key", "content-length", "transfer-encoding", "authorization", "cookie"}
)
_MOST_WRITTEN: Final = 256
_LINE_END: Final = "\r\n"
_NONE: Final = HeaderMap()

Headers = Mapping[str, tuple[str, str]]
"""Headers by lower-case name: the name as it is sent, and the value."""


class RedirectRefused(Exception):
    """The client does not follow a redirect. The text names the reason and holds no credentials."""


@frozen(eq=False, repr=False)
class Hop:
    """A request to one address. A redirect leads to another hop."""

    method: str
    url: SplitResult
    origin: Origin
    headers: Headers
    body: bytes | PiecedBody | None
    own: bool = True
    """True while at the origin that the user configured: it alone gets credentials and the user's headers."""

    @property
    def target(self) -> str:
        """The path and the query, as in a request line."""
        path = self.url.path or "/"
        return f"{path}?{self.url.query}" if self.url.query else path

    @property
    def address(self) -> str:
        """The whole address, as a forwarding proxy needs it."""
        return f"{self.origin}{self.target}"

    def __repr__(self) -> str:
        return f"<Hop {self.method} {self.origin}{self.url.path}>"


def redirected(hop: Hop, status: int, location: str) -> Hop:
    """Return the request that follows a redirect.

    A 303 becomes a GET without a body, except that a HEAD stays a HEAD. The other redirects keep method and
    body. Browsers turn 301 and 302 into a GET, too; here that would turn a training step into a read when a
    proxy has moved. A request to another origin loses all headers except a few harmless ones.

    Raises:
        RedirectRefused: The redirect leads from https to http, to another protocol, or would take a secret in
            the body to another origin, or its address is not valid.
    """
    url = _absolute(hop, location)
    try:
        origin = Origin.of(url)
    except ValueError:
        raise RedirectRefused("the redirect leads to no http or https address") from None
    if hop.origin.scheme == "https" and origin.scheme == "http":
        raise RedirectRefused(f"the redirect leads from https to unprotected http ({origin})")
    method, body, headers = hop.method, hop.body, hop.headers
    if status == 303 and method not in ("GET", "HEAD"):
        method, body = "GET", None
        headers = {name: line for name, line in headers.items() if name not in _OF_THE_BODY}
    if origin == hop.origin:
        return Hop(method, url, origin, headers, body, hop.own)
    if body and _holds_secret(body):
        raise RedirectRefused(f"the redirect would take a secret in the body to another server ({origin})")
    harmless = {name: line for name, line in headers.items() if name in _HARMLESS}
    return Hop(method, url, origin, harmless, body, own=False)


def _absolute(hop: Hop, location: str) -> SplitResult:
    """Return the full address of a redirect.

    A `Location` may be relative, and may hold blanks or UTF-8 that was read as latin-1.

    Raises:
        RedirectRefused: The address is not valid.
    """
    try:
        text = location.encode("latin-1").decode("utf-8")
    except UnicodeError:
        text = location
    from requests.utils import requote_uri as quoted

    try:
        url = urlsplit(urljoin(hop.address, text.strip()))
        return url._replace(path=quoted(url.path), query=quoted(url.query), fragment="")
    except ValueError:
        raise RedirectRefused("the redirect's address is not valid") from None


def _holds_secret(body: bytes | PiecedBody) -> bool:
    """Return True if a JSON body holds a secret. Bodies of other types hold tensors, and no secrets."""
    if isinstance(body, PiecedBody):
        return False
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return bool(mask_json(tree) != tree)


# ------------------------------------------------------------------------------------------ headers


@lru_cache(maxsize=1)
def user_agent() -> str:
    """Return the value of `User-Agent`: package, interpreter and system.

    >>> user_agent().startswith("tinker_sync/")
    True
    """
    system = platform.system() or "unknown system"
    return f"tinker_sync/{__version__} (Python {platform.python_version()}; {system})"


def by_name(headers: Mapping[str, str]) -> Headers:
    """Return headers as a map from the lower-case name to the name as given and the value.

    >>> by_name({"Accept": "*/*"})
    {'accept': ('Accept', '*/*')}
    """
    return header_map(headers).lines


def key_header(credential: str) -> Headers:
    """Return the header that carries a credential.

    >>> key_header("tml-example")
    {'x-api-key': ('X-API-Key', '***')}
    """
    return {API_KEY.lower(): (API_KEY, Secret(credential).reveal())}  # its repr is masked


@frozen(eq=False, repr=False)
class _Written:
    """The part of an encoded head that similar requests share, with the names of its headers.

    Its repr shows no header.
    """

    text: str
    names: frozenset[str]


class RequestHeads:
    """An encoder of the heads (request line and headers) of requests to one server. Thread-safe.

    It keeps the encoded lines that similar requests share, so they are encoded once.

    Args:
        settings: the address and the headers of the user.
    """

    def __init__(self, settings: Settings) -> None:
        ours = {"User-Agent": user_agent(), "Accept-Encoding": accepted_encodings()}
        if settings.cf_access_id:
            ours["CF-Access-Client-Id"] = settings.cf_access_id.reveal()
        if settings.cf_access_secret:
            ours["CF-Access-Client-Secret"] = settings.cf_access_secret.reveal()
        self._ours = by_name(ours)
        self._users = by_name(settings.default_headers)
        self._version = settings.sdk_version
        self._base = urlsplit(settings.base_url)
        self.origin = Origin.of(self._base)
        self._written: dict[object, _Written | None] = {}  # replaced by an empty one when it is full

    def hop(self, call: Call, credential: str, session_headers: HeaderMap) -> Hop:
        """Return the request of a call to the configured server, without `Host`, length and cookies.

        If `credential` is "", the request carries no key.
        """
        base = self._base
        url = SplitResult(base.scheme, base.netloc, base.path + call.path, call.query, "")
        headers = {**self._ours, **session_headers.lines}
        headers["accept"] = ("Accept", call.accept)
        if credential:
            headers.update(key_header(credential))
        if call.method not in ("GET", "HEAD"):
            headers["content-type"] = ("Content-Type", call.content_type)
            if call.idempotency_key:
                headers["x-idempotency-key"] = (IDEMPOTENCY_KEY, call.idempotency_key)
        if call.sdk_method:
            headers["x-sdk-version"] = ("X-SDK-Version", self._version)
            headers["x-sdk-method"] = ("X-SDK-Method", call.sdk_method)
        headers["x-retry-count"] = (RETRY_COUNT, str(call.attempt - 1))
        headers.update(self._users)
        headers.update(call.headers.lines)
        return Hop(call.method, url, self.origin, headers, call.body)

    def write(self, call: Call, credential: str) -> bytes | None:
        """Return the encoded head of a POST with a body, quickly, for a client without a session's headers.

        Return None if this shortcut does not fit the call; then `hop` composes its headers one by one.
        """
        if call.method != "POST" or call.body is None:
            return None
        key = call.path, call.query, call.accept, call.content_type, call.sdk_method, credential
        written = self._written.get(key)
        if written is None and key not in self._written:
            written = self._keep(key, self._write(call, credential))
        own = call.headers.lines
        if written is None or not written.names.isdisjoint(own):
            return None
        lines = [f"{name}: {value}" for name, value in own.values()]
        if call.idempotency_key:
            lines.append(f"{IDEMPOTENCY_KEY}: {call.idempotency_key}")
        joined = "".join(lines)
        if not (joined.isascii() and joined.isprintable()):
            return None  # a line end in a value would add headers
        lines.append(f"{RETRY_COUNT}: {call.attempt - 1}\r\nContent-Length: {len(call.body)}\r\n\r\n")
        return f"{written.text}{_LINE_END.join(lines)}".encode("ascii")

    def _keep(self, key: object, written: _Written | None) -> _Written | None:
        if len(self._written) >= _MOST_WRITTEN:
            self._written = {}
        self._written[key] = written
        return written

    def _write(self, call: Call, credential: str) -> _Written | None:
        """Return the lines that similar requests share.

        Return None if the user sets a header that must differ from request to request.
        """
        hop = self.hop(call.but(headers=_NONE, idempotency_key=None), credential, _NONE)
        headers = {"host": ("Host", self.origin.netloc), **hop.headers}
        del headers[RETRY_COUNT.lower()]
        if headers.keys() & _DIFFERING or RETRY_COUNT.lower() in self._users:
            return None
        head = request_head(hop.method, hop.target, headers.values()).decode("latin-1")
        return _Written(head.removesuffix("\r\n"), frozenset(headers))
