"""Conversion of what users give to fields, and the wording of refusals.

A conversion returns the exact equivalent of the annotated type: a float for an int, an int for a whole float
or for digits, a model for a mapping of its fields. It never rounds or truncates. A value without an exact
equivalent raises an `InvalidInputError` that begins with the place: `CreateCustomLossRequest.inputs[2]...`.

cattrs structures lists, mappings, unions and models; the functions for scalars are its hooks, here and in
`wire.json`. Values that are of the wanted class already never reach it.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import math
import numbers
import operator
import types as python_types
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, Union, cast, get_args, get_origin

import attrs

from tinker_sync.errors import InvalidInputError
from tinker_sync.types._moment import from_unix_time, parse_moment

if TYPE_CHECKING:
    from cattrs import Converter

Hook = Callable[..., Any]
"""A function that cattrs calls with a value and the wanted kind, or, to make such a hook, with a kind."""

ABSENT: Any = object()
"""Stands for no value where None is one."""

_LONG = 8
"""Sequences longer than this are cut in a repr."""


class Structured:
    """The root of all models, with what conversions must know of a class."""

    __slots__ = ()

    __response__: ClassVar[bool] = False
    """True for what servers send: unknown fields in an answer are ignored."""

    __open__: ClassVar[bool] = False
    """True for models that keep unknown fields; in a union they take unknown tags."""

    __tag__: ClassVar[tuple[str, str] | None] = None
    """The field and text that identify a class in its union, where its annotations do not."""

    __made_by__: ClassVar[str] = ""
    """The functions that make an instance, for the refusal of a value of another class."""


StructuredT = TypeVar("StructuredT", bound=Structured)


# --------------------------------------------------------------------------------------------- refusals


def refuse(where: str, expected: str, value: object) -> InvalidInputError:
    """Return the error for a value of the wrong kind."""
    return InvalidInputError(
        f"{where}: expected {expected}, got {short_repr(value)} ({type(value).__name__})"
    )


class Unfit(InvalidInputError):
    """A value that does not fit, without its place, which only the caller knows.

    Args:
        text: what is wrong.
        value: what came, if the text is about it.
        steps: fields and indices that lead from what the caller holds to the value.
    """

    def __init__(self, text: str, value: Any = ABSENT, steps: tuple[str | int, ...] = ()) -> None:
        self.text = text
        self.value = value
        self.steps = steps
        shown = "" if value is ABSENT else f", got {short_repr(value)} ({type(value).__name__})"
        super().__init__(f": {text}{shown}")


def relocated(error: InvalidInputError, old: str, new: str) -> InvalidInputError:
    """Return the same refusal with places that begin with `new` where they began with `old`."""
    return InvalidInputError(
        new + problem[len(old) :] if problem.startswith(old) else f"{new}: {problem}"
        for problem in error.problems
    )


def located(error: Exception, *outer: str | int) -> Iterator[tuple[tuple[str | int, ...], Exception]]:
    """Yield each error of a cattrs exception group after the steps that lead to its value."""
    notes = reversed(getattr(error, "__notes__", ()))
    steps = outer + tuple(note.name if hasattr(note, "name") else note.index for note in notes)
    # Errors about unknown fields, which have no notes, come last in their group and are reported first.
    inner = sorted(getattr(error, "exceptions", ()), key=lambda one: not hasattr(one, "extra_fields"))
    for each in inner:
        yield from located(each, *steps)
    if not inner:
        yield steps, error


def short_repr(value: Any) -> str:
    """Return a repr that is one short line for every value.

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
    """Return a number of any library as a float; None for an array and for anything but a number."""
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
    """Return bytes as they are; text is base64, the form in which they travel."""
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


def _choice(kind: Any, where: str = "") -> Hook:
    # By equality, so that True, 1.0 and numpy's 1 become 1, and a text enum becomes its text.
    table = {each: each for each in get_args(kind)}
    expected = "one of " + ", ".join(map(repr, table))

    def choose(value: Any, _: Any = kind) -> Any:
        try:
            return table[value]
        except (KeyError, TypeError):  # TypeError: the value has no hash
            pass
        raise refuse(where, expected, value) if where else Unfit(f"expected {expected}", value)

    return choose


# ------------------------------------------------------------------------------------------ with cattrs


