"""Checks of a server's address. Pure functions."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final
from urllib.parse import SplitResult, urlsplit

from tinker_sync._base.secret import MASK, Secret, mask_url
from tinker_sync._base.spelling import find_closest
from tinker_sync.errors import ConfigurationError

DEFAULT_BASE_URL: Final = "https://tinker.thinkingmachines.dev/services/tinker-prod"

# Up to the last "@", because a password may contain one, or a slash.
_BEFORE_HOST: Final = re.compile(r"\A((?:[A-Za-z]*:?//?)?).*@", re.DOTALL)
_VENDOR_DOMAINS: Final = ("thinkingmachines.dev", "thinkingmachines.ai")


def normalize_base_url(url: Secret, name: str) -> str:
    """Check a base URL, and return it without surrounding blanks and trailing slashes.

    Args:
        url: the address, wrapped because an invalid one may hold a password.
        name: the name of the argument or environment variable, for the error.

    Raises:
        ConfigurationError: `url` is not of the form `http(s)://host[:port][/path]`. The text gives the
            reason.

    >>> normalize_base_url(Secret("http://localhost:8000/pre//"), "base_url")
    'http://localhost:8000/pre'
    """
    problem = _find_problem(url)
    if problem:
        raise ConfigurationError(f"{name} {_masked(url.reveal().strip())!r} {problem}")
    return url.reveal().strip().rstrip("/")


@lru_cache(maxsize=32)  # called for every request
def is_vendor_url(url: str) -> bool:
    """Return True for an address at a host of the vendor, the company of the hosted service.

    The rules of the vendor for keys apply there.

    >>> [is_vendor_url(u) for u in (DEFAULT_BASE_URL, "https://thinkingmachines.dev.example.org")]
    [True, False]
    """
    host = (urlsplit(url).hostname or "").rstrip(".")
    return any(host == domain or host.endswith("." + domain) for domain in _VENDOR_DOMAINS)


def _find_problem(url: Secret) -> str:
    parts = _split(url)
    if parts is None:
        return "is not a valid address; use the form https://host[:port][/path]"
    if parts.scheme not in ("http", "https"):
        return f"does not start with http:// or https://{_advice(url.reveal().strip())}"
    if not parts.hostname:
        return "names no host; use the form https://host[:port][/path]"
    if "@" in parts.netloc:
        return (
            "holds a user name or password, which would appear in logs; "
            "send them with default_headers or with session.auth instead"
        )
    if parts.query or parts.fragment or "?" in url.reveal() or "#" in url.reveal():
        return "has a query or fragment; only a path may follow the host"
    return ""


def _masked(text: str) -> str:
    """Return an invalid address without what may be a password, also if the scheme is missing or mistyped.

    >>> _masked("me:pw@host"), _masked("https:/me:p/w@host:80"), _masked("https://host?sig=abc")
    ('***@host', 'https:/***@host:80', 'https://host?sig=***')
    """
    return mask_url(_BEFORE_HOST.sub(rf"\1{MASK}@", text))


def _advice(text: str) -> str:
    """Return a suggestion for an address without a scheme, or "" if the text may hold a secret."""
    if find_closest(text, ["local"], cutoff=0.8, loosely=False):
        return "; did you mean 'local', the embedded server?"
    if "@" in text or "//" in text:
        return ""
    here = text.partition(":")[0] in ("localhost", "127.0.0.1")
    return f"; did you mean '{'http' if here else 'https'}://{text}'?"


def _split(url: Secret) -> SplitResult | None:
    """Split the address, or return None for an invalid one.

    The parser's error is dropped, because it quotes the address.
    """
    if any(character <= " " or character == "\x7f" for character in url.reveal().strip()):
        return None
    try:
        parts = urlsplit(url.reveal().strip())
        if parts.port == 0:  # this access also validates the port
            return None
    except ValueError:
        return None
    return parts
