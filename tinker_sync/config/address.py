"""The address of a server: checked, brought into one form, and whether it is the vendor's. Pure functions."""

from __future__ import annotations

from functools import lru_cache
from typing import Final
from urllib.parse import SplitResult, urlsplit

from tinker_sync._secret import Secret, mask_url
from tinker_sync.errors import ConfigurationError

DEFAULT_BASE_URL: Final = "https://tinker.thinkingmachines.dev/services/tinker-prod"
CONSOLE_URL: Final = "https://tinker.thinkingmachines.ai"

_VENDOR_DOMAINS: Final = ("thinkingmachines.dev", "thinkingmachines.ai")


def checked_base_url(url: Secret, name: str) -> str:
    """Give the base URL without its trailing slashes; the path stays.

    Args:
        url: The address; wrapped, because a wrong one may hold a password and errors show local variables.
        name: What to call it in the error: the argument or the environment variable.

    Raises:
        ConfigurationError: It is no `http(s)://host[:port][/path]`. The text says what is wrong with it.

    >>> checked_base_url(Secret("http://localhost:8000/pre//"), "base_url")
    'http://localhost:8000/pre'
    """
    problem = _problem_of(url)
    if problem:
        raise ConfigurationError(f"{name} {mask_url(url.reveal().strip())!r} {problem}")
    return url.reveal().strip().rstrip("/")


@lru_cache(maxsize=32)  # asked with every request
def is_vendor_url(url: str) -> bool:
    """Tell whether the address is at one of the vendor's hosts, where the vendor's rules for keys hold.

    >>> [is_vendor_url(u) for u in (DEFAULT_BASE_URL, "https://thinkingmachines.dev.example.org")]
    [True, False]
    """
    host = (urlsplit(url).hostname or "").rstrip(".")
    return any(host == domain or host.endswith("." + domain) for domain in _VENDOR_DOMAINS)


def _problem_of(url: Secret) -> str:
    parts = _split(url)
    if parts is None:
        return "is not a valid address; use the form https://host[:port][/path]"
    if parts.scheme not in ("http", "https"):
        return "does not start with http:// or https://"
    if not parts.hostname:
        return "names no host; use the form https://host[:port][/path]"
    if "@" in parts.netloc:
        return (
            "holds a user name or password, which would end up in logs; "
            "send them with default_headers or with session.auth instead"
        )
    if parts.query or parts.fragment or "?" in url.reveal() or "#" in url.reveal():
        return "has a query or fragment; only a path may follow the host"
    return ""


def _split(url: Secret) -> SplitResult | None:
    """Take the address apart; None where that cannot be done. The cause is dropped: it quotes the address."""
    if any(character <= " " or character == "\x7f" for character in url.reveal().strip()):
        return None
    try:
        parts = urlsplit(url.reveal().strip())
        if parts.port == 0:  # reading it also checks it
            return None
    except ValueError:
        return None
    return parts
