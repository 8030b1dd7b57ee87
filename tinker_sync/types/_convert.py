"""Conversions: what an annotation accepts, and how a refusal names its place.

A converter takes a value and returns its exact equivalent of the annotated type: a float for an int, an int
for a whole float or for digits, a model for a mapping of its fields. It never rounds or cuts. What has no
exact equivalent is an `InvalidInputError` that begins with the place: `CreateCustomLossRequest.inputs[2]...`.

Converters are made once for each field, when its class is made. They hold no state; any thread may use them.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import math
import numbers
import operator
import types as python_types
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime
from functools import cache, partial
from typing import Any, ClassVar, Literal, TypeVar, Union, cast, get_args, get_origin

import attrs

from tinker_sync.errors import InvalidInputError
from tinker_sync.types._moment import from_unix_time, parse_moment

Converter = Callable[[Any], Any]

_LONG = 8
"""Sequences longer than this are cut in a repr."""


class Structured:
    """What a mapping of fields can become: the root of all models, and what conversions must know of them."""

    __slots__ = ()

    __response__: ClassVar[bool] = False
    """True for what servers send: unknown fields in an answer are ignored."""

    __open__: ClassVar[bool] = False
    """True for models that keep fields they do not know; in a union they take the tags nobody else has."""

    __tag__: ClassVar[tuple[str, str] | None] = None
    """The field and text that tell a class from others of its union, where its annotations do not."""

    __made_by__: ClassVar[str] = ""
    """What makes one of what people have at hand, for those who give that in its place."""


StructuredT = TypeVar("StructuredT", bound=Structured)


# --------------------------------------------------------------------------------------------- refusals


def refuse(where: str, expected: str, value: object) -> InvalidInputError:
    """The error for a value of the wrong kind: where, what was expected, what came."""
    return InvalidInputError(
        f"{where}: expected {expected}, got {short_repr(value)} ({type(value).__name__})"
    )


def relocated(error: InvalidInputError, old: str, new: str) -> InvalidInputError:
    """The same refusal seen from outside: every place that began with `old` begins with `new`."""
    return InvalidInputError(
        new + problem[len(old) :] if problem.startswith(old) else f"{new}: {problem}"
        for problem in error.problems
    )


def discreet(convert: Converter, where: str) -> Converter:
    """A converter whose refusals do not repeat the value, for fields that hold secrets."""

    def converted(value: Any) -> Any:
        with contextlib.suppress(InvalidInputError):
            return convert(value)
        # Raised outside of any handler: the first error, which shows the value, is gone.
        raise InvalidInputError(f"{where}: cannot be a {type(value).__name__}; the value is not shown")

    return converted


def short_repr(value: Any) -> str:
    """A repr that stays one short line whatever it is given.

    >>> short_repr(list(range(1000)))
    '[0, 1, 2, … 1000 items]'
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"<{len(value)} bytes>"
    if isinstance(value, Structured):
        return repr(value)
    if isinstance(value, Mapping):
        items = [f"{key!r}: {short_repr(item)}" for key, item in list(value.items())[:_LONG]]
        return "{" + ", ".join(items) + (f", … {len(value)} items" if len(value) > _LONG else "") + "}"
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"array({list(shape)}, {value.dtype})"
    if isinstance(value, (list, tuple, range)):
        shown = ", ".join(short_repr(item) for item in value[: _LONG if len(value) <= _LONG else 3])
        more = f", … {len(value)} items" if len(value) > _LONG else ""
        return f"({shown}{more})" if isinstance(value, tuple) else f"[{shown}{more}]"
    return _short_scalar(value)


