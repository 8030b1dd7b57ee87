"""The properties of data classes that conversions need: fields, tags of unions, dumps and texts of errors."""

from __future__ import annotations

import base64
import enum
import inspect
import math
import types as python_types
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin

import attrs

from tinker_sync.errors import InvalidInputError
from tinker_sync.types._moment import format_moment

ABSENT: Any = object()
"""A marker for the absence of a value, for cases in which None is a value."""

_LONG = 8
"""Sequences longer than this are cut in a repr."""


class Structured:
    """The root of all data classes of the API, such as `Datum`, with settings for the conversion of values.

    A subclass may set the class variables below. They decide whether unknown fields are refused, ignored or
    kept, identify the class in a union, and give the hint in the error about a value of another class.
    """

    __slots__ = ()

    __response__: ClassVar[bool] = False
    """True for models that servers send: unknown fields in an answer are ignored."""

    __open__: ClassVar[bool] = False
    """True for models that keep unknown fields; in a union they take unknown tags."""

    __tag__: ClassVar[tuple[str, str] | None] = None
    """The field and text that identify a class in its union, if its annotations do not."""

    __made_by__: ClassVar[str] = ""
    """The functions that make an instance, named in the error about a value of another class."""

    def _fields_out(self) -> dict[str, Any]:
        """Return the values of the public fields in declared order, by the names that a dump shows."""
        kind: Any = type(self)
        return {name: getattr(self, name) for name in field_names(kind)}


StructuredT = TypeVar("StructuredT", bound=Structured)


# --------------------------------------------------------------------------------------------- refusals


def refuse(where: str, expected: str, value: object) -> InvalidInputError:
    """Return the error for a value at `where` that is not of the expected kind."""
    return InvalidInputError(
        f"{where}: expected {expected}, got {short_repr(value)} ({type(value).__name__})"
    )


def refuse_all(problems: Sequence[str]) -> None:
    """Raise one error that lists every problem, if there are any."""
    if problems:
        raise InvalidInputError(problems)


class Unfit(InvalidInputError):
    """The error for a value that does not fit its type. The code that catches it adds the place of the value.

    Args:
        text: the problem.
        value: the wrong value, which the message shows; without it, the message is the text alone.
        steps: the fields and indices that lead from the caller's value to the wrong value in it.
    """

    def __init__(self, text: str, value: Any = ABSENT, steps: tuple[str | int, ...] = ()) -> None:
        self.text = text
        self.value = value
        self.steps = steps
        shown = "" if value is ABSENT else f", got {short_repr(value)} ({type(value).__name__})"
        super().__init__(f": {text}{shown}")


def relocated(error: InvalidInputError, old: str, new: str) -> InvalidInputError:
    """Return an `InvalidInputError` with the problems of `error`, which begin with `new` instead of `old`.

    A problem that does not begin with `old` gets `new` in front.
    """
    return InvalidInputError(
        new + problem[len(old) :] if problem.startswith(old) else f"{new}: {problem}"
        for problem in error.problems
    )


def short_repr(value: Any) -> str:
    """Return a repr in which long sequences, mappings, texts and numbers are cut, and bytes are not shown.

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


# ---------------------------------------------------------------------------------------- fields and tags


def members_of(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union except None. For any other annotation, return that as the only member."""
    if get_origin(kind) in (Union, python_types.UnionType):
        return tuple(each for each in get_args(kind) if each is not type(None))
    return (kind,)


def is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Structured)


def fields_of(cls: type) -> tuple[attrs.Attribute[Any], ...]:
    """Return the fields of a model class with their types evaluated."""
    fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(attrs.resolve_types(cast("Any", cls)))
    return fields


@cache
def field_names(cls: type) -> tuple[str, ...]:
    """Return the names of the public parameters of a model's constructor, in the order of the fields."""
    fields = attrs.fields(cast("Any", cls))
    return tuple(each.alias for each in fields if each.init and not each.alias.startswith("_"))


def tag_of(cls: type[Structured]) -> tuple[str, str] | None:
    """Return the field and the text that identify a class in its union; None if nothing does.

    >>> from tinker_sync.types import ImageChunk
    >>> tag_of(ImageChunk)
    ('type', 'image')
    """
    literals = {each.name: get_args(each.type) for each in fields_of(cls) if get_origin(each.type) is Literal}
    name = next((name for name in ("type", "state") if name in literals), None)
    return (name, literals[name][0]) if name and not cls.__tag__ else cls.__tag__


@cache
def union_table(members: tuple[Any, ...]) -> tuple[str, dict[str, type[Structured]], Any]:
    """Return the field that holds the tag in a union, the class of each tag, and the class for unknown tags.

    The third result is None if no member of the union takes unknown tags.
    """
    tags = {each: tag for each in members if (tag := tag_of(each)) is not None}
    name = next((name for name, _ in tags.values()), "type")
    open_members = (each for each in members if each not in tags and each.__open__)
    return name, {tag: each for each, (_, tag) in tags.items()}, next(open_members, None)


