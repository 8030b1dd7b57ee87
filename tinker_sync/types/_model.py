"""The base of every model: one class decorator, one mixin, and a converter for each annotation.

A model is a frozen, slotted attrs class. `model` reads the annotations once, when the class is made, and
gives every field a converter that accepts what is exact (an int for a float, a numpy integer for an int, a
mapping for a nested model) and refuses the rest with an `InvalidInputError` that names class and field.

Nothing here does I/O or knows a wire format; `_fields_out` alone says which names a model shows.
"""

from __future__ import annotations

import base64
import copy
import enum
import json
import operator
import sys
import types as python_types
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, cast, get_args, get_origin, overload

import attrs

from tinker_sync.errors import InvalidInputError
from tinker_sync.types._moment import format_moment, parse_moment

if TYPE_CHECKING:
    from typing_extensions import Self, dataclass_transform
else:

    def dataclass_transform(**_: object) -> Callable[[Any], Any]:
        return lambda decorated: decorated


T = TypeVar("T")
ModelT = TypeVar("ModelT", bound="Model")
Converter = Callable[[Any], Any]

_LONG = 8
"""Sequences longer than this are cut in a repr."""


class Model:
    """What all models share: dumping, copying and a repr that stays short.

    >>> from tinker_sync.types import LoraConfig
    >>> LoraConfig(rank=8).model_dump()["rank"]
    8
    >>> LoraConfig(rank=8).model_copy(update={"rank": 16})
    LoraConfig(rank=16, seed=None, train_unembed=True, train_mlp=True, train_attn=True)
    """

    __slots__ = ()

    __response__ = False
    """True for what servers send: unknown fields in an answer are ignored."""

    def _fields_out(self) -> dict[str, Any]:
        """The public fields in declared order, as they would be named outside, values untouched."""
        return {name: getattr(self, name) for name in field_names(type(self))}

    def model_dump(
        self,
        *,
        mode: Literal["python", "json"] = "python",
        include: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
        exclude_none: bool = False,
        exclude_defaults: bool = False,
        exclude_unset: bool = False,
    ) -> dict[str, Any]:
        """The model as a dict of plain values, nested models too.

        Args:
            mode: "json" also turns moments and enums into text.
            include: only these top-level fields.
            exclude: not these top-level fields.
            exclude_none: leave out fields that are None.
            exclude_defaults: leave out fields that equal their default.
            exclude_unset: the same as `exclude_defaults`; which fields were given is not recorded.

        >>> from tinker_sync.types import AdamParams
        >>> AdamParams(learning_rate=1).model_dump(include={"learning_rate"})
        {'learning_rate': 1.0}
        """
        options = _DumpOptions(mode == "json", exclude_none, exclude_defaults or exclude_unset)
        dumped = _dump_model(self, options)
        if include is not None:
            wanted = set(include)
            dumped = {name: value for name, value in dumped.items() if name in wanted}
        if exclude is not None:
            unwanted = set(exclude)
            dumped = {name: value for name, value in dumped.items() if name not in unwanted}
        return dumped

    def model_dump_json(
        self,
        *,
        indent: int | None = None,
        include: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
        exclude_none: bool = False,
        exclude_defaults: bool = False,
        exclude_unset: bool = False,
    ) -> str:
        """The model as JSON text.

        >>> from tinker_sync.types import LoraConfig
        >>> LoraConfig(rank=8, seed=1).model_dump_json(include={"rank", "seed"})
        '{"rank":8,"seed":1}'
        """
        tree = self.model_dump(
            mode="json",
            include=include,
            exclude=exclude,
            exclude_none=exclude_none,
            exclude_defaults=exclude_defaults,
            exclude_unset=exclude_unset,
        )
        separators = (",", ":") if indent is None else None
        return json.dumps(tree, indent=indent, separators=separators, ensure_ascii=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields replaced; the new values are checked like any others.

        >>> from tinker_sync.types import SamplingParams
        >>> SamplingParams(max_tokens=5).model_copy(update={"max_tokens": 7}).max_tokens
        7
        """
        source = copy.deepcopy(self) if deep else self
        return source._evolved(dict(update or {}))

    @classmethod
    def model_validate(cls, value: Any) -> Self:
        """A model from a mapping of its fields (or the model itself).

        >>> from tinker_sync.types import Cursor
        >>> Cursor.model_validate({"offset": 0, "limit": 20, "total_count": 3, "new": True}).limit
        20
        """
        return model_from(cls, value, cls.__name__)

    def _evolved(self, changes: dict[str, Any]) -> Self:
        return cast("Self", attrs.evolve(cast("Any", self), **changes))

    def __repr__(self) -> str:
        shown = (f"{name}={short_repr(value)}" for name, value in self._repr_items())
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_items(self) -> Iterable[tuple[str, Any]]:
        for field in attrs.fields(cast("Any", type(self))):
            if field.repr and not field.name.startswith("_"):
                yield field.name, getattr(self, field.name)


def field_names(cls: type) -> tuple[str, ...]:
    """The public field names of a model class, in declared order."""
    return _field_names_by_class.get(cls) or _remember_field_names(cls)


_field_names_by_class: dict[type, tuple[str, ...]] = {}


def _remember_field_names(cls: type) -> tuple[str, ...]:
    names = tuple(f.name for f in attrs.fields(cast("Any", cls)) if not f.name.startswith("_"))
    _field_names_by_class[cls] = names
    return names


# ---------------------------------------------------------------------------------------- the decorator


@overload
def model(cls: type[T]) -> type[T]: ...
@overload
def model(*, kw_only: bool = ..., eq: bool = ...) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(attrs.field,))
def model(cls: type[T] | None = None, *, kw_only: bool = True, eq: bool = True) -> Any:
    """Make a model of an annotated class: frozen, slotted, compared by value, every field checked.

    Args:
        kw_only: False where scripts construct it with positional arguments.
        eq: False for a class that writes `__eq__` and `__hash__` itself.
    """

    def decorate(plain: type[T]) -> type[T]:
        return attrs.define(
            plain,
            frozen=True,
            slots=True,
            kw_only=kw_only,
            eq=eq,
            order=False,
            repr=False,
            str=False,
            field_transformer=_bind_converters,
            auto_attribs=True,
        )

    return decorate if cls is None else decorate(cls)


def _bind_converters(cls: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    namespace = {**vars(sys.modules[cls.__module__]), **vars(cls)}
    bound = []
    for field in fields:
        annotation: Any = field.type
        if isinstance(annotation, str):
            # Our own modules' annotations, evaluated as `typing.get_type_hints` does.
            annotation = eval(annotation, namespace)  # noqa: S307
        converter: Any = field.converter
        if converter is None:
            converter = converter_for(annotation, f"{cls.__name__}.{field.name}")
        bound.append(field.evolve(type=annotation, converter=converter))
    return bound


# ------------------------------------------------------------------------------------------- converters


def refuse(where: str, expected: str, value: object) -> InvalidInputError:
    """The error for a value of the wrong kind: where, what was expected, what came."""
    return InvalidInputError(
        f"{where}: expected {expected}, got {short_repr(value)} ({type(value).__name__})"
    )


def converter_for(annotation: Any, where: str) -> Converter | None:
    """The converter for one annotation; None where any value will do. `where` names the field in errors."""
    if annotation is Any or annotation is object:
        return None
    simple = _SIMPLE.get(annotation)
    if simple is not None:
        return _bound(simple, where)
    origin = get_origin(annotation)
    if origin is Literal:
        return _choice(get_args(annotation), where)
    if origin in (Union, python_types.UnionType):
        return _union(get_args(annotation), where)
    if origin in (list, dict):
        return (_list_of if origin is list else _dict_of)(get_args(annotation), where)
    if isinstance(annotation, type) and issubclass(annotation, Model):
        return _bound(lambda value, at: model_from(annotation, value, at), where)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _bound(lambda value, at: _member(annotation, value, at), where)
    raise AssertionError(f"{where}: no converter for {annotation!r}")


def _bound(convert: Callable[[Any, str], Any], where: str) -> Converter:
    return lambda value: convert(value, where)


def _text(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    raise refuse(where, "text", value)


def _integer(value: Any, where: str) -> int:
    if type(value) is int:
        return value
    if isinstance(value, str):
        return int(_parsed(int, value, where, "a whole number"))
    if isinstance(value, float) and value.is_integer():
        return int(value)
    try:
        return operator.index(value)
    except TypeError:
        pass
    as_float = _try_float(value)
    if as_float is not None and as_float.is_integer():
        return int(as_float)
    raise refuse(where, "a whole number", value)


def _number(value: Any, where: str) -> float:
    if type(value) is float:
        return value
    if isinstance(value, str):
        return float(_parsed(float, value, where, "a number"))
    as_float = _try_float(value)
    if as_float is None:
        raise refuse(where, "a number", value)
    return as_float


def _try_float(value: Any) -> float | None:
    """Numbers of any library through their own `__float__`; None for what is no number."""
    if not hasattr(value, "__float__") and not hasattr(value, "__index__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _parsed(kind: Callable[[str], Any], value: str, where: str, expected: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise refuse(where, expected, value) from None


_FLAG_WORDS = {
    "true": True,
    "false": False,
    "1": True,
    "0": False,
    "yes": True,
    "no": False,
    "on": True,
    "off": False,
}


def _flag(value: Any, where: str) -> bool:
    if value is True or value is False:
        return bool(value)
    if isinstance(value, str):
        flag = _FLAG_WORDS.get(value.lower())
    else:
        as_float = _try_float(value)
        flag = None if as_float not in (0.0, 1.0) else bool(as_float)
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
        try:
            return base64.b64decode(value, validate=True)
        except ValueError:
            raise InvalidInputError(f"{where}: the text is not base64; pass the raw bytes instead") from None
    raise refuse(where, "bytes", value)


def _moment(value: Any, where: str) -> datetime:
    if isinstance(value, datetime):
        return value
    try:
        if isinstance(value, str):
            return parse_moment(value)
        as_float = _try_float(value)
        if as_float is not None:
            return datetime.fromtimestamp(as_float, tz=timezone.utc)
    except (ValueError, OverflowError, OSError):
        pass
    raise refuse(where, "a moment (a datetime or RFC 3339 text such as 2026-01-31T12:00:00Z)", value)


def _member(kind: type[enum.Enum], value: Any, where: str) -> enum.Enum:
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(repr(member.value) for member in kind)
        raise refuse(where, f"one of {allowed}", value) from None


_SIMPLE: dict[Any, Callable[[Any, str], Any]] = {
    str: _text,
    int: _integer,
    float: _number,
    bool: _flag,
    bytes: _octets,
    datetime: _moment,
}


def _choice(allowed: tuple[Any, ...], where: str) -> Converter:
    def convert(value: Any) -> Any:
        for candidate in allowed:
            if candidate is value or (candidate == value and type(candidate) is type(value)):
                return candidate
        raise refuse(where, "one of " + ", ".join(map(repr, allowed)), value)

    return convert


def _list_of(args: tuple[Any, ...], where: str) -> Converter:
    (item,) = args
    # The index is worth naming, so the item's converter is bound for each item that fails, not for each item.
    convert_item = converter_for(item, f"{where}[]")

    def convert(value: Any) -> list[Any]:
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
            raise refuse(where, "a list", value)
        if convert_item is None:
            return list(value)
        items = list(value)
        for index, given in enumerate(items):
            try:
                items[index] = convert_item(given)
            except InvalidInputError:
                _again(item, given, f"{where}[{index}]")
                raise
        return items

    return convert


def _dict_of(args: tuple[Any, ...], where: str) -> Converter:
    _, item = args
    convert_item = converter_for(item, f"{where}[]")

    def convert(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise refuse(where, "a mapping", value)
        converted = dict(value)
        for key, given in converted.items():
            if not isinstance(key, str):
                raise refuse(f"{where} key", "text", key)
            if convert_item is not None:
                try:
                    converted[key] = convert_item(given)
                except InvalidInputError:
                    _again(item, given, f"{where}[{key!r}]")
                    raise
        return converted

    return convert


def _again(annotation: Any, value: Any, where: str) -> None:
    """Convert once more under the exact place, for the sake of the error's text."""
    converter = converter_for(annotation, where)
    if converter is not None:
        converter(value)


def _union(members: tuple[Any, ...], where: str) -> Converter:
    optional = type(None) in members
    rest = tuple(member for member in members if member is not type(None))
    if len(rest) == 1:
        inner = converter_for(rest[0], where)
    elif all(isinstance(member, type) and issubclass(member, Model) for member in rest):
        inner = _bound(lambda value, at: _one_of(rest, value, at), where)
    else:
        inner = _first_fit(rest, where)
    if not optional:
        return inner or (lambda value: value)
    if inner is None:
        return lambda value: value
    return lambda value: None if value is None else inner(value)


def _first_fit(members: tuple[Any, ...], where: str) -> Converter:
    """For unions of plain values: text stays text, then numbers."""
    converters = [(member, converter_for(member, where)) for member in members]

    def convert(value: Any) -> Any:
        for member, _ in converters:
            if isinstance(member, type) and type(value) is member:
                return value
        for _, converter in sorted(converters, key=lambda pair: pair[0] is str):
            if converter is None:
                return value
            try:
                return converter(value)
            except InvalidInputError:
                continue
        raise refuse(where, " or ".join(getattr(m, "__name__", str(m)) for m in members), value)

    return convert


def tag_of(cls: type) -> tuple[str, str] | None:
    """The field and value that tell this class from the others of its union, such as ("type", "image")."""
    for name in ("type", "state"):
        field = getattr(attrs.fields(cast("Any", cls)), name, None)
        if field is not None and get_origin(field.type) is Literal:
            return name, get_args(field.type)[0]
    return None


def _one_of(members: tuple[type[Model], ...], value: Any, where: str) -> Any:
    if isinstance(value, members):
        return value
    if not isinstance(value, Mapping):
        raise refuse(where, " or ".join(member.__name__ for member in members), value)
    by_tag, fallback = union_table(members)
    tag = next((value[name] for name in ("type", "state") if name in value), None)
    chosen = by_tag.get(tag, fallback) if isinstance(tag, str) else None
    if chosen is None:
        raise refuse(where, "a mapping whose type is one of " + ", ".join(map(repr, by_tag)), tag)
    return model_from(chosen, value, where)


def union_table(members: Iterable[type[Model]]) -> tuple[dict[str, type[Model]], type[Model] | None]:
    """Which class a tag stands for, and the open class that takes the tags nobody else has."""
    by_tag: dict[str, type[Model]] = {}
    fallback = None
    for member in members:
        tag = tag_of(member)
        if tag is None:
            fallback = member
        else:
            by_tag[tag[1]] = member
    return by_tag, fallback


def model_from(cls: type[ModelT], value: Any, where: str) -> ModelT:
    """An instance as it is, or one made of a mapping of its fields."""
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise refuse(where, cls.__name__, value)
    arguments = dict(value)
    if cls.__response__:
        known = field_names(cls)
        arguments = {name: arguments[name] for name in known if name in arguments}
    try:
        return cls(**arguments)
    except TypeError as error:
        raise InvalidInputError(f"{where}: {error}") from None


# ---------------------------------------------------------------------------------------- dumping, repr


@attrs.frozen
class _DumpOptions:
    as_json: bool
    without_none: bool
    without_defaults: bool


def _dump_model(value: Model, options: _DumpOptions) -> dict[str, Any]:
    defaults = _defaults_of(type(value)) if options.without_defaults else {}
    dumped = {}
    for name, item in value._fields_out().items():
        if options.without_none and item is None:
            continue
        if name in defaults and defaults[name] == item:
            continue
        dumped[name] = _dump(item, options)
    return dumped


def _defaults_of(cls: type) -> dict[str, Any]:
    if not attrs.has(cls):
        return {}
    defaults = {}
    for field in attrs.fields(cast("Any", cls)):
        if isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]  # Factory is a class at run time
            defaults[field.name] = cast("Any", field.default).factory()
        elif field.default is not attrs.NOTHING:
            defaults[field.name] = field.default
    return defaults


def _dump(value: Any, options: _DumpOptions) -> Any:
    if value is None or isinstance(value, (str, int, float)):
        is_enum = options.as_json and isinstance(value, enum.Enum)
        return cast("Any", value).value if is_enum else value
    if isinstance(value, Model):
        return _dump_model(value, options)
    if isinstance(value, Mapping):
        return {key: _dump(item, options) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [_dump(item, options) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if options.as_json and isinstance(value, datetime):
        return format_moment(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def short_repr(value: Any) -> str:
    """A repr that stays one short line whatever it is given.

    >>> short_repr(list(range(1000)))
    '[0, 1, 2, … 1000 items]'
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"<{len(value)} bytes>"
    if isinstance(value, (str, int, float, Model)) or value is None:
        text = repr(value)
        return text if len(text) <= 1000 or isinstance(value, Model) else f"{text[:997]}…"
    if isinstance(value, Mapping):
        items = [f"{key!r}: {short_repr(item)}" for key, item in list(value.items())[:_LONG]]
        return "{" + ", ".join(items) + (f", … {len(value)} items" if len(value) > _LONG else "") + "}"
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return f"array({list(shape)}, {value.dtype})"
    if isinstance(value, (list, tuple, range)):
        shown = ", ".join(short_repr(item) for item in value[: _LONG if len(value) <= _LONG else 3])
        more = f", … {len(value)} items" if len(value) > _LONG else ""
        return f"({shown}{more})" if isinstance(value, tuple) else f"[{shown}{more}]"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}…"