def _short_scalar(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 4096:
        # Newer interpreters refuse to print whole numbers of thousands of digits.
        return f"<a number of {value.bit_length()} bits>"
    text = repr(value)
    longest = 1000 if isinstance(value, str) else 200
    return text if len(text) <= longest else f"{text[: longest - 3]}…"


# ------------------------------------------------------------------------------------------- converters


def converter_for(annotation: Any, where: str) -> Converter | None:
    """The converter for one annotation; None where any value will do. `where` names the field in errors."""
    if annotation is Any or annotation is object:
        return None
    simple = _SIMPLE.get(annotation)
    if simple is not None:
        return _simple(annotation, simple, where)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return _choice(arguments, where)
    if origin in (Union, python_types.UnionType):
        return _union(arguments, where)
    if origin is list:
        return _list_of(arguments[0], where)
    if origin is dict:
        return _dict_of(arguments[1], where)
    if isinstance(annotation, type) and issubclass(annotation, Structured):
        return _model(annotation, where)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return partial(_member, annotation, where=where)
    raise AssertionError(f"{where}: no converter for {annotation!r}")


def _simple(exact: type, convert: Callable[..., Any], where: str) -> Converter:
    # What is of the type already, as nearly all is, costs one comparison.
    return lambda value: value if type(value) is exact else convert(value, where)


def _model(wanted: type[Structured], where: str) -> Converter:
    return lambda value: value if type(value) is wanted else model_from(wanted, value, where)


def _text(value: Any, where: str) -> str:
    if type(value) is str:
        return value
    if isinstance(value, str):
        # Text enums and numpy's strings; their own `str()` may say something else.
        return str.__str__(value)
    if isinstance(value, enum.Enum) and isinstance(value.value, str):
        return value.value
    if isinstance(value, (bytes, bytearray)):
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode()
    raise refuse(where, "text", value)


def _integer(value: Any, where: str) -> int:
    if type(value) is int:
        return value
    if isinstance(value, (str, bytes)):
        return _digits(value, where)
    if isinstance(value, numbers.Integral):
        return operator.index(value)
    if isinstance(value, enum.Enum):
        return _integer(value.value, where)
    as_float = _as_float(value)
    if as_float is not None and math.isfinite(as_float):
        whole = int(value)  # not of `as_float`: a Decimal may have more digits than a float
        if whole == value:
            return whole
    raise refuse(where, "a whole number", value)


def _digits(value: str | bytes, where: str) -> int:
    """A whole number in text; zeros may follow a point."""
    with contextlib.suppress(ValueError):
        whole, point, fraction = _text(value, where).partition(".")
        if not point or (fraction and not fraction.strip().strip("0")):
            return int(whole)
    raise refuse(where, "a whole number", value)


def _number(value: Any, where: str) -> float:
    if type(value) is float:
        return value
    if isinstance(value, (str, bytes)):
        with contextlib.suppress(ValueError):
            return float(value)
    as_float = None if isinstance(value, str) else _as_float(value)
    if as_float is None:
        raise refuse(where, "a number", value)
    return as_float


def _as_float(value: Any) -> float | None:
    """A number of any library by its own `__float__`; None for what is no number, or more than one."""
    several = getattr(value, "ndim", 0)
    imaginary = isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real)
    if several or imaginary or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


_FLAG_WORDS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}


def _flag(value: Any, where: str) -> bool:
    if value is True or value is False:
        return bool(value)
    if isinstance(value, (str, bytes)):
        flag = _FLAG_WORDS.get(_text(value, where).lower())
    else:
        flag = {0.0: False, 1.0: True}.get(cast("float", _as_float(value)))
    if flag is None:
        raise refuse(where, "true or false", value)
    return flag


