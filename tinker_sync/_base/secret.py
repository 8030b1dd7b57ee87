"""`Secret`, and functions that recognise and mask secrets in headers, addresses, JSON and plain text.

This module imports nothing of the package and has no state, so any thread may call it. Values are masked by
name (a header called `Authorization`), by form (`tml-...`, a JWT, a password inside an address) and by value
(the keys that the caller passes). In doubt a value is masked, because a leak is worse than a needless mask.
All patterns are linear in the length of the text, because texts come from servers.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, NoReturn, SupportsIndex, TypeVar, overload
from urllib.parse import quote, quote_plus, unquote

MASK: Final = "***"
T = TypeVar("T")

# Masking shorter values would hide ordinary words; keys are longer.
_SHORTEST_KNOWN_SECRET: Final = 6
# Deeper trees would exhaust the stack; they are masked as a whole.
_DEEPEST: Final = 100

_SECRET_HEADERS: Final = (
    "x-api-key",
    "authorization",
    "proxy-authorization",
    "cookie",
    "set-cookie",
    "cf-access-client-id",
    "cf-access-client-secret",
    "x-tinker-weights-access-token",
)
_PLAIN_NAMES: Final = frozenset({"x-idempotency-key", "idempotency-key"})
# A name is secret if one of its words is: `X-My-Token`, `weights_access_token`, `clientSecret`.
_SECRET_WORDS: Final = frozenset(
    {
        "apikey", "auth", "authentication", "authorization", "bearer", "cookie", "credential", "credentials",
        "jwt", "passphrase", "passwd", "password", "pwd", "secret", "secrets", "sig", "signature", "token",
    }
)  # fmt: skip
_SECRET_PAIRS: Final = frozenset({("api", "key"), ("access", "key"), ("private", "key"), ("pass", "word")})
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Parameters of signed addresses whose names are harmless elsewhere.
_SECRET_PARAMETERS: Final = frozenset(
    {"key", "policy", "key-pair-id", "awsaccesskeyid", "googleaccessid", "code"}
)

_VENDOR_KEY: Final = re.compile(r"\btml-[A-Za-z0-9_\-]{8,}")
_JWT: Final = re.compile(r"\beyJ[A-Za-z0-9_\-]{8,}(?:\.[A-Za-z0-9_\-]*)*")
_BEARER: Final = re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9+/=_.~\-]{6,}", re.IGNORECASE)
_HEADER_LINE: Final = re.compile(rf"\b({'|'.join(_SECRET_HEADERS)})(\s?[:=]\s?)[^\r\n,;'\"]+", re.IGNORECASE)
# Up to the last "@" before the path, because a password may contain one.
_USERINFO: Final = re.compile(r"(?<![A-Za-z0-9+.\-])([A-Za-z][A-Za-z0-9+.\-]*://)[^/?#\s\"'<>]*@")
_QUERY_PAIR: Final = re.compile(r"([?&#;])([^=&#;\s?\"'<>]+)=([^&#;\s\"'<>]*)")
# A pair in JSON text inside a JSON string, the form in which servers echo bodies.
_INNER_JSON_PAIR: Final = re.compile(r"((?<!\\)\\+\"[\w\-]+\\+\"\s?:\s?\\+\")([^\"\\]*)")
_JSON_PAIR: Final = re.compile(r"([\"'])([\w\-]+)\1(\s?:\s?)(\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')")


class _Revealed(str):
    """A secret text for the code that sends it: an ordinary `str` with a masked repr.

    Dictionaries and tuples print the reprs of their values, so a dictionary of headers shows no key.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(MASK)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a revealed secret cannot be pickled")

    def __copy__(self) -> _Revealed:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _Revealed:
        return self