def union_from(kind: Any, value: Any) -> Any:
    """Convert a value to a member of the union `kind`.

    A member is returned as it is. The tag of a mapping names the class; an open class (`__open__`) takes
    mappings with other tags, and those that the named class refuses. For a mapping without a tag, the members
    are tried one after another; a member that shares more fields with the mapping comes earlier.

    Raises:
        InvalidInputError: no member fits.
    """
    members = members_of(kind)
    if isinstance(value, members) or (value is None and type(None) in get_args(kind)):
        return value
    for each in members:
        if is_foreign(each, value):
            return model_from(each, value)
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
    """Return a model as it is, or make one from a mapping of its fields or from a foreign object.

    Raises:
        InvalidInputError: the value does not fit. The text begins with `where`.
    """
    if isinstance(value, cls):
        return value
    if is_foreign(cls, value):
        value = {name: getattr(value, name) for name in _parameters(cast("Any", cls)) if hasattr(value, name)}
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


def is_foreign(cls: type[Structured], value: Any) -> bool:
    """Return True for an object of another package's class with the name and the fields of `cls`.

    Libraries that are written for the reference client make such objects, for example a renderer of chats
    that makes prompts. `model_from` converts them.
    """
    if isinstance(value, (Structured, Mapping)) or not _is_named(cls.__name__, value):
        return False
    return all(hasattr(value, name) for name in _required(cast("Any", cls)))


def _is_named(name: str, value: object) -> bool:
    return any(kind.__name__ == name for kind in type(value).__mro__)


@cache
def _required(cls: type) -> tuple[str, ...]:
    parameters = inspect.signature(cls).parameters.values()
    return tuple(each.name for each in parameters if each.default is each.empty)


@cache
def _parameters(cls: type) -> tuple[str, ...]:
    return tuple(inspect.signature(cls).parameters)


def _not_a(wanted: str, value: Any, where: str = "", hint: str = "") -> InvalidInputError:
    # The text does not quote the value, because it may be a secret.
    return InvalidInputError(
        f"{where}: expected {wanted} or a mapping of its fields, got {described_class(wanted, value)}{hint}"
    )


def described_class(wanted: str, value: object) -> str:
    """Return the class name of a wrong value; for a namesake from another package, also the remedy."""
    name = type(value).__name__
    if name not in wanted.split(" or "):
        return name
    package = type(value).__module__.partition(".")[0]
    return (
        f"the {name} of the package {package}, which has other fields; make it with tinker_sync, or run the "
        "program with `python -m tinker_sync.as_tinker`"
    )


# ----------------------------------------------------------------------------------------------- dumps


class DumpOptions(NamedTuple):
    """The form of a dump: enums and moments as text, without fields that are None or equal their default."""

    as_json: bool
    without_none: bool
    without_defaults: bool


def dump_model(value: Structured, options: DumpOptions) -> dict[str, Any]:
    """Return a model and its nested models as plain dicts."""
    defaults = _defaults_of(type(value)) if options.without_defaults else {}
    dumped = {}
    for name, item in value._fields_out().items():
        if options.without_none and item is None:
            continue
        if name in defaults and _same(defaults[name], item):
            continue
        dumped[name] = _dump(item, options)
    return dumped


def _defaults_of(cls: type) -> dict[str, Any]:
    if not attrs.has(cls):
        return {}
    defaults = {}
    for field in attrs.fields(cast("Any", cls)):
        default: Any = field.default
        if default is not attrs.NOTHING and field.init:
            made = default.factory() if hasattr(default, "factory") else default
            convert: Any = field.converter
            defaults[field.alias] = made if convert is None else convert(made)
    return defaults


def _same(default: Any, value: Any) -> bool:
    # An array compares item by item; no field has one as its default.
    return default is value or (type(default) is type(value) and bool(default == value))


def _dump(value: Any, options: DumpOptions) -> Any:
    if options.as_json and isinstance(value, enum.Enum):
        return value.value
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Structured):
        return dump_model(value, options)
    if isinstance(value, Mapping):
        return {key: _dump(item, options) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [_dump(item, options) for item in value]
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode("ascii")
    if hasattr(value, "tolist"):
        return value.tolist()
    return _dump_for_json(value) if options.as_json else value


def _dump_for_json(value: Any) -> Any:
    if isinstance(value, datetime):
        return format_moment(value)
    return value.isoformat() if isinstance(value, date) else value


def finite(tree: Any) -> Any:
    """Return a dump with None in place of NaN and infinities."""
    if isinstance(tree, dict):
        return {key: finite(item) for key, item in tree.items()}
    if isinstance(tree, list):
        return [finite(item) for item in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree
