"""One request to one address, and where a redirect leads from there.

Pure functions. Credentials are bound to the origin they were meant for: what goes to another one is a short
list of harmless headers, not "all but the secret ones", since nobody knows what users put into theirs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final
from urllib.parse import SplitResult, urljoin, urlsplit

from attrs import frozen

from tinker_sync._secret import mask_json
from tinker_sync.transport.pools import Origin

MAX_REDIRECTS: Final = 10
REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
# What any server may see. The length is written anew for every hop.
_HARMLESS: Final = frozenset({"accept", "accept-encoding", "user-agent", "content-type", "content-encoding"})
_OF_THE_BODY: Final = frozenset({"content-type", "content-encoding", "x-idempotency-key"})


Headers = Mapping[str, tuple[str, str]]
"""Names as they are written, and values, by lower-case name."""


class RedirectRefused(Exception):
    """The redirect is not followed; the text says why and holds no credentials."""


@frozen(repr=False)
class Hop:
    """A request on its way to one address."""

    method: str
    url: SplitResult
    origin: Origin
    headers: Headers
    body: bytes | None
    own: bool = True
    """Still at the origin the user configured: only then credentials and the user's own headers go along."""

    @property
    def target(self) -> str:
        """Path and query, as in a request line."""
        path = self.url.path or "/"
        return f"{path}?{self.url.query}" if self.url.query else path

    @property
    def address(self) -> str:
        """The whole address, as a forwarding proxy wants it."""
        return f"{self.origin}{self.target}"

    def __repr__(self) -> str:
        return f"<Hop {self.method} {self.origin}{self.url.path}>"


def redirected(hop: Hop, status: int, location: str) -> Hop:
    """Where a redirect leads.

    307 and 308 keep method and body; so do 301 and 302, which browsers turn into GET for historical reasons:
    a training step must not become a harmless-looking read because a proxy moved. 303 asks for a GET.

    Raises:
        RedirectRefused: It leads from https to http, to something else than HTTP, or would take a secret in
            the body to another origin.
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
    """The address in a `Location`, which may be relative, hold UTF-8 read as latin-1, or blanks."""
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


def _holds_secret(body: bytes) -> bool:
    """Whether a JSON body has a field or a text that must not be shown; other bodies hold tensors."""
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return bool(mask_json(tree) != tree)