class Secret:
    """A text hidden from repr, str, format, vars, json and pickle. Immutable; any thread may use it.

    Pickling raises `TypeError`, because keys in pickles reach caches, queues and bug reports. Give the other
    process its own key (environment variable, credentials file). A copy is the same object.

    >>> key = Secret("tml-example")
    >>> key, f"{key}", key.reveal() == "tml-example"
    (Secret('***'), '***', True)
    """

    __slots__ = ("_text",)

    _text: _Revealed

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):  # bytes, or a Secret in a Secret
            raise TypeError(f"a secret is a str, not {type(text).__name__}")
        object.__setattr__(self, "_text", _Revealed(text))

    def reveal(self) -> str:
        """Return the text itself, to send or compare it. Its repr stays masked."""
        return self._text

    def __repr__(self) -> str:
        return f"Secret({MASK!r})"

    def __str__(self) -> str:
        return MASK

    def __format__(self, spec: str) -> str:
        return format(MASK, spec)

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        """Compare two secrets in constant time. A secret never equals a plain text."""
        if not isinstance(other, Secret):
            return NotImplemented
        import hmac  # loads OpenSSL

        mine, theirs = (s._text.encode("utf-8", "surrogatepass") for s in (self, other))
        return hmac.compare_digest(mine, theirs)

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("a Secret does not change")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError("a Secret does not change")

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a Secret cannot be pickled: give the other process one by TINKER_API_KEY or the key file"
        )

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Secret:
        return self


