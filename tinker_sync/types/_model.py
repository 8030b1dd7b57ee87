"""The base of every model: one class decorator and one mixin.

A model is a frozen, slotted attrs class. `model` gives every field a converter that accepts exact values and
refuses others with an `InvalidInputError` that names class and field. The converter reads the annotation when
the first value comes, so a program pays for the models it uses. A field made with `attrs.field(repr=False)`
holds a secret: no repr and no refusal shows its value.

This module does no I/O and knows no wire format. `_fields_out` determines the names that a model shows.
"""

from __future__ import annotations

import base64
import copy
import enum
import inspect
import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import date, datetime
from functools import cache, partial, wraps
from itertools import repeat
from operator import attrgetter
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    cast,
    get_args,
    get_origin,
    overload,
)

import attrs

from tinker_sync._display import repr_html
from tinker_sync._spelling import describe_unknown_parameter
from tinker_sync.errors import InvalidInputError
from tinker_sync.types._convert import converter_for, exact_kinds
from tinker_sync.types._moment import format_moment
from tinker_sync.types._structured import Structured, field_names, fields_of, model_from, refuse, short_repr

if TYPE_CHECKING:
    from typing_extensions import Self, dataclass_transform
else:

    def dataclass_transform(**_: object) -> Callable[[Any], Any]:
        return lambda decorated: decorated


__all__ = ["Model", "model", "refuse", "short_repr"]

T = TypeVar("T")
P = ParamSpec("P")


class _Signature:
    """The signature of a model's constructor, with the declared types of fields."""

    def __get__(self, instance: object, owner: Any) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)
        types = {field.alias: field.type for field in fields_of(owner)} if attrs.has(owner) else {}
        _, *parameters = signature.parameters.values()
        return signature.replace(
            parameters=[each.replace(annotation=types.get(each.name, each.annotation)) for each in parameters]
        )


class Model(Structured):
    """The base of all models, with dumps, copies and a short repr.

    >>> from tinker_sync.types import LoraConfig
    >>> LoraConfig(rank=8).model_dump()["rank"]
    8
    >>> LoraConfig(rank=8).model_copy(update={"rank": 16})
    LoraConfig(rank=16, seed=None, train_unembed=True, train_mlp=True, train_attn=True)
    """

    __slots__ = ()

    __signature__ = _Signature()

    def _fields_out(self) -> dict[str, Any]:
        """Return the public fields in declared order, under the names that a dump shows, not converted."""
        return {name: getattr(self, name) for name in field_names(cast("Any", type(self)))}

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
        """Return the model as a dict of plain values, nested models too.

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
        wanted = set(dumped) if include is None else _names(include)
        unwanted = set() if exclude is None else _names(exclude)
        return {name: value for name, value in dumped.items() if name in wanted - unwanted}

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
        """Return the model as JSON text. NaN and infinities, which JSON does not have, become null.

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
        return json.dumps(_finite(tree), indent=indent, separators=separators, ensure_ascii=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields replaced.

        The new values are converted and checked as in the constructor.

        >>> from tinker_sync.types import SamplingParams
        >>> SamplingParams(max_tokens=5).model_copy(update={"max_tokens": 7}).max_tokens
        7
        """
        source = copy.deepcopy(self) if deep else self
        return source._evolved(dict(update or {}))

    @classmethod
    def model_validate(cls, value: Any) -> Self:
        """Return a model made from a mapping of its fields, or the model itself.

        >>> from tinker_sync.types import Cursor
        >>> Cursor.model_validate({"offset": 0, "limit": 20, "total_count": 3, "new": True}).limit
        20
        """
        return model_from(cls, value, cls.__name__)

    def _evolved(self, changes: dict[str, Any]) -> Self:
        return cast("Self", attrs.evolve(cast("Any", self), **changes))

    def _with(self, **values: Any) -> Self:
        """Return a copy with values that are not checked. For decoders, which know that the values fit."""
        made = object.__new__(type(self))
        names, values_of = _slots(cast("Any", type(self)))
        deque(map(object.__setattr__, repeat(made), names, values_of(self)), maxlen=0)
        for name, value in values.items():
            object.__setattr__(made, name, value)
        return made

    def _fill(self, name: str, value: Any) -> None:
        """Set a field of a new model that only its maker refers to. The value is not checked."""
        object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return _compared(self, False) == _compared(other, False)

    def __hash__(self) -> int:
        return hash((type(self), _compared(self, True)))

    def __repr__(self) -> str:
        shown = (f"{name}={short_repr(value)}" for name, value in self._repr_items())
        return f"{type(self).__name__}({', '.join(shown)})"

    _repr_html_ = repr_html

    def _repr_items(self) -> Iterable[tuple[str, Any]]:
        for field in attrs.fields(cast("Any", type(self))):
            if field.repr and not field.name.startswith("_"):
                yield field.name, getattr(self, field.name)


def _compared(model: Any, hashed: bool) -> tuple[Any, ...]:
    """Return the values that determine the equality of a model or, if `hashed`, its hash."""
    return tuple(
        getattr(model, name) if key is None else key(getattr(model, name))
        for name, key in _compared_fields(cast("Any", type(model)), hashed)
    )


@cache
def _compared_fields(cls: Any, hashed: bool) -> tuple[tuple[str, Callable[[Any], Any] | None], ...]:
    chosen = [field for field in attrs.fields(cls) if field.eq and not (hashed and field.hash is False)]
    return tuple((field.name, field.eq_key) for field in chosen)


@cache
def _slots(cls: type) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """Return the names of a model's fields, and the function that returns their values as a tuple.

    The model must have at least two fields.
    """
    names = tuple(map(attrgetter("name"), attrs.fields(cast("Any", cls))))
    return names, attrgetter(*names)


# ---------------------------------------------------------------------------------------- the decorator


@overload
def model(cls: type[T]) -> type[T]: ...
@overload
def model(*, kw_only: bool = ..., init: bool = ...) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(attrs.field,))
def model(cls: type[T] | None = None, *, kw_only: bool = True, init: bool = True) -> Any:
    """Make a model class from an annotated class: frozen, slotted, compared by value, every field checked.

    Args:
        kw_only: False if scripts construct the model with positional arguments.
        init: False for a class that inherits its `__init__`; the generated one is then `__attrs_init__`.
    """

    def decorate(plain: type[T]) -> type[T]:
        owner: list[type[T]] = []
        made = attrs.define(
            plain,
            frozen=True,
            slots=True,
            kw_only=kw_only,
            eq=False,  # `Model` compares: to make a method for each class takes time at every start
            init=init and "__init__" not in vars(plain),
            order=False,
            repr=False,
            str=False,
            field_transformer=partial(_attach_converters, owner),
            auto_attribs=True,
        )
        owner.append(made)
        cast("Any", made).__setattr__ = cast("Any", made).__delattr__ = _refuse_change
        # Answers do not need it, because users do not construct them, and there are many of them.
        if not getattr(made, "__response__", False) and "__init__" in vars(made):
            cast("Any", made).__init__ = advising(cast("Any", made).__init__)
        return made

    return decorate if cls is None else decorate(cls)


_DERIVED = "converter derived from the annotation"


def _attach_converters(
    made: list[Any], _: type, fields: list[attrs.Attribute[Any]]
) -> list[attrs.Attribute[Any]]:
    """Give each field a conversion by its annotation, unless it has a converter of its own."""
    return [
        # An inherited field gets a conversion of its own, so that errors name the class the user sees.
        field.evolve(converter=_converter(made, field.name), metadata={**field.metadata, _DERIVED: True})
        if field.init and (field.converter is None or _DERIVED in field.metadata)
        else field
        for field in fields
    ]


def _converter(made: list[Any], name: str) -> Callable[[Any], Any]:
    """Return the converter of a field. It reads the annotation of the field when the first value arrives."""
    exact: type | None = None
    nullable = False
    choices: frozenset[Any] = frozenset()  # of a literal of texts
    convert: Callable[[Any], Any]

    def prepare(value: Any) -> Any:
        nonlocal exact, nullable, choices, convert
        (cls,) = made
        field = getattr(fields_of(cls), name)
        where = f"{cls.__name__}.{name}"
        by_annotation = converter_for(field.type, where)
        convert = _discreet(by_annotation, where) if field.repr is False else by_annotation
        kinds = exact_kinds(field.type)
        nullable = type(None) in kinds
        exact = next(iter(kinds - {type(None)}), None)
        if get_origin(field.type) is Literal and set(map(type, get_args(field.type))) == {str}:
            exact, choices = None, frozenset(get_args(field.type))
        return convert(value)

    convert = prepare

    def converted(value: Any) -> Any:
        # Nearly all values are of the declared class, and comparing it here is faster than a call.
        if type(value) is exact or (nullable and value is None) or (type(value) is str and value in choices):
            return value
        return convert(value)

    # attrs asks for the signature of every converter; working it out takes longer than making the field.
    converted.__signature__ = _ONE_VALUE  # type: ignore[attr-defined]
    return converted


_ONE_VALUE = inspect.Signature([inspect.Parameter("value", inspect.Parameter.POSITIONAL_ONLY)])


def _discreet(convert: Callable[[Any], Any], where: str) -> Callable[[Any], Any]:
    """Return a converter whose errors do not show the value, for a field that holds a secret."""

    def converted(value: Any) -> Any:
        with suppress(InvalidInputError):
            return convert(value)
        # Raised outside of any handler: the first error, which shows the value, is gone.
        raise InvalidInputError(f"{where}: cannot be a {type(value).__name__}; the value is not shown")

    return converted


def advising(construct: Callable[P, None]) -> Callable[P, None]:
    """Return a constructor whose error about an unknown parameter names the known ones."""
    code = construct.__code__
    parameters = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]

    @wraps(construct)
    def advised(*args: P.args, **given: P.kwargs) -> None:
        try:
            construct(*args, **given)
        except TypeError as error:
            unknown = [name for name in given if name not in parameters]
            made_by = getattr(type(args[0]), "__made_by__", "")
            by_place = made_by and len(args) > max(code.co_argcount, 1)
            # An error from the constructor's own code comes from an inner frame.
            if not (unknown or by_place) or error.__traceback__ is None or error.__traceback__.tb_next:
                raise
            if unknown:
                reason = describe_unknown_parameter(type(args[0]).__name__, unknown[0], parameters)
            else:
                reason = f"{type(args[0]).__name__} takes its parameters by name; {made_by} makes one"
        else:
            return
        # Raised outside of the handler, so that the error has no context.
        raise TypeError(reason)

    return advised


class _FrozenValueError(attrs.exceptions.FrozenInstanceError):
    def __init__(self, message: str) -> None:  # that of attrs takes no message
        AttributeError.__init__(self, message)


def _refuse_change(self: Any, name: str, *_: object) -> None:
    cls = type(self).__name__
    raise _FrozenValueError(
        f"{cls}.{name} cannot be changed; make another value: .model_copy(update={{{name!r}: ...}})"
    )


# ---------------------------------------------------------------------------------------- dumping, repr


class _DumpOptions(NamedTuple):
    as_json: bool
    without_none: bool
    without_defaults: bool


def _dump_model(value: Model, options: _DumpOptions) -> dict[str, Any]:
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


def _dump(value: Any, options: _DumpOptions) -> Any:
    if options.as_json and isinstance(value, enum.Enum):
        return value.value
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Model):
        return _dump_model(value, options)
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


def _finite(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _finite(item) for key, item in tree.items()}
    if isinstance(tree, list):
        return [_finite(item) for item in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def _names(given: Iterable[str]) -> set[str]:
    if isinstance(given, (str, Mapping)):
        raise TypeError(f"expected a set of field names, got {type(given).__name__}")
    return set(given)