def members_of(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union besides None; any other annotation alone."""
    if get_origin(kind) in (Union, python_types.UnionType):
        return tuple(each for each in get_args(kind) if each is not type(None))
    return (kind,)


def is_model(kind: Any) -> bool:
    """Return whether an annotation is a model class."""
    return isinstance(kind, type) and issubclass(kind, Structured)


def _originates_in(*origins: Any) -> Callable[[Any], bool]:
    return lambda kind: cast("Any", get_origin(kind)) in origins


def make_converter(list_in: Hook, mapping_in: Hook, model: Hook, union: Hook) -> Converter:
    """Return a cattrs converter for scalars, lists, mappings, models and unions of models.

    Args:
        list_in: returns the list to structure, or raises.
        mapping_in: returns the mapping to structure, or raises.
        model: makes the hook of a model class.
        union: makes the hook of a union.
    """
    from cattrs import Converter
    from cattrs.cols import list_structure_factory
    from cattrs.gen import make_mapping_structure_fn

    def list_of(kind: Any) -> Hook:
        structure = list_structure_factory(kind, converter)
        return lambda value, _: structure(list_in(value, kind), kind)

    def mapping_of(kind: Any) -> Hook:
        structure = make_mapping_structure_fn(kind, converter, key_type=Any)
        return lambda value, _: structure(mapping_in(value, kind), kind)

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
    """Return the converter of what users give, made when the first value needs it."""
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
    """Return the classes whose instances an annotation takes as they are."""
    kinds = {each for each in members_of(annotation) if each in SCALARS or _is_class(each)}
    return kinds | ({type(None)} & {*get_args(annotation)})


def _is_class(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, (Structured, enum.Enum))


def converter_for(annotation: Any, where: str) -> Callable[[Any], Any]:
    """Return the conversion to an annotation. Errors begin with `where`."""
    if annotation is Any or annotation is object:
        return lambda value: value
    if get_origin(annotation) is Literal:
        return _choice(annotation, where)
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
    """Return the container an annotation names, and the classes of the items and values it takes as they are.

    The items of a dict are its keys. None for values of a list, and for values of any class.
    """
    kind = members_of(annotation)[0]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is list:
        return list, exact_kinds(arguments[0]), None
    if origin is dict:
        return dict, {str}, None if arguments[1] in (Any, object) else exact_kinds(arguments[1])
    return None, set(), None


# ------------------------------------------------------------------------------------------ unions, models


def fields_of(cls: type) -> tuple[attrs.Attribute[Any], ...]:
    """Return the fields of a model class, their types evaluated."""
    fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(attrs.resolve_types(cast("Any", cls)))
    return fields


@cache
def field_names(cls: type) -> tuple[str, ...]:
    """Return the public field names of a model class, in declared order."""
    return tuple(each.name for each in attrs.fields(cast("Any", cls)) if not each.name.startswith("_"))


def tag_of(cls: type[Structured]) -> tuple[str, str] | None:
    """Return the field and text that identify a class in its union, such as ("type", "image")."""
    literals = {each.name: get_args(each.type) for each in fields_of(cls) if get_origin(each.type) is Literal}
    name = next((name for name in ("type", "state") if name in literals), None)
    return (name, literals[name][0]) if name and not cls.__tag__ else cls.__tag__


@cache
def union_table(members: tuple[Any, ...]) -> tuple[str, dict[str, type[Structured]], Any]:
    """Return the field that holds the tag, the class of each tag, and the open class or None."""
    tags = {each: tag for each in members if (tag := tag_of(each)) is not None}
    name = next((name for name, _ in tags.values()), "type")
    open_members = (each for each in members if each not in tags and each.__open__)
    return name, {tag: each for each, (_, tag) in tags.items()}, next(open_members, None)


def union_from(kind: Any, value: Any) -> Any:
    """Return an instance as it is, or the member a mapping describes: by its tag, else by its fields."""
    members = members_of(kind)
    if isinstance(value, members) or (value is None and type(None) in get_args(kind)):
        return value
    if not isinstance(value, Mapping):
        raise _not_a(" or ".join(each.__name__ for each in members), value)
    name, by_tag, open_member = union_table(members)
    if name in value:
        tag = value[name]
        # The open class also takes a mapping with fields that the tagged one does not have.
        ranked = [by_tag.get(tag) if isinstance(tag, str) else None, open_member]
    else:
        ranked = sorted(members, key=lambda each: -len(value.keys() & set(field_names(each))))
    refusal = None
    for each in filter(None, ranked):
        try:
            return model_from(each, value)
        except InvalidInputError as error:
            refusal = refusal or error
    raise refusal or refuse(f".{name}", "one of " + ", ".join(map(repr, by_tag)), value[name])


def model_from(cls: type[StructuredT], value: Any, where: str = "") -> StructuredT:
    """Return an instance as it is, or a new one of a mapping of its fields. Errors begin with `where`."""
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], cls):
            held = f"{len(value)} in a {type(value).__name__}"
            raise InvalidInputError(f"{where}: expected one {cls.__name__}, got {held}; give one at a time")
        raise _not_a(cls.__name__, value, where, f"; {cls.__made_by__} makes one" if cls.__made_by__ else "")
    arguments = dict(value)
    if cls.__response__:
        arguments = {name: arguments[name] for name in field_names(cast("Any", cls)) if name in arguments}
    try:
        return cls(**arguments)
    except TypeError as error:
        # "LoraConfig.__init__() missing 1 required keyword-only argument: 'rank'"
        reason = str(error).partition("__init__() ")[2] or str(error).removeprefix(f"{cls.__name__} ")
        raise InvalidInputError(f"{where}: {cls.__name__} {reason}") from None
    except InvalidInputError as error:
        raise relocated(error, cls.__name__, where) from None


def _not_a(wanted: str, value: Any, where: str = "", hint: str = "") -> InvalidInputError:
    # Without the value: what should be a model of secrets may be the secret itself.
    return InvalidInputError(
        f"{where}: expected {wanted} or a mapping of its fields, got {type(value).__name__}{hint}"
    )