class HeaderMap(Mapping[str, str]):
    """An immutable mapping of headers, case-insensitive and ordered. Any thread may use it.

    Its repr and its pickles hold a mask in place of secret values.

    >>> headers = HeaderMap({"X-API-Key": "tml-example", "Accept": "*/*"})
    >>> headers["accept"], headers
    ('*/*', HeaderMap({'X-API-Key': '***', 'Accept': '*/*'}))
    """

    __slots__ = ("lines",)

    lines: Mapping[str, tuple[str, str]]
    """The original names with their values, by lower-case name. Never changed."""

    def __init__(self, headers: Mapping[str, str] | Iterable[tuple[str, str]] = ()) -> None:
        # The check for dict first is faster than the one for Mapping.
        items = headers.items() if isinstance(headers, (dict, Mapping)) else headers
        self.lines = {
            name.lower(): (name, _Revealed(value) if is_secret_header(name) else value)
            for name, value in items
        }

    @classmethod
    def of_lines(cls, lines: Mapping[str, tuple[str, str]]) -> HeaderMap:
        """Return a map with the given attribute `lines`, not copied. `header_pair` must have made each pair.

        >>> HeaderMap.of_lines({"x-api-key": header_pair("X-API-Key", "tml-example")})
        HeaderMap({'X-API-Key': '***'})
        """
        made = object.__new__(cls)
        made.lines = lines
        return made

    def __getitem__(self, name: str) -> str:
        return self.lines[name.lower()][1]

    @overload
    def get(self, name: str, default: None = None, /) -> str | None: ...
    @overload
    def get(self, name: str, default: T, /) -> str | T: ...
    def get(self, name: str, default: Any = None, /) -> Any:
        """Return the value of a header, or the default, faster than the method of `Mapping`."""
        pair = self.lines.get(name.lower())
        return default if pair is None else pair[1]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.lines.values())

    def __len__(self) -> int:
        return len(self.lines)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self.lines

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return {n.lower(): v for n, v in self.items()} == {str(n).lower(): v for n, v in other.items()}

    def __hash__(self) -> int:
        return hash(frozenset((name, value) for name, (_, value) in self.lines.items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({mask_headers(self)!r})"

    def __reduce__(self) -> tuple[type[HeaderMap], tuple[dict[str, str]]]:
        return type(self), (mask_headers(self),)

    def __copy__(self) -> HeaderMap:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> HeaderMap:
        return self


def header_pair(name: str, value: str) -> tuple[str, str]:
    """Return the name and the value of a header; the repr of a secret value is masked.

    >>> header_pair("Cookie", "session=1")
    ('Cookie', '***')
    """
    return name, _Revealed(value) if is_secret_header(name) else value


def header_map(headers: Mapping[str, str] | Iterable[tuple[str, str]]) -> HeaderMap:
    """Return headers as a `HeaderMap`; a `HeaderMap` is returned as it is.

    >>> headers = HeaderMap({"Accept": "*/*"})
    >>> header_map(headers) is headers
    True
    """
    return headers if isinstance(headers, HeaderMap) else HeaderMap(headers)


def is_secret_name(name: str) -> bool:
    """Return True if a field, parameter or header of this name holds a secret.

    >>> [is_secret_name(n) for n in ("X-My-Token", "weights_access_token", "apiKey", "max_tokens")]
    [True, True, True, False]
    """
    lowered = name.lower()
    if lowered.startswith("cf-access-") or lowered in _SECRET_WORDS:
        return True
    words = [word.lower() for word in _WORD.findall(name)]
    return not _SECRET_WORDS.isdisjoint(words) or not _SECRET_PAIRS.isdisjoint(pairwise(words))


@lru_cache(maxsize=1024)
def is_secret_header(name: str) -> bool:
    """Return True if a header of this name holds a secret.

    >>> [is_secret_header(n) for n in ("Cookie", "X-Team-Key", "X-Idempotency-Key", "Accept")]
    [True, True, False, False]
    """
    lowered = name.lower()
    return lowered not in _PLAIN_NAMES and (lowered.endswith("-key") or is_secret_name(name))


def is_secret_parameter(name: str) -> bool:
    """Return True if a query parameter of this name holds a secret, such as a signature that grants access.

    >>> [is_secret_parameter(n) for n in ("X-Amz-Signature", "sig", "key", "page")]
    [True, True, True, False]
    """
    return name.lower() in _SECRET_PARAMETERS or is_secret_name(name)


def secrets_of_header(name: str, value: str) -> Iterator[str]:
    """Yield the strings to mask for a secret header: its value, and the parts that a server parses from it.

    >>> list(secrets_of_header("Authorization", "Bearer abcdef"))
    ['Bearer abcdef', 'abcdef']
    >>> list(secrets_of_header("Cookie", "a=b; session=abcdef"))
    ['a=b; session=abcdef', 'b', 'abcdef']
    """
    yield value
    if name.lower() in ("cookie", "set-cookie"):
        yield from (pair.partition("=")[2].strip() for pair in value.split(";"))
    elif name.lower().endswith("authorization"):
        scheme, _, token = value.strip().partition(" ")
        yield token.strip().rstrip("=")
        if scheme.lower() == "basic":
            with suppress(ValueError):
                yield base64.b64decode(token).decode("latin-1").partition(":")[2]


def secrets_of_login(user: str, password: str) -> Iterator[str]:
    """Yield the strings to mask for a password: plain, percent-encoded, and in Basic authentication.

    >>> list(secrets_of_login("me", "abc%20def"))
    ['abc%20def', 'abc def', 'bWU6YWJjJTIwZGVm', 'bWU6YWJjIGRlZg']
    """
    passwords = dict.fromkeys((password, unquote(password)))
    yield from passwords
    for each in passwords:
        yield base64.b64encode(f"{user}:{each}".encode("utf-8", "surrogatepass")).decode("ascii").rstrip("=")


def mask_headers(
    headers: Mapping[str, str] | Iterable[tuple[str, str]], secrets: Iterable[str | Secret] = ()
) -> dict[str, str]:
    """Return a copy of headers in which secret headers, and secrets within other headers, are masked.

    >>> mask_headers({"Authorization": "Bearer abc", "Location": "https://bucket/o?sig=abc"})
    {'Authorization': '***', 'Location': 'https://bucket/o?sig=***'}
    """
    items = headers.items() if isinstance(headers, Mapping) else headers
    known = _known_forms(secrets)
    return {str(n): MASK if is_secret_header(str(n)) else _mask(_as_text(v), known) for n, v in items}


def mask_url(url: str) -> str:
    """Return an address in which user name, password, and parameters that grant access are masked.

    >>> mask_url("https://me:pw@host/p?X-Amz-Signature=abc&page=2")
    'https://***@host/p?X-Amz-Signature=***&page=2'
    """
    return _QUERY_PAIR.sub(_mask_query_pair, _USERINFO.sub(rf"\1{MASK}@", url))


def is_loopback(host: str) -> bool:
    """Return True for a host that only this machine reaches. Elsewhere a server needs a key.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    import ipaddress

    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def mask_text(text: str, secrets: Iterable[str | Secret] = ()) -> str:
    """Return a text in which secrets are masked: those recognised by name or form, and the given `secrets`.

    Values of fewer than six characters in `secrets` are not masked: they would hide ordinary words.

    >>> mask_text("key tml-abcdefgh refused; hello hunter22", ["hunter22"])
    'key *** refused; hello ***'
    """
    return _mask(text, _known_forms(secrets))


def mask_json(tree: Any, secrets: Iterable[str | Secret] = ()) -> Any:
    """Return a copy of a JSON tree in which texts under secret names, and secrets in other texts, are masked.

    Texts in lists and objects under a secret name are masked too. Numbers stay, such as a `token_count`.

    >>> mask_json({"path": "tinker://r/weights/a", "weights_access_token": "abc"})
    {'path': 'tinker://r/weights/a', 'weights_access_token': '***'}
    """
    return _mask_tree(tree, _known_forms(secrets), 0)


def _mask(text: str, known: tuple[str, ...]) -> str:
    for form in known:
        text = text.replace(form, MASK)
    text = _INNER_JSON_PAIR.sub(_mask_inner_pair, _JSON_PAIR.sub(_mask_json_pair, mask_url(text)))
    text = _BEARER.sub(rf"\1 {MASK}", _HEADER_LINE.sub(rf"\1\2{MASK}", text))
    return _JWT.sub(MASK, _VENDOR_KEY.sub(MASK, text))


def _mask_tree(tree: Any, known: tuple[str, ...], depth: int, secret: bool = False) -> Any:
    if isinstance(tree, str):
        return MASK if secret else _mask(tree, known)
    if isinstance(tree, (dict, list)) and depth > _DEEPEST:
        return MASK
    if isinstance(tree, list):
        return [_mask_tree(item, known, depth + 1, secret) for item in tree]
    if isinstance(tree, dict):
        hidden = _find_echoes(tree)
        return {
            _mask(str(name), known): MASK
            if name in hidden
            else _mask_tree(value, known, depth + 1, secret or is_secret_name(str(name)))
            for name, value in tree.items()
        }
    return tree


def _find_echoes(tree: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the fields in which a server's error report repeats a secret.

    A report about a refused field has the field's name in `loc`, and repeats its value in `input` or `ctx`.
    """
    place = tree.get("loc")
    secret = isinstance(place, list) and any(isinstance(part, str) and is_secret_name(part) for part in place)
    return ("input", "ctx") if secret else ()


def _mask_query_pair(match: re.Match[str]) -> str:
    value = MASK if is_secret_parameter(unquote(match[2])) else match[3]
    return f"{match[1]}{match[2]}={value}"


def _mask_json_pair(match: re.Match[str]) -> str:
    if not is_secret_name(match[2]):
        return match[0]
    return f"{match[1]}{match[2]}{match[1]}{match[3]}{match[4][0]}{MASK}{match[4][0]}"


def _mask_inner_pair(match: re.Match[str]) -> str:
    return match[1] + MASK if is_secret_name(match[1]) else match[0]


def _known_forms(secrets: Iterable[str | Secret]) -> tuple[str, ...]:
    """Return the forms of all known values of six or more characters, the longest first.

    Each value has three forms: plain, and percent-encoded with a blank as `%20` or as `+`.
    """
    forms: set[str] = set()
    for secret in secrets:
        value = secret.reveal() if isinstance(secret, Secret) else secret
        if len(value) >= _SHORTEST_KNOWN_SECRET:
            # Accept lone surrogates instead of failing.
            escaped = (form(value, safe="", errors="surrogatepass") for form in (quote, quote_plus))
            forms.update(_Revealed(form) for form in (value, *escaped))
    return tuple(sorted(forms, key=len, reverse=True))


def _as_text(value: object) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
