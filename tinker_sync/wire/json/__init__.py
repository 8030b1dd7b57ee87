"""Conversion between JSON and the types of this package, for requests and answers.

    model ── to_plain ─▶ tree ── dumps ─▶ bytes          encode = both
    bytes ── loads ─▶ tree ── from_plain ─▶ model        decode = both

Rules for writing:

- A model is written with its declared public fields. A declared field with the value None is left out.
  Elsewhere None is written as null: in free-form mappings and lists, and in a mapping that is the whole body.
- Bytes become base64 text in a declared field, and UTF-8 text in free-form values. Datetimes become RFC 3339
  text, dates and times ISO 8601 text, enums their values, tuples and ranges lists. UUIDs, decimals and paths
  become text. Instances of subclasses of str, int, float, dict and list, and numpy scalars, are written like
  the plain type. A float32 is converted to float64 first, so that no digit is lost.
- Keys become text: True, None, 1 and 1.5 become "true", "null", "1" and "1.5". Two keys that would become the
  same text are refused.
- Integers of any size are written. NaN and infinities are refused in requests, and are written as null in the
  answers of a server.
- Sets, bytes that are not UTF-8, halves of surrogate pairs, values of other classes, and a nesting of more
  than 100 lists and mappings are refused. The `InvalidInputError` names each place: `$.user_metadata.a[3]`.

Rules for reading:

- Answers may have unknown fields at any depth. `from_plain` refuses them in requests; `read_leniently`, for
  servers, ignores them and returns their names. A null for a field with a default gives the default.
- Of equal keys the last one counts. NaN, Infinity, numbers too large for a float, and integers of more than
  64 bits become floats. A null in a list or mapping of floats in an answer becomes NaN. Half of a surrogate
  pair, such as `\\ud800`, is accepted in answers and refused by servers.
- Everything else raises a `WireError`: bytes that are not UTF-8, a byte order mark, an empty body, a nesting
  of more than 100 lists and objects, and values that a field cannot hold. The error has the place, such as
  `$.sequences[2].stop_reason`, and a short excerpt, which shows no value that may be a secret.

These rules hold with and without orjson. The functions are pure; any thread may call them.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar, get_args, get_origin

import attrs

from tinker_sync._base.lazy import LazyModule
from tinker_sync.errors import InvalidInputError
from tinker_sync.types._convert import exact_kinds, located
from tinker_sync.types._model import Model
from tinker_sync.types._structured import Structured, Unfit, fields_of, is_model, members_of
from tinker_sync.wire.json._unfit import (
    Step,
    described,
    excerpt,
    input_error,
    note,
    noting,
    problems_in,
    wire_error,
)
from tinker_sync.wire.json._writer import Writer, problems_of

if TYPE_CHECKING:
    from cattrs import Converter

    from tinker_sync.wire.json import _reader as _cattrs
else:  # loaded with the first value that needs a conversion
    _cattrs = LazyModule("tinker_sync.wire.json._reader")

try:
    import orjson
except ImportError:
    HAS_ORJSON = False
else:
    HAS_ORJSON = True

__all__ = [
    "DEFAULT",
    "HAS_ORJSON",
    "MAX_DEPTH",
    "STANDARD_LIBRARY",
    "Backend",
    "Orjson",
    "decode",
    "dumps",
    "encode",
    "from_plain",
    "loads",
    "note",
    "noting",
    "read_leniently",
    "to_plain",
    "with_number",
]

T = TypeVar("T")

MAX_DEPTH = 100
"""The deepest nesting of lists and objects, for reading and writing. The protocol itself needs about ten."""

_TOO_DEEP = f"lists and objects lie in each other more than {MAX_DEPTH} deep"


class Backend(Protocol):
    """A writer and reader of JSON text, with orjson or without it.

    It raises `Unfit` for values and texts that it cannot convert.
    """

    def write(self, tree: Any) -> bytes:
        """Return the JSON text of a tree of plain types with finite numbers, which may contain arrays."""

    def read(self, data: bytes) -> Any:
        """Parse JSON text into a tree."""


_BUFFER_BYTES: Final = 4096


class StandardLibrary:
    """The backend that uses the module `json`. Its results define those of all backends."""

    def write(self, tree: Any) -> bytes:
        text = json.dumps(tree, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_listed)
        try:
            return text.encode("utf-8")
        except UnicodeEncodeError:
            del text
        raise next(_lone_surrogates(tree))

    def read(self, data: bytes) -> Any:
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
        try:
            text = orjson.dumps(tree, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError:  # integers beyond 64 bits, halves of surrogate pairs
            return STANDARD_LIBRARY.write(tree)
        # A short text of orjson keeps a larger buffer alive. The copy frees it, because thousands of requests
        # may wait for minutes.
        return bytes(memoryview(text)) if len(text) < _BUFFER_BYTES // 2 else text

    def read(self, data: bytes) -> Any:
        try:
            return orjson.loads(data)
        except ValueError:  # NaN, numbers too large for a float, halves of surrogate pairs, and errors
            return STANDARD_LIBRARY.read(data)


STANDARD_LIBRARY = StandardLibrary()
DEFAULT: Backend = Orjson() if HAS_ORJSON else STANDARD_LIBRARY


@cache
def _conversion(answers: bool, *, lenient: bool = False) -> Converter:
    return _cattrs.make_converter(answers=answers, unknown=_note_unknown if lenient else None)


@cache
def _writer_for(answers: bool) -> Writer:
    return Writer(answers=answers)


def _note_unknown(cls: type, names: set[str]) -> None:
    note(names, cls.__name__)


def encode(request: Model | Mapping[str, Any], *, backend: Backend = DEFAULT) -> bytes:
    """Return the JSON bytes of a request. Raises `InvalidInputError` for a value without a JSON form.

    The fields of a model that are None are left out; the values of a mapping that are None become null.

    >>> from tinker_sync.types import LoraConfig
    >>> encode(LoraConfig(rank=8))
    b'{"rank":8,"train_unembed":true,"train_mlp":true,"train_attn":true}'
    """
    return dumps(request, backend=backend)


def with_number(body: bytes, number: int) -> bytes:
    """Return the JSON bytes of a request with its sequence number added.

    `body` must have at least one field, and no `seq_id`.

    >>> with_number(b'{"model_id":"m"}', 7)
    b'{"seq_id":7,"model_id":"m"}'
    """
    return b'{"seq_id":%d,' % number + body[1:]


def decode(data: bytes | bytearray | memoryview, cls: type[T], *, backend: Backend = DEFAULT) -> T:
    """Parse JSON bytes into a value of class `cls`. Raises `WireError` if they are not JSON or do not fit.

    >>> from tinker_sync.types import LoraConfig
    >>> decode(b'{"rank":"8"}', LoraConfig)
    LoraConfig(rank=8, seed=None, train_unembed=True, train_mlp=True, train_attn=True)
    """
    return from_plain(loads(data, backend=backend), cls)


def dumps(tree: Any, *, backend: Backend = DEFAULT) -> bytes:
    """Return the JSON bytes of a model, or of nested lists and mappings, which may contain models.

    Raises `InvalidInputError` for a value without a JSON form.

    >>> dumps({"ttl_seconds": None})
    b'{"ttl_seconds":null}'
    """
    plain = to_plain(tree)
    try:
        return _write(plain, backend)
    except InvalidInputError as error:
        problems = list(described(error))
    raise input_error(problems)


def loads(
    data: bytes | bytearray | memoryview, *, backend: Backend = DEFAULT, whole_text: bool = False
) -> Any:
    """Parse JSON bytes into a tree of lists, dicts and scalars.

    Raises `WireError` if they are not JSON, or nest deeper than `MAX_DEPTH`; with `whole_text`, which servers
    set, also for text with half of a surrogate pair.

    >>> loads(b'{"a": [1, 2.5, null]}')
    {'a': [1, 2.5, None]}
    """
    data = bytes(data)
    try:
        if not data.strip(b" \t\r\n"):
            raise Unfit(f"expected JSON, got {'only white space' if data else 'an empty body'}")
        tree = backend.read(data)
        if depth_of(data) > MAX_DEPTH:
            raise Unfit(_TOO_DEEP)
        if whole_text and _SURROGATE.search(data):
            for problem in _lone_surrogates(tree):
                raise problem
    except InvalidInputError as error:
        problems = list(described(error))
    else:
        return tree
    raise wire_error(problems)


def to_plain(value: Any) -> Any:
    """Return a value as a tree of mappings, lists, text, numbers and numpy arrays, ready for a `Backend`.

    Raises `InvalidInputError` for a value without a JSON form.

    >>> from tinker_sync.types import AdamParams
    >>> to_plain(AdamParams(learning_rate=1))["learning_rate"]
    1.0
    """
    write = _writer_for(getattr(type(value), "__response__", False)).write
    try:
        try:
            return write(value)
        except InvalidInputError:
            problems = problems_in(problems_of(value, write))
    except RecursionError:
        problems = [("$", f"lists and mappings lie in each other more than {MAX_DEPTH} deep")]
    raise input_error(problems)


def from_plain(tree: Any, cls: type[T]) -> T:
    """Convert a parsed JSON tree to a value of class `cls`. Raises `WireError` for a tree that does not fit.

    >>> from tinker_sync.types import Cursor
    >>> from_plain({"offset": 0, "limit": 20}, Cursor)
    Traceback (most recent call last):
        ...
    tinker_sync.errors.WireError: $.total_count: is missing
    """
    with suppress(NotExact):
        made: T = model_of(tree, cls)
        return made
    return _structure(_conversion(getattr(cls, "__response__", True)), tree, cls)


def read_leniently(tree: Any, cls: type[T]) -> tuple[T, set[str]]:
    """Convert a parsed JSON tree to a request. Ignore its unknown fields, and return their names too.

    At most a hundred names are returned. Values of known fields are checked as in `from_plain`.

    Raises:
        WireError: a value does not fit its field, or a field is missing.

    >>> from tinker_sync.types import LoraConfig
    >>> config, ignored = read_leniently({"rank": 8, "colour": "red"}, LoraConfig)
    >>> config.rank, ignored
    (8, {'LoraConfig.colour'})
    """
    with noting() as ignored:
        return _structure(_conversion(False, lenient=True), tree, cls), ignored


def _structure(converter: Converter, tree: Any, cls: type[T]) -> T:
    try:
        return converter.structure(tree, cls)
    except Exception as error:  # noqa: BLE001  # raised by hooks; `problems_in` raises others again
        problems = problems_in(located(error))
    raise wire_error(problems)


# ------------------------------------------------------------------------------------------- exact values

# A fast path for answers whose values need no conversion: most answers without arrays. `model_of` looks at
# the class of each value. At the first one that may need a conversion it raises `NotExact`, and the caller
# uses the cattrs converters instead. So a program whose answers all have the declared classes loads no
# converter: the import of cattrs takes longer than a first request.


class NotExact(Exception):
    """The error for a value that may need a conversion."""


def model_of(tree: Any, cls: Any) -> Any:
    """Convert a JSON tree to the model `cls` of an answer, if all values have the declared classes.

    Unknown fields are ignored.

    Raises:
        NotExact: a value in the tree may need a conversion, or must be refused; or `cls` is not a class of
            answers.

    >>> from tinker_sync.types import CreateSessionResponse
    >>> model_of({"session_id": "s", "new": 1}, CreateSessionResponse).session_id
    's'
    """
    if type(tree) is not dict:
        raise NotExact
    values = {}
    for name, accept in _fields_of(cls).items():
        if name in tree:
            values[name] = accept(tree[name])
    try:
        return cls(**values)
    except (TypeError, InvalidInputError):  # raised again, with its place, by the converter
        raise NotExact from None


@cache
def _fields_of(cls: Any) -> dict[str, Any]:
    """Return a function for each field, by name: it takes a JSON value, and returns the value of the field.

    Each function raises `NotExact` for a value that may need a conversion.

    Raises:
        NotExact: the class is not that of an answer, or has fields with other names in JSON.
    """
    plain = is_model(cls) and cls.__response__ and not cls.__open__ and attrs.has(cls)
    if not plain or any(field.name != field.alias for field in attrs.fields(cls)):
        raise NotExact
    return {field.name: _acceptor(field.type) for field in fields_of(cls)}


def _acceptor(annotation: Any) -> Any:
    kinds: set[Any] = {type(None)} & {*get_args(annotation)}
    member, *others = members_of(annotation)
    if get_origin(member) is list and not others:
        return _list_acceptor(kinds, get_args(member)[0])
    if get_origin(member) is Literal and not others:
        kinds |= {*map(type, get_args(member))}  # the field itself compares the value
    elif is_model(member) and not others:
        return lambda value: None if type(value) in kinds else model_of(value, member)
    else:
        kinds |= {kind for kind in exact_kinds(annotation) if not issubclass(kind, Structured)}

    def accept(value: Any) -> Any:
        if type(value) not in kinds:
            raise NotExact
        return value

    return accept


def _list_acceptor(kinds: set[type], item: Any) -> Any:
    accept_item = _acceptor(item)

    def accept(value: Any) -> Any:
        if type(value) in kinds:
            return value
        if type(value) is not list:
            raise NotExact
        return [accept_item(each) for each in value]

    return accept


# ------------------------------------------------------------------------------------------- trees and bytes

# orjson handles only values and texts for which its result is that of the standard library. The standard
# library handles those that orjson refuses, and returns the value or raises the error.


def _write(tree: Any, backend: Backend) -> bytes:
    """Return the JSON bytes of a tree. Refuse a nesting deeper than `MAX_DEPTH`, as `loads` does."""
    try:
        data = backend.write(tree)
    except RecursionError:
        data = None
    if data is None or depth_of(data) > MAX_DEPTH:
        raise Unfit(_TOO_DEEP)
    return data


# ------------------------------------------------------------------------------------------------- writing


def _listed(array: Any) -> list[Any]:
    """Return an array as a list of Python's numbers, which the module `json` can write."""
    listed: list[Any] = array.tolist()
    return listed


def _lone_surrogates(tree: Any) -> Any:
    """Yield an error for each key or text in a tree that UTF-8 cannot encode.

    These are the texts with half of a surrogate pair.
    """
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


_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
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
    """Return the deepest nesting of lists and objects in a valid JSON text.

    For a text with at most `MAX_DEPTH` brackets and quotes, return the number of these instead. It is at
    least the depth, and callers only compare the depth with `MAX_DEPTH`.
    """
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
