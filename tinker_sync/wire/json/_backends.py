"""Conversion between trees and JSON bytes, by orjson if it is installed, else by the standard library.

Both give the same results, which the standard library defines. orjson handles only values and texts for which
its result is the same. The standard library handles those that orjson refuses, and returns the value or
raises the error. The callers pass no tree with values that JSON cannot hold (NaN, sets, keys other than
text).

The functions are pure; any thread may call them.
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
"""The deepest nesting of lists and objects, for reading and writing. The protocol itself needs about ten."""

_TOO_DEEP = f"lists and objects lie in each other more than {MAX_DEPTH} deep"


class Backend(Protocol):
    """A writer and reader of JSON text. It raises `Unfit` for values and texts that it cannot convert."""

    def write(self, tree: Any) -> bytes:
        """Return the JSON text of a tree of plain types with finite numbers, which may contain arrays."""

    def read(self, data: bytes) -> Any:
        """Parse JSON text into a tree."""


_BUFFER_BYTES: Final = 4096


class StandardLibrary:
    """The backend that uses the module `json`. Its results define those of all backends."""

    def write(self, tree: Any) -> bytes:
        """Return the JSON text of a tree."""
        text = json.dumps(tree, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_listed)
        try:
            return text.encode("utf-8")
        except UnicodeEncodeError:
            del text
        raise next(_lone_surrogates(tree))

    def read(self, data: bytes) -> Any:
        """Parse JSON text into a tree."""
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
        # Raised outside of the handlers, because the errors of the library refer to the whole text, which may
        # contain a token.
        raise Unfit(problem)


class Orjson:
    """The backend that uses orjson, which is several times as fast and writes arrays without making lists."""

    def write(self, tree: Any) -> bytes:
        """Return the JSON text of a tree."""
        try:
            text = orjson.dumps(tree, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError:  # integers beyond 64 bits, halves of surrogate pairs
            return STANDARD_LIBRARY.write(tree)
        # A short text of orjson keeps a larger buffer alive. The copy frees it, because thousands of requests
        # may wait for minutes.
        return bytes(memoryview(text)) if len(text) < _BUFFER_BYTES // 2 else text

    def read(self, data: bytes) -> Any:
        """Parse JSON text into a tree."""
        try:
            return orjson.loads(data)
        except ValueError:  # NaN, numbers too large for a float, halves of surrogate pairs, and errors
            return STANDARD_LIBRARY.read(data)


STANDARD_LIBRARY = StandardLibrary()
DEFAULT: Backend = Orjson() if HAS_ORJSON else STANDARD_LIBRARY


def write(tree: Any, backend: Backend) -> bytes:
    """Return the JSON bytes of a tree. Refuse a nesting that `read` would refuse."""
    try:
        data = backend.write(tree)
    except RecursionError:
        data = None
    if data is None or depth_of(data) > MAX_DEPTH:
        raise Unfit(_TOO_DEEP)
    return data


def read(data: bytes, backend: Backend) -> Any:
    """Parse received JSON bytes into a tree."""
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
    """Yield an error for each text in a tree if the text has no UTF-8 form."""
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
    """Return True if the text has a run of 19 digits. A shorter integer fits 64 bits."""
    return b"0" * 19 in data.translate(_DIGITS)


def _bounded_integer(digits: str) -> int | float:
    """Return an integer that fits 64 bits, signed or unsigned, as an int, and any other as a float."""
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
    """Return the deepest nesting of lists and objects in a valid JSON text."""
    if b"\\" in data:
        data = _without_escapes(data)
    brackets = data.translate(_BRACKETS, _ALL_BUT_BRACKETS)
    if len(brackets) <= MAX_DEPTH:
        return len(brackets)
    # A JSON string without brackets has become a pair of quotes, which is removed. Brackets between the
    # remaining quotes belong to strings.
    brackets = brackets.replace(b'""', b"")
    if b'"' in brackets:
        brackets = b"".join(brackets.split(b'"')[::2])
    if not brackets:
        return 0
    return max(accumulate(array("b", brackets)))


def _without_escapes(data: bytes) -> bytes:
    """Return the text without escaped backslashes and quotes, which occur only in strings."""
    return data.replace(b"\\\\", b"").replace(b'\\"', b"")
