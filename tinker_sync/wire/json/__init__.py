"""Conversion between JSON and the types of this package, for requests and answers.

    model ── to_plain ─▶ tree ── dumps ─▶ bytes          encode = both
    bytes ── loads ─▶ tree ── from_plain ─▶ model        decode = both

Rules for writing:

- A model is written with its declared public fields. A declared field with the value None is left out.
  Elsewhere None is written as null: in free-form mappings and lists, and in a mapping that is the whole body.
- Bytes become base64 text in a declared field, and UTF-8 text in free-form values. Datetimes become RFC 3339
  text, enums their values, tuples and ranges lists. Instances of subclasses of str, int, float, dict and
  list, and numpy scalars, are written like the plain type. A float32 is converted to float64 first, so that
  no digit is lost.
- Keys become text: True, None, 1 and 1.5 become "true", "null", "1" and "1.5". Two keys that would become the
  same text are refused.
- Integers of any size are written. NaN and infinities are refused in requests, and are written as null in the
  answers of a server.
- Also refused are sets, bytes that are not UTF-8, halves of surrogate pairs, other classes, and a nesting of
  more than 100 lists and mappings. The `InvalidInputError` names each place: `$.user_metadata.a[3]`.

Rules for reading:

- Answers may have unknown fields at any depth. `from_plain` refuses them in requests; `read_leniently`, for
  servers, ignores them and returns their names. A null for a field with a default gives the default.
- Of equal keys the last one counts. NaN, Infinity, numbers too large for a float, and integers of more than
  64 bits become floats. A null in a list or mapping of floats in an answer becomes NaN. Half of a surrogate
  pair, such as `\\ud800`, is accepted.
- Everything else raises a `WireError`: bytes that are not UTF-8, a byte order mark, an empty body, a nesting
  of more than 100 lists and objects, and values that a field cannot hold. The error has the place, such as
  `$.sequences[2].stop_reason`, and a short excerpt, unless the name of the field marks it as secret.

These rules hold with and without orjson. The functions are pure; any thread may call them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from tinker_sync._lazy import LazyModule
from tinker_sync.errors import InvalidInputError
from tinker_sync.types._model import Model
from tinker_sync.wire.json._backends import (
    DEFAULT,
    HAS_ORJSON,
    MAX_DEPTH,
    STANDARD_LIBRARY,
    Backend,
    Orjson,
    read,
    write,
)
from tinker_sync.wire.json._exact import NotExact, model_of, tree_of
from tinker_sync.wire.json._unfit import described, input_error, note, noting, problems_in, wire_error

if TYPE_CHECKING:
    from cattrs import Converter

    from tinker_sync.wire.json import _converter as _cattrs
else:  # loaded with the first value that needs a conversion
    _cattrs = LazyModule("tinker_sync.wire.json._converter")

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


@cache
def _conversion(answers: bool) -> Converter:
    return _cattrs.make_converter(answers=answers)


@cache
def _lenient_conversion() -> Converter:
    return _cattrs.make_converter(answers=False, unknown=lambda cls, names: note(names, cls.__name__))


def encode(request: Model | Mapping[str, Any], *, backend: Backend = DEFAULT) -> bytes:
    """Return the JSON bytes of a model, or of a mapping with its nulls. Raises `InvalidInputError`.

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
    """Return JSON bytes as a value of class `cls`. Raises `WireError`.

    >>> from tinker_sync.types import LoraConfig
    >>> decode(b'{"rank":"8"}', LoraConfig)
    LoraConfig(rank=8, seed=None, train_unembed=True, train_mlp=True, train_attn=True)
    """
    return from_plain(loads(data, backend=backend), cls)


def dumps(tree: Any, *, backend: Backend = DEFAULT) -> bytes:
    """Return the JSON bytes of nested lists and mappings, which may contain models.

    Raises `InvalidInputError`.

    >>> dumps({"ttl_seconds": None})
    b'{"ttl_seconds":null}'
    """
    plain = to_plain(tree)
    try:
        return write(plain, backend)
    except InvalidInputError as error:
        problems = list(described(error))
    raise input_error(problems)


def loads(data: bytes | bytearray | memoryview, *, backend: Backend = DEFAULT) -> Any:
    """Parse JSON bytes into a tree of lists, dicts, text and numbers. Raises `WireError`.

    >>> loads(b'{"a": [1, 2.5, null]}')
    {'a': [1, 2.5, None]}
    """
    try:
        return read(bytes(data), backend)
    except InvalidInputError as error:
        problems = list(described(error))
    raise wire_error(problems)


def to_plain(value: Any) -> Any:
    """Return a value as a tree of mappings, lists, text, numbers and numpy arrays.

    Raises `InvalidInputError`.

    >>> from tinker_sync.types import AdamParams
    >>> to_plain(AdamParams(learning_rate=1))["learning_rate"]
    1.0
    """
    try:
        try:
            return tree_of(value)
        except NotExact:
            pass
        converter = _conversion(getattr(type(value), "__response__", False))
        write = partial(converter.unstructure, unstructure_as=Any)
        try:
            return write(value)
        except InvalidInputError:
            found = [
                one for steps, error in _cattrs.problems_of(value, write) for one in described(error, steps)
            ]
    except RecursionError:
        found = [("$", f"lists and mappings lie in each other more than {MAX_DEPTH} deep")]
    raise input_error(found)


def from_plain(tree: Any, cls: type[T], path: str = "$") -> T:
    """Return a parsed JSON tree as a value of class `cls`.

    Raises `WireError`, with places that start with `path`.

    >>> from tinker_sync.types import Cursor
    >>> from_plain({"offset": 0, "limit": 20}, Cursor)
    Traceback (most recent call last):
        ...
    tinker_sync.errors.WireError: $.total_count: is missing
    """
    with suppress(NotExact):
        made: T = model_of(tree, cls)
        return made
    try:
        return _conversion(getattr(cls, "__response__", True)).structure(tree, cls)
    except Exception as error:  # noqa: BLE001  # raised by hooks; `problems_in` raises others again
        problems = problems_in(error, path)
    raise wire_error(problems)


def read_leniently(tree: Any, cls: type[T]) -> tuple[T, set[str]]:
    """Return a parsed JSON tree as a request, and the names of its unknown fields, which are ignored.

    Values of known fields are checked as `from_plain` checks them. Raises `WireError`.

    >>> from tinker_sync.types import LoraConfig
    >>> config, ignored = read_leniently({"rank": 8, "colour": "red"}, LoraConfig)
    >>> config.rank, ignored
    (8, {'LoraConfig.colour'})
    """
    with noting() as ignored:
        try:
            return _lenient_conversion().structure(tree, cls), ignored
        except Exception as error:  # noqa: BLE001  # raised by hooks; `problems_in` raises others again
            problems = problems_in(error)
    raise wire_error(problems)
