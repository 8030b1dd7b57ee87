"""Values nobody may see, and how to recognise them in headers, addresses, JSON and plain text.

A leaf: it imports nothing of the package, holds no state, and every function is pure, so any thread may call it.
Masking is by name (a header called `Authorization`), by form (`tml-...`, a JWT, a password inside an address) and by value
(the keys the caller knows about). Too much masked is a nuisance, too little is a leak, so in doubt it masks.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NoReturn, SupportsIndex
from urllib.parse import quote, quote_plus, unquote

MASK: Final = "***"

# Shorter values would blank out ordinary words; no key worth the name is this short.
_SHORTEST_KNOWN_SECRET: Final = 6

_SECRET_HEADERS: Final = frozenset(
    {
        "x-api-key",
        "authorization",
        "proxy-authorization",
        "cookie",
        "set-cookie",
        "cf-access-client-id",
        "cf-access-client-secret",
        "cf-access-jwt-assertion",
        "x-tinker-weights-access-token",
    }
)
_PLAIN_NAMES: Final = frozenset({"x-idempotency-key", "idempotency-key"})
# A name is secret when one of its words is: `X-My-Token`, `weights_access_token`, `X-Amz-Signature`, `clientSecret`.
_SECRET_WORDS: Final = frozenset(
    "auth authorization authentication bearer cookie credential credentials jwt passphrase passwd password pwd pw "
    "secret secrets sig signature token apikey accesstoken".split()
)
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_QUERY_SECRETS: Final = frozenset({"key", "policy", "key-pair-id", "awsaccesskeyid", "googleaccessid", "code"})

_VENDOR_KEY: Final = re.compile(r"\btml-[A-Za-z0-9_\-]{4,}")
_JWT: Final = re.compile(r"\beyJ[A-Za-z0-9_\-]{4,}(?:\.[A-Za-z0-9_\-]*)*")
_BEARER: Final = re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9+/=_.~\-]{6,}")
# Authority part up to its last "@": a password may itself hold an "@".
_USERINFO: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*://)[^/?#\s\"'<>]*@")
_QUERY_PAIR: Final = re.compile(r"([?&#;])([^=&#;\s?\"'<>]+)=([^&#;\s\"'<>]*)")
_JSON_PAIR: Final = re.compile(r"([\"'])([A-Za-z0-9_\-]+)\1(\s*:\s*)(\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')")


class _Revealed(str):
    """The text of a secret in the hands of code that sends it: an ordinary `str` whose repr still shows nothing.

    Tracebacks with local variables, debuggers and reprs of dictionaries print reprs, so a header table that holds the key on its
    way to the socket does not give it away.
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
    """A text that repr, str, format, vars, json and pickle never show. Immutable, safe to share between threads.

    Pickling refuses with a `TypeError`: a key that travels inside a pickle ends up in caches, queues and bug reports. Give the
    other process its own (environment variable, credentials file). Copies are the same object.

    >>> key = Secret("tml-example")
    >>> key, f"{key}", key.reveal() == "tml-example"
    (Secret('***'), '***', True)
    """

    __slots__ = ("_text",)

    _text: _Revealed

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):  # a Secret in a Secret, bytes: a programming mistake worth an early stop
            raise TypeError(f"a secret is a str, not {type(text).__name__}")
        object.__setattr__(self, "_text", _Revealed(text))

    def reveal(self) -> str:
        """Give the text itself, for the one line that sends or compares it."""
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
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(
            self._text.encode("utf-8", "surrogatepass"), other._text.encode("utf-8", "surrogatepass")
        )

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("a Secret does not change")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError("a Secret does not change")

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a Secret cannot be pickled: give the other process its key through TINKER_API_KEY or its credentials file"
        )

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Secret:
        return self


class HeaderMap(Mapping[str, str]):
    """Header names and values, found under any case, kept in order, never changed; the repr shows no secret.

    >>> headers = HeaderMap({"X-API-Key": "tml-example", "Accept": "*/*"})
    >>> headers["x-api-key"], headers
    ('tml-example', HeaderMap({'X-API-Key': '***', 'Accept': '*/*'}))
    """

    __slots__ = ("_pairs",)

    def __init__(self, headers: Mapping[str, str] | Iterable[tuple[str, str]] = ()) -> None:
        items = headers.items() if isinstance(headers, Mapping) else headers
        self._pairs = {str(name).lower(): (str(name), value) for name, value in items}

    def __getitem__(self, name: str) -> str:
        return self._pairs[name.lower()][1]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._pairs.values())

    def __len__(self) -> int:
        return len(self._pairs)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._pairs

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return {n.lower(): v for n, v in self.items()} == {str(n).lower(): v for n, v in other.items()}

    def __hash__(self) -> int:
        return hash(frozenset((name, value) for name, (_, value) in self._pairs.items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({mask_headers(self)!r})"


def is_secret_name(name: str) -> bool:
    """Tell whether a header, field or parameter of this name holds something nobody may see.

    >>> [is_secret_name(n) for n in ("X-My-Token", "weights_access_token", "X-Idempotency-Key", "max_tokens")]
    [True, True, False, False]
    """
    lowered = name.lower()
    if lowered in _PLAIN_NAMES:
        return False
    if lowered in _SECRET_HEADERS or lowered.startswith("cf-access-"):
        return True
    words = [word.lower() for word in _WORD.findall(name)]
    return (
        not _SECRET_WORDS.isdisjoint(words)
        or lowered in _SECRET_WORDS
        or any(a + " " + b in ("api key", "access key", "private key") for a, b in zip(words, words[1:]))
    )


def mask_headers(headers: Mapping[str, str] | Iterable[tuple[str, str]]) -> dict[str, str]:
    """Copy headers with the secret ones masked and addresses in the others cleaned."""
    items = headers.items() if isinstance(headers, Mapping) else headers
    return {
        str(name): MASK if is_secret_name(str(name)) or str(name).lower().endswith("-key") and str(name).lower() not in _PLAIN_NAMES else mask_text(_as_text(value))
        for name, value in items
    }


def mask_url(url: str) -> str:
    """Hide user name and password of an address, and the parameters that sign or open it.

    >>> mask_url("https://me:pw@host/p?X-Amz-Signature=abc&page=2")
    'https://***@host/p?X-Amz-Signature=***&page=2'
    """
    return _QUERY_PAIR.sub(_mask_pair, _USERINFO.sub(rf"\1{MASK}@", url))


def mask_text(text: str, secrets: Iterable[str | Secret] = ()) -> str:
    """Hide what looks like a key, and every value of `secrets`, in free text.

    >>> mask_text("key tml-abcdef refused; hello hunter22", ["hunter22"])
    'key *** refused; hello ***'
    """
    for form in sorted(_known_forms(secrets), key=len, reverse=True):
        text = text.replace(form, MASK)
    text = mask_url(text)
    text = _JSON_PAIR.sub(_mask_json_pair, text)
    text = _BEARER.sub(rf"\1 {MASK}", text)
    return _JWT.sub(MASK, _VENDOR_KEY.sub(MASK, text))


def mask_json(tree: Any, secrets: Iterable[str | Secret] = ()) -> Any:
    """Copy a JSON tree with secret fields masked by name and every text cleaned as `mask_text` does.

    >>> mask_json({"path": "tinker://r/weights/a", "weights_access_token": "abc"})
    {'path': 'tinker://r/weights/a', 'weights_access_token': '***'}
    """
    known = tuple(_known_forms(secrets))
    return _mask_tree(tree, known, 0)


def _mask_tree(tree: Any, known: tuple[str, ...], depth: int) -> Any:
    if isinstance(tree, str):
        return mask_text(tree, known)
    if depth > 100:  # nobody reads that deep, and the stack is finite
        return MASK if isinstance(tree, (dict, list)) else tree
    if isinstance(tree, list):
        return [_mask_tree(item, known, depth + 1) for item in tree]
    if isinstance(tree, dict):
        about_secret = _is_about_secret(tree.get("loc"))
        return {
            name: MASK
            if (isinstance(value, str) and is_secret_name(str(name))) or (about_secret and name in ("input", "ctx"))
            else _mask_tree(value, known, depth + 1)
            for name, value in tree.items()
        }
    return tree


def _is_about_secret(place: Any) -> bool:
    """A validation report of an open server names the field under `loc` and repeats its value under `input`."""
    return isinstance(place, list) and any(isinstance(part, str) and is_secret_name(part) for part in place)


def _mask_pair(match: re.Match[str]) -> str:
    name = unquote(match[2])
    secret = is_secret_name(name) or name.lower() in _QUERY_SECRETS
    return f"{match[1]}{match[2]}={MASK if secret else match[3]}"


def _mask_json_pair(match: re.Match[str]) -> str:
    if not is_secret_name(match[2]):
        return match[0]
    end = match[4][0]
    return f"{match[1]}{match[2]}{match[1]}{match[3]}{end}{MASK}{end}"


def _known_forms(secrets: Iterable[str | Secret]) -> set[str]:
    """Each known value as it may stand in a text: as it is, and percent-encoded in either way."""
    forms: set[str] = set()
    for secret in secrets:
        value = secret.reveal() if isinstance(secret, Secret) else secret
        if len(value) >= _SHORTEST_KNOWN_SECRET:
            forms.update((value, quote(value, safe=""), quote_plus(value)))
    return forms


def _as_text(value: object) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
