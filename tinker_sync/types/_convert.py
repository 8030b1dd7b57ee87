"""Conversion of the values that users give to the fields of models.

A conversion returns the equivalent value of the annotated type: a float for an int, an int for a whole float
or for digits, a model for a mapping of its fields. No conversion to an int rounds or truncates. A value
without an equivalent raises an `InvalidInputError` that begins with the place of the value:
`CreateCustomLossRequest.inputs[2]...`.

cattrs converts lists, mappings, unions and models, here and in `wire.json`. Its hooks for scalars are the
functions of the table `SCALARS`. A program that gives only values of the annotated classes never imports
cattrs, because these need no conversion (lists and dicts are copied).
"""

from __future__ import annotations

import base64
import contextlib
import enum
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, get_origin

from tinker_sync.errors import InvalidInputError
from tinker_sync.types._moment import from_unix_time, parse_moment
from tinker_sync.types._structured import (
    Structured,
    Unfit,
    is_model,
    members_of,
    model_from,
    relocated,
    union_from,
)

if TYPE_CHECKING:
    from cattrs import Converter

Hook = Callable[..., Any]
"""A function that cattrs calls with a value and the wanted type; a factory of hooks gets the type alone."""

MAX_PROBLEMS = 20
"""The most problems that one error lists."""


def noted(error: Exception, step: str | int) -> Exception:
    """Add a note with the key or index of the wrong value to an error, and return the error.

    The note has the form that cattrs uses, and that `located` reads.
    """
    from cattrs.errors import IterableValidationNote

    note = IterableValidationNote("", step, None)
    error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]
    return error


def located(error: Exception, *outer: str | int) -> Iterator[tuple[tuple[str | int, ...], Exception]]:
    """Yield each single error of a cattrs exception group, with the keys and indices that lead to its value.

    Args:
        error: the group, or a single error.
        outer: the keys and indices that lead to the value of the group.
    """
    # Only the notes of cattrs have a type; those of users' own errors are bare texts.
    notes = [note for note in reversed(getattr(error, "__notes__", ())) if hasattr(note, "type")]
    steps = outer + tuple(note.name if hasattr(note, "name") else note.index for note in notes)
    # Errors about unknown fields, which have no notes, come last in their group and are reported first.
    inner = sorted(getattr(error, "exceptions", ()), key=lambda one: not hasattr(one, "extra_fields"))
    for each in inner:
        yield from located(each, *steps)
    if not inner:
        yield steps, error


# --------------------------------------------------------------------------------------------- scalars


def _text(value: Any, kind: Any = str) -> Any:
    if kind is not str:
        return _member(value, kind)  # a text enum: cattrs takes it for a kind of text
    if type(value) is str:
        return value
    if isinstance(value, str):
        # Text enums and numpy's strings; their own `str()` may return something else.
        return str.__str__(value)
    if isinstance(value, enum.Enum) and isinstance(value.value, str):
        return value.value
    if isinstance(value, (bytes, bytearray)):
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode()
    raise Unfit("expected text", value)


def _integer(value: Any, _: Any = int) -> int:
    if type(value) is int:
        return value
    if isinstance(value, numbers.Integral):
        return operator.index(value)
    if isinstance(value, enum.Enum) and not isinstance(value, str):
        return _integer(value.value)
    if isinstance(value, (str, bytes)):
        with contextlib.suppress(ValueError):
            whole, point, fraction = _text(value).partition(".")
            if not point or (fraction and not fraction.strip().strip("0")):
                return int(whole)
    elif (as_float := _as_float(value)) is not None and math.isfinite(as_float):
        exact = int(value)  # not of `as_float`: a Decimal may have more digits than a float
        if exact == value:
            return exact
    raise Unfit("expected a whole number", value)


def _number(value: Any, _: Any = float) -> float:
    if type(value) is float:
        return value
    if isinstance(value, (str, bytes)):
        with contextlib.suppress(ValueError):
            return float(value)
    as_float = None if isinstance(value, str) else _as_float(value)
    if as_float is None:
        raise Unfit("expected a number", value)
    return as_float


