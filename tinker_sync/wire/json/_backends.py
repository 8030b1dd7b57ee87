"""Trees to bytes and back: orjson where it is installed, the standard library else, with one meaning.

The standard library defines the meaning. orjson only handles what it reads and writes in the same way;
the standard library handles what orjson refuses, and returns the value or raises the error. A tree that gets
here holds nothing that neither may write (NaN, sets, keys other than text).

Pure functions over their arguments; any thread may enter.
"""

from __future__ import annotations

import json
from array import array
from itertools import accumulate
from typing import Any, Final, Protocol

from tinker_sync.types._structured import Unfit
from tinker_sync.wire.json._unfit import Step, excerpt

try:
    import orjson
except ImportError:
    HAS_ORJSON = False
else:
    HAS_ORJSON = True

MAX_DEPTH = 100
"""Lists and objects within each other, in both directions. The protocol itself needs about ten."""

_TOO_DEEP = f"lists and objects lie in each other more than {MAX_DEPTH} deep"


class Backend(Protocol):
    """A writer and reader of JSON text. It raises `Unfit`."""

    def write(self, tree: Any) -> bytes:
        """Return the text of a tree of exact types with finite numbers, in which arrays may remain."""

    def read(self, data: bytes) -> Any:
        """Return the tree of a text."""


_BUFFER_BYTES: Final = 4096


class StandardLibrary:
    """The backend that defines the meaning and needs nothing installed."""

    def write(self, tree: Any) -> bytes:
        """Return the text of a tree."""
        text = json.dumps(tree, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_listed)
        try:
            return text.encode("utf-8")
        except UnicodeEncodeError:
            del text
        raise next(_lone_surrogates(tree))

    def read(self, data: bytes) -> Any:
        """Return the tree of a text."""
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            problem = f"is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}"
        else:
            try:
                if _may_hold_long_integers(data):
                    return json.loads(text, parse_int=_bounded_integer)
                return json.loads(text)
            except json.JSONDecodeError as error:
                problem = _complaint(text, error)
            except RecursionError:
                problem = _TOO_DEEP
        # Raised outside of the handlers: the library's errors hold the whole text, which may hold a token.
        raise Unfit(problem)


class Orjson:
    """The backend that is several times as fast and writes arrays without lists."""

    def write(self, tree: Any) -> bytes:
        """Return the text of a tree."""
        try:
            text = orjson.dumps(tree, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError:  # integers beyond 64 bits, halves of surrogate pairs
            return STANDARD_LIBRARY.write(tree)
        # A short text keeps the buffer it was written into, and thousands of requests wait for minutes.
        return bytes(memoryview(text)) if len(text) < _BUFFER_BYTES // 2 else text

    def read(self, data: bytes) -> Any:
        """Return the tree of a text."""
        try:
            return orjson.loads(data)
        except ValueError:  # NaN, numbers too large for a float, halves of surrogate pairs, and errors
            return STANDARD_LIBRARY.read(data)


STANDARD_LIBRARY = StandardLibrary()
DEFAULT: Backend = Orjson() if HAS_ORJSON else STANDARD_LIBRARY


def write(tree: Any, backend: Backend) -> bytes:
    """Return the bytes of a tree; refuse what `read` would refuse."""
    try:
        data = backend.write(tree)
    except RecursionError:
        data = None
    if data is None or depth_of(data) > MAX_DEPTH:
        raise Unfit(_TOO_DEEP)
    return data


def read(data: bytes, backend: Backend) -> Any:
    """Return the tree of bytes that were received."""
    if not data.strip(b" \t\r\n"):
        raise Unfit("expected JSON, got an empty body" if not data else "expected JSON, got only white space")
    tree = backend.read(data)
    if depth_of(data) > MAX_DEPTH:
        raise Unfit(_TOO_DEEP)
    return tree


# ------------------------------------------------------------------------------------------------- writing


def _listed(array: Any) -> list[Any]:
    """Return an array as a list for the standard library; `tolist` widens narrow numbers to Python's."""
    listed: list[Any] = array.tolist()
    return listed


def _lone_surrogates(tree: Any) -> Any:
    """Yield an error for every text in a tree that has no UTF-8 form."""
    steps: list[tuple[Any, tuple[Step, ...]]] = [(tree, ())]
    while steps:
        value, path = steps.pop()
        if isinstance(value, dict):
            for key in value:
                if not _is_encodable(key):
                    yield _half_a_character(path)
            steps.extend((item, (*path, key)) for key, item in value.items())
        elif isinstance(value, (list, tuple)):
            steps.extend((item, (*path, index)) for index, item in enumerate(value))
        elif isinstance(value, str) and not _is_encodable(value):
            yield _half_a_character(path)


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _half_a_character(path: tuple[Step, ...]) -> Unfit:
    return Unfit("holds half of a surrogate pair, which no text on the wire can", steps=path)


# ------------------------------------------------------------------------------------------------- reading


_DIGITS = bytes(ord("0") if chr(octet).isdigit() else octet for octet in range(128)) + bytes(range(128, 256))


def _may_hold_long_integers(data: bytes) -> bool:
    """Return whether there is a run of 19 digits: anything shorter fits 64 bits."""
    return b"0" * 19 in data.translate(_DIGITS)


def _bounded_integer(digits: str) -> int | float:
    """Return a whole number of 64 bits, signed or not; a float beyond that."""
    if len(digits) <= 20 and -(2**63) <= (number := int(digits)) < 2**64:
        return number
    return float(digits)


def _complaint(text: str, error: json.JSONDecodeError) -> str:
    if text.startswith("\ufeff"):
        return "expected JSON, got a byte order mark in front of it"
    return f"is not JSON: {error.msg} at character {error.pos} ({excerpt(text, error.pos)})"


_BRACKETS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_ALL_BUT_BRACKETS = bytes(octet for octet in range(256) if octet not in b'[]{}"')


def depth_of(data: bytes) -> int:
    """Return how many lists and objects lie in each other, at most, in a text that parses."""
    if b"\\" in data:
        data = _without_escapes(data)
    brackets = data.translate(_BRACKETS, _ALL_BUT_BRACKETS)
    if len(brackets) <= MAX_DEPTH:
        return len(brackets)
    # Texts without brackets in them have left pairs of quotes; what is left within quotes is text.
    brackets = brackets.replace(b'""', b"")
    if b'"' in brackets:
        brackets = b"".join(brackets.split(b'"')[::2])
    if not brackets:
        return 0
    return max(accumulate(array("b", brackets)))


def _without_escapes(data: bytes) -> bytes:
    """Return the same nesting without any escaped quote. Escapes occur only in texts."""
    return data.replace(b"\\\\", b"").replace(b'\\"', b"")