def _octets(value: Any, where: str) -> bytes:
    """Bytes as they are; text is base64, the form they travel in."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return base64.b64decode(value, validate=True)
        raise InvalidInputError(f"{where}: the text is not base64; pass the raw bytes instead")
    raise refuse(where, "bytes", value)


def _moment(value: Any, where: str) -> datetime:
    if isinstance(value, datetime):
        return value
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day)  # noqa: DTZ001  # a date has no zone either
    with contextlib.suppress(ValueError, OverflowError):
        if isinstance(value, (str, bytes)):
            return parse_moment(_text(value, where))
        seconds = None if isinstance(value, bool) else _as_float(value)
        if seconds is not None:
            return from_unix_time(seconds)
    raise refuse(where, "a moment (a datetime or RFC 3339 text such as 2026-01-31T12:00:00Z)", value)


_SIMPLE: dict[Any, Callable[..., Any]] = {
    str: _text,
    int: _integer,
    float: _number,
    bool: _flag,
    bytes: _octets,
    datetime: _moment,
}


def _member(kind: type[enum.Enum], value: Any, where: str) -> enum.Enum:
    with contextlib.suppress(ValueError):
        return kind(value)
    raise refuse(where, "one of " + ", ".join(repr(member.value) for member in kind), value)


def _choice(allowed: tuple[Any, ...], where: str) -> Converter:
    # By equality, so that True, 1.0 and numpy's 1 are the 1 that stands here, and a text enum its text.
    table = {choice: choice for choice in allowed}

    def convert(value: Any) -> Any:
        try:
            return table[value]
        except (KeyError, TypeError):  # TypeError: the value has no hash
            pass
        raise refuse(where, "one of " + ", ".join(map(repr, allowed)), value)

    return convert


def _list_of(item: Any, where: str) -> Converter:
    each = f"{where}[]"
    convert_item = converter_for(item, each)

    def convert(value: Any) -> list[Any]:
        if type(value) is not list and not _is_listlike(value):
            if isinstance(value, Structured):
                raise InvalidInputError(
                    f"{where}: expected a list, got a single {type(value).__name__}; put it into one"
                )
            raise refuse(where, "a list", value)
        items = list(value)
        if convert_item is None:
            return items
        index = 0
        try:
            for index, given in enumerate(items):
                items[index] = convert_item(given)
        except InvalidInputError as error:
            raise relocated(error, each, f"{where}[{index}]") from None
        return items

    return convert


def _is_listlike(value: Any) -> bool:
    alone = isinstance(value, (str, bytes, bytearray, Mapping)) or getattr(value, "ndim", 1) == 0
    return not alone and isinstance(value, Iterable)


def _dict_of(item: Any, where: str) -> Converter:
    each = f"{where}[]"
    convert_item = converter_for(item, each)

    def convert(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise refuse(where, "a mapping", value)
        converted = {_text(key, f"{where} key"): given for key, given in value.items()}
        if convert_item is None:
            return converted
        key = ""
        try:
            for key, given in converted.items():
                converted[key] = convert_item(given)
        except InvalidInputError as error:
            raise relocated(error, each, f"{where}[{key!r}]") from None
        return converted

    return convert


# ------------------------------------------------------------------------------------------ unions, models


def _union(members: tuple[Any, ...], where: str) -> Converter:
    rest = tuple(member for member in members if member is not type(None))
    if len(rest) == 1:
        inner = converter_for(rest[0], where)
    elif all(isinstance(member, type) and issubclass(member, Structured) for member in rest):
        inner = partial(union_from, rest, where=where)
    else:
        raise AssertionError(f"{where}: a union of anything but models needs a converter of its own")
    if inner is None or len(rest) == len(members):
        return inner or (lambda value: value)
    return lambda value: None if value is None else inner(value)


def tag_of(cls: type[Structured]) -> tuple[str, str] | None:
    """The field and text that tell this class from the others of its union, such as ("type", "image")."""
    if cls.__tag__ is not None:
        return cls.__tag__
    for name in ("type", "state"):
        field = getattr(attrs.fields(cast("Any", cls)), name, None)
        if field is not None and get_origin(field.type) is Literal:
            return name, get_args(field.type)[0]
    return None


@cache
def union_table(
    members: tuple[type[Structured], ...],
) -> tuple[str, dict[str, type[Structured]], type[Structured] | None]:
    """The field that holds the tag, which class a tag stands for, and the open class for all other tags."""
    tags = {member: tag for member in members if (tag := tag_of(member)) is not None}
    by_tag = {text: member for member, (_, text) in tags.items()}
    name = next((name for name, _ in tags.values()), "type")
    untagged = (member for member in members if member not in tags)
    return name, by_tag, next((member for member in untagged if member.__open__), None)


def union_from(members: tuple[type[Structured], ...], value: Any, where: str) -> Any:
    """A member's instance as it is, or the member a mapping describes: by its tag, else by its fields."""
    if isinstance(value, members):
        return value
    if not isinstance(value, Mapping):
        raise _not_a(" or ".join(member.__name__ for member in members), value, where)
    name, by_tag, open_member = union_table(members)
    if name not in value:
        return _best_fit(members, value, where)
    tag = value[name]
    chosen = by_tag.get(tag) if isinstance(tag, str) else None
    if chosen is not None and open_member is not None:
        # The open class also takes what has grown fields that the tagged one does not know.
        with contextlib.suppress(InvalidInputError):
            return model_from(chosen, value, where)
    chosen = open_member or chosen
    if chosen is None:
        raise refuse(f"{where}.{name}", "one of " + ", ".join(map(repr, by_tag)), tag)
    return model_from(chosen, value, where)


def _best_fit(members: Sequence[type[Structured]], value: Mapping[str, Any], where: str) -> Any:
    """Without a tag: the member that knows most of the fields, among those that can be made of them."""
    known = sorted(members, key=lambda member: -len(value.keys() & set(field_names(member))))
    for member in known:
        with contextlib.suppress(InvalidInputError):
            return model_from(member, value, where)
    return model_from(known[0], value, where)


def model_from(cls: type[StructuredT], value: Any, where: str) -> StructuredT:
    """An instance as it is, or one made of a mapping of its fields."""
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], cls):
            held = f"{len(value)} in a {type(value).__name__}"
            raise InvalidInputError(f"{where}: expected one {cls.__name__}, got {held}; give one at a time")
        raise _not_a(cls.__name__, value, where, cls.__made_by__)
    arguments = dict(value)
    if cls.__response__:
        arguments = {name: arguments[name] for name in field_names(cls) if name in arguments}
    try:
        return cls(**arguments)
    except TypeError as error:
        # "LoraConfig.__init__() missing 1 required keyword-only argument: 'rank'"
        reason = str(error).partition("__init__() ")[2] or str(error).removeprefix(f"{cls.__name__} ")
        raise InvalidInputError(f"{where}: {cls.__name__} {reason}") from None
    except InvalidInputError as error:
        raise relocated(error, cls.__name__, where) from None


def _not_a(wanted: str, value: Any, where: str, made_by: str = "") -> InvalidInputError:
    # Without the value: what should be a model of secrets may be the secret itself.
    hint = f"; {made_by} makes one" if made_by else ""
    return InvalidInputError(
        f"{where}: expected {wanted} or a mapping of its fields, got {type(value).__name__}{hint}"
    )


_field_names: dict[type, tuple[str, ...]] = {}


def field_names(cls: type) -> tuple[str, ...]:
    """The public field names of a model class, in declared order."""
    names = _field_names.get(cls)
    if names is None:
        fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(cast("Any", cls))
        names = _field_names[cls] = tuple(f.name for f in fields if not f.name.startswith("_"))
    return names
