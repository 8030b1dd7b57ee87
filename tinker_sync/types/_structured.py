"""The parts of models that conversions need: fields, tags in a union, and the texts of errors."""

from __future__ import annotations

import types as python_types
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar, Union, cast, get_args, get_origin

import attrs

from tinker_sync.errors import InvalidInputError

ABSENT: Any = object()
"""A marker for the absence of a value, for cases in which None is a value."""

_LONG = 8
"""Sequences longer than this are cut in a repr."""


class Structured:
    """The root of all data classes of the API, such as `Datum`. It sets how values convert to a class.

    A subclass sets the class variables below. They decide on unknown fields, name the tag of the class in
    a union, and give the hint in the error about a value of another class.
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


StructuredT = TypeVar("StructuredT", bound=Structured)


# --------------------------------------------------------------------------------------------- refusals


def refuse(where: str, expected: str, value: object) -> InvalidInputError:
    """Return the error for a value of the wrong kind."""
    return InvalidInputError(
        f"{where}: expected {expected}, got {short_repr(value)} ({type(value).__name__})"
    )


def refuse_all(problems: Sequence[str]) -> None:
    """Raise one error that lists every problem, if there are any."""
    if problems:
        raise InvalidInputError(problems)


class Unfit(InvalidInputError):
    """The error for a value that does not fit. The code that catches it adds the place of the value.

    Args:
        text: the problem.
        value: the given value, if the text is about it.
        steps: the fields and indices that lead from the caller's value to this one.
    """

    def __init__(self, text: str, value: Any = ABSENT, steps: tuple[str | int, ...] = ()) -> None:
        self.text = text
        self.value = value
        self.steps = steps
        shown = "" if value is ABSENT else f", got {short_repr(value)} ({type(value).__name__})"
        super().__init__(f": {text}{shown}")


def relocated(error: InvalidInputError, old: str, new: str) -> InvalidInputError:
    """Return the same error with `old` replaced by `new` at the beginning of its places."""
    return InvalidInputError(
        new + problem[len(old) :] if problem.startswith(old) else f"{new}: {problem}"
        for problem in error.problems
    )


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


# ---------------------------------------------------------------------------------------- fields and tags


def members_of(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union except None. For any other annotation, return that as the only member."""
    if get_origin(kind) in (Union, python_types.UnionType):
        return tuple(each for each in get_args(kind) if each is not type(None))
    return (kind,)


def is_model(kind: Any) -> bool:
    """Return True if an annotation is a model class."""
    return isinstance(kind, type) and issubclass(kind, Structured)


def fields_of(cls: type) -> tuple[attrs.Attribute[Any], ...]:
    """Return the fields of a model class with their types evaluated."""
    fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(attrs.resolve_types(cast("Any", cls)))
    return fields


@cache
def field_names(cls: type) -> tuple[str, ...]:
    """Return the public field names of a model class in declared order: the parameters of its constructor."""
    fields = attrs.fields(cast("Any", cls))
    return tuple(each.alias for each in fields if each.init and not each.alias.startswith("_"))


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
    """Return a model as it is, or make the one that a mapping describes: by its tag, else by its fields."""
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
    """Return a model as it is, or make one from a mapping of its fields. Errors begin with `where`."""
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
    # The text does not quote the value, because it may be a secret.
    return InvalidInputError(
        f"{where}: expected {wanted} or a mapping of its fields, got {type(value).__name__}{hint}"
    )