def _as_float(value: Any) -> float | None:
    """Return a number of any library as a float; None if it is too large, and for any other value."""
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


def _flag(value: Any, _: Any = bool) -> bool:
    if value is True or value is False:
        return bool(value)
    if isinstance(value, (str, bytes)):
        flag = _FLAG_WORDS.get(_text(value).lower())
    else:
        flag = {0.0: False, 1.0: True}.get(cast("float", _as_float(value)))
    if flag is None:
        raise Unfit("expected true or false", value)
    return flag


def _octets(value: Any, _: Any = bytes) -> bytes:
    """Return the bytes of a bytes-like value, or those of base64 text, which is the JSON form of bytes."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return base64.b64decode(value, validate=True)
        raise InvalidInputError(": the text is not base64; pass the raw bytes instead")
    raise Unfit("expected bytes", value)


def _moment(value: Any, _: Any = datetime) -> datetime:
    if isinstance(value, datetime):
        return value
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day)  # noqa: DTZ001  # a date has no zone either
    with contextlib.suppress(ValueError, OverflowError):
        if isinstance(value, (str, bytes)):
            return parse_moment(_text(value))
        seconds = None if isinstance(value, bool) else _as_float(value)
        if seconds is not None:
            return from_unix_time(seconds)
    raise Unfit("expected a moment (a datetime or RFC 3339 text such as 2026-01-31T12:00:00Z)", value)


SCALARS: dict[Any, Hook] = {
    str: _text,
    int: _integer,
    float: _number,
    bool: _flag,
    bytes: _octets,
    datetime: _moment,
}


def _member(value: Any, kind: type[enum.Enum]) -> enum.Enum:
    with contextlib.suppress(ValueError):
        return kind(value)
    raise Unfit("expected one of " + ", ".join(repr(one.value) for one in kind), value)


def _choice(kind: Any) -> Hook:
    # By equality, so that True, 1.0 and numpy's 1 become 1, and a text enum becomes its text.
    table = {each: each for each in get_args(kind)}

    def choose(value: Any, _: Any = kind) -> Any:
        try:
            return table[value]
        except (KeyError, TypeError):  # TypeError: the value has no hash
            pass
        raise Unfit("expected one of " + ", ".join(map(repr, table)), value)

    return choose


# ------------------------------------------------------------------------------------------ with cattrs


def _originates_in(*origins: Any) -> Callable[[Any], bool]:
    return lambda kind: cast("Any", get_origin(kind)) in origins


def make_converter(list_in: Hook, mapping_in: Hook, model: Hook, union: Hook) -> Converter:
    """Return a cattrs converter for scalars, lists, mappings, models and unions of models.

    Args:
        list_in: takes a value and a list type; returns the items to convert, or raises an error.
        mapping_in: takes a value and a mapping type; returns the mapping to convert, or raises an error.
        model: takes a model class; returns the function that converts a value to this class.
        union: takes a union of models; returns the function that converts a value to one of them.
    """
    from cattrs import Converter
    from cattrs.errors import IterableValidationError

    def each(items: Iterable[tuple[Any, Any]], hook: Hook, kind: Any) -> Iterator[tuple[Any, Any]]:
        # The hooks of cattrs would convert all items, and keep an exception for each of a million wrong ones.
        errors: list[Exception] = []
        for step, item in items:
            try:
                converted = hook(item, kind)
            except Exception as error:  # noqa: BLE001  # raised together below
                errors.append(noted(error, step))
                if len(errors) == MAX_PROBLEMS:
                    break
            else:
                yield step, converted
        if errors:
            raise IterableValidationError("items do not fit", errors, kind)

    def list_of(kind: Any) -> Hook:
        (item,) = get_args(kind)
        hook = converter.get_structure_hook(item)
        return lambda value, _: [one for _, one in each(enumerate(list_in(value, kind)), hook, item)]

    def mapping_of(kind: Any) -> Hook:
        _, item = get_args(kind)
        hook = converter.get_structure_hook(item)
        return lambda value, _: dict(each(mapping_in(value, kind).items(), hook, item))

    converter = Converter()
    for scalar, convert in SCALARS.items():
        converter.register_structure_hook(scalar, convert)
    converter.register_structure_hook(enum.Enum, _member)
    converter.register_structure_hook_func(lambda kind: kind is object, lambda value, _: value)
    converter.register_structure_hook_factory(_originates_in(Literal), _choice)
    converter.register_structure_hook_factory(_originates_in(list), list_of)
    converter.register_structure_hook_factory(_originates_in(dict, Mapping), mapping_of)
    converter.register_structure_hook_factory(is_model, model)
    converter.register_structure_hook_factory(lambda kind: len(members_of(kind)) > 1, union)
    return converter


@cache
def _converter() -> Converter:
    """Return the cattrs converter for users' values, which is made when the first value needs it."""
    return make_converter(
        _listlike,
        _named,
        lambda cls: lambda value, _: model_from(cls, value),
        lambda kind: lambda value, _: union_from(kind, value),
    )


def _listlike(value: Any, _: Any) -> Iterable[Any]:
    if isinstance(value, Structured):
        raise InvalidInputError(f": expected a list, got a single {type(value).__name__}; put it into one")
    alone = isinstance(value, (str, bytes, bytearray, Mapping)) or getattr(value, "ndim", 1) == 0
    if alone or not isinstance(value, Iterable):
        raise Unfit("expected a list", value)
    return value


def _named(value: Any, _: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise Unfit("expected a mapping", value)
    try:
        return {_text(name): item for name, item in value.items()}
    except Unfit as error:
        problem = relocated(error, "", " key")
    raise problem


def exact_kinds(annotation: Any) -> set[type]:
    """Return the classes whose instances fit an annotation without a conversion."""
    kinds = {
        each
        for each in members_of(annotation)
        if each in SCALARS or (isinstance(each, type) and issubclass(each, (Structured, enum.Enum)))
    }
    return kinds | ({type(None)} & {*get_args(annotation)})


def converter_for(annotation: Any, where: str) -> Callable[[Any], Any]:
    """Return a function that converts a value to an annotated type. Its `InvalidInputError` names `where`."""
    if annotation is Any or annotation is object:
        return lambda value: value
    kinds = exact_kinds(annotation)
    container, items, values = _exact_items(annotation)
    member, *others = members_of(annotation)
    hook = _choice(member) if get_origin(member) is Literal else SCALARS.get(member)

    def convert(value: Any) -> Any:
        kind = type(value)
        if kind in kinds:
            return value
        if (
            kind is container
            and items.issuperset(map(type, value))
            and (values is None or values.issuperset(map(type, value.values())))
        ):
            return value.copy()
        try:
            return hook(value) if hook and not others else _converter().structure(value, annotation)
        except Exception as error:  # noqa: BLE001  # refusals, and errors of the user's own iterables
            steps, first = next(located(error))
        if not isinstance(first, InvalidInputError):
            raise first
        raise relocated(first, "", where + "".join(f"[{step!r}]" for step in steps))

    return convert


def _exact_items(annotation: Any) -> tuple[type | None, set[type], set[type] | None]:
    """Return the container class of an annotation, and the classes that fit in it without a conversion.

    The first result is list or dict. The second result has the classes of list items or dict keys, the third
    one those of dict values. The third one is None for a list, and for a dict whose values may have any
    class. For any other annotation, the results are None, an empty set and None.
    """
    kind = members_of(annotation)[0]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is list:
        return list, exact_kinds(arguments[0]), None
    if origin is dict:
        return dict, {str}, None if arguments[1] in (Any, object) else exact_kinds(arguments[1])
    return None, set(), None
