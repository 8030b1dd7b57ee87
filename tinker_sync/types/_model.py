"""The decorator and the base class of models, the data classes of the API.

A model is a frozen, slotted attrs class. The decorator `model` gives a converter to each field that has none.
The converter turns a value into the annotated type, or raises an `InvalidInputError` that names class and
field. It reads the annotation when the first value comes, so a program pays only for the models that it uses.
A field made with `attrs.field(repr=False)` may hold a secret: reprs and these errors do not show its value.
`AsDataclass` is for classes that scripts pass to the standard module `dataclasses`. This module does no I/O
and knows no wire format.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial, wraps
from itertools import repeat
from operator import attrgetter
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    ParamSpec,
    TypeVar,
    cast,
    get_args,
    get_origin,
    overload,
)

import attrs

from tinker_sync._base.displays import repr_html
from tinker_sync._base.spelling import describe_unknown_parameter
from tinker_sync.errors import InvalidInputError
from tinker_sync.types._convert import converter_for, exact_kinds
from tinker_sync.types._structured import (
    DumpOptions,
    Structured,
    dump_model,
    field_names,
    fields_of,
    finite,
    model_from,
    short_repr,
)

if TYPE_CHECKING:
    import dataclasses

    from typing_extensions import Self

if TYPE_CHECKING:
    from typing import TypeAlias

    from typing_extensions import Self, dataclass_transform
else:

    def dataclass_transform(**_: object) -> Callable[[Any], Any]:
        return lambda decorated: decorated


_Tree: TypeAlias = dict[str, Any]  # a name for annotations in `Model`, which has a method `dict`
T = TypeVar("T")
P = ParamSpec("P")


class _Signature:
    """A descriptor that returns the signature of a model's constructor, with the declared types of fields."""

    def __get__(self, instance: object, owner: Any) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)
        types = {field.alias: field.type for field in fields_of(owner)} if attrs.has(owner) else {}
        _, *parameters = signature.parameters.values()
        return signature.replace(
            parameters=[each.replace(annotation=types.get(each.name, each.annotation)) for each in parameters]
        )


class _ModelFields:
    """A descriptor that returns the public fields of a model class by name."""

    def __get__(self, instance: object, owner: Any) -> dict[str, attrs.Attribute[Any]]:
        known = {field.alias: field for field in fields_of(owner)} if attrs.has(owner) else {}
        return {name: known[name] for name in field_names(owner)} if known else {}


class Model(Structured):
    """The base class of all data classes of the API. It gives them dumps, copies, equality and a short repr.

    The other methods of pydantic models that scripts use are here too, such as `dict`, and iteration over
    pairs of name and value. A model can be a field of a pydantic model.

    >>> from tinker_sync.types import LoraConfig
    >>> LoraConfig(rank=8).model_dump()["rank"]
    8
    >>> LoraConfig(rank=8).model_copy(update={"rank": 16})
    LoraConfig(rank=16, seed=None, train_unembed=True, train_mlp=True, train_attn=True)
    """

    __slots__ = ()

    __signature__ = _Signature()
    model_fields = _ModelFields()

    if not TYPE_CHECKING:  # type checkers would accept a model in place of a list
        __dict__ = property(lambda self: self._fields_out())

        def __iter__(self) -> Iterator[tuple[str, Any]]:
            return iter(self._fields_out().items())

    @property
    def model_fields_set(self) -> set[str]:
        """The names of the fields that differ from their default."""
        return set(self.model_dump(exclude_unset=True))

    def model_dump(
        self,
        *,
        mode: Literal["python", "json"] = "python",
        include: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
        exclude_none: bool = False,
        exclude_defaults: bool = False,
        exclude_unset: bool = False,
        by_alias: object = None,  # noqa: ARG002
        round_trip: object = False,  # noqa: ARG002
        warnings: object = True,  # noqa: ARG002
    ) -> _Tree:
        """Return the model and its nested models as plain dicts. Arrays become lists, and bytes base64 text.

        Args:
            mode: "json" also turns moments and enums into text.
            include: only these top-level fields.
            exclude: leave out these top-level fields.
            exclude_none: leave out fields that are None.
            exclude_defaults: leave out fields that equal their default.
            exclude_unset: the same as `exclude_defaults`; a model does not record which fields were given.
            by_alias, round_trip, warnings: have no effect.

        >>> from tinker_sync.types import AdamParams
        >>> AdamParams(learning_rate=1).model_dump(include={"learning_rate"})
        {'learning_rate': 1.0}
        """
        options = DumpOptions(mode == "json", exclude_none, exclude_defaults or exclude_unset)
        dumped = dump_model(self, options)
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
        by_alias: object = None,  # noqa: ARG002
        round_trip: object = False,  # noqa: ARG002
        warnings: object = True,  # noqa: ARG002
    ) -> str:
        """Return the model as JSON text. NaN and infinities, which JSON does not have, become null.
        The other parameters select fields as in `model_dump`.

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
        return json.dumps(finite(tree), indent=indent, separators=separators, ensure_ascii=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields replaced by new values, converted and checked as in the constructor.
        With `deep`, the other values are copied too. A name that is no field raises `TypeError`.

        >>> from tinker_sync.types import SamplingParams
        >>> SamplingParams(max_tokens=5).model_copy(update={"max_tokens": 7}).max_tokens
        7
        """
        source = copy.deepcopy(self) if deep else self
        return source._evolved(dict(update or {}))

    @classmethod
    def model_validate(cls, value: Any) -> Self:
        """Return a model made from a mapping of its fields. A model is returned as it is.
        The models of answers ignore unknown fields.

        Raises:
            InvalidInputError: the value does not fit the model.

        >>> from tinker_sync.types import Cursor
        >>> Cursor.model_validate({"offset": 0, "limit": 20, "total_count": 3, "new": True}).limit
        20
        """
        return model_from(cls, value, cls.__name__)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes) -> Self:
        """Return a model made from JSON text, with the errors of `model_validate`.

        >>> from tinker_sync.types import LoraConfig
        >>> LoraConfig.model_validate_json('{"rank": 8}').rank
        8
        """
        try:
            tree = json.loads(json_data)
        except ValueError as error:
            raise InvalidInputError(f"{cls.__name__}: expected JSON text: {error}") from None
        return cls.model_validate(tree)

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: object, _handler: object) -> Any:
        """Return the schema by which pydantic makes and dumps a field of this class."""
        # By its name, because this package does not need pydantic.
        schema: Any = importlib.import_module("pydantic_core.core_schema")
        dump = schema.plain_serializer_function_ser_schema(
            lambda value, info: value.model_dump(
                mode=info.mode, exclude_none=info.exclude_none, exclude_defaults=info.exclude_defaults
            ),
            info_arg=True,
        )
        return schema.no_info_plain_validator_function(cls.model_validate, serialization=dump)

    dict, json, copy = model_dump, model_dump_json, model_copy

    @classmethod
    def _accept(cls, given: _Tree, unknown: list[str]) -> _Tree | None:  # noqa: ARG003
        """Return the arguments that stand for `given`, of which some are unknown; None refuses these."""
        return None

    def _evolved(self, changes: _Tree) -> Self:
        return cast("Self", attrs.evolve(cast("Any", self), **changes))

    def _with(self, **values: Any) -> Self:
        """Return a copy with new, unchecked values of these fields. For decoders, whose values fit."""
        kind: Any = type(self)
        made: Self = object.__new__(kind)
        names, values_of = _slots(kind)
        deque(map(object.__setattr__, repeat(made), names, values_of(self)), maxlen=0)
        for name, value in values.items():
            object.__setattr__(made, name, value)
        return made

    def _fill(self, name: str, value: Any) -> None:
        """Set a field without a check. Only for the code that makes the model, before other code has it."""
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


@cache
def _names_of_fields(cls: type) -> frozenset[str]:
    return frozenset(map(attrgetter("name"), attrs.fields(cast("Any", cls))))


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
        cast("Any", made).__setstate__ = _whole(cast("Any", made).__setstate__)
        cast("Any", made).__setattr__ = cast("Any", made).__delattr__ = _refuse_change
        # Answers do not need it, because users do not construct them, and there are many of them.
        if not getattr(made, "__response__", False) and "__init__" in vars(made):
            cast("Any", made).__init__ = advising(cast("Any", made).__init__)
        return made

    return decorate if cls is None else decorate(cls)


def _whole(restore: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return a `__setstate__` that also takes the pickles of other classes with the same fields.

    A pickle of the reference client names the classes `tinker.Datum` and so on, which may be the names of
    those of this package. Its state has the fields in another form, and the method made by attrs would leave
    out those that it does not find.
    """

    def restore_whole(self: Any, state: Any) -> None:
        names = _names_of_fields(cast("Any", type(self)))
        if isinstance(state, Mapping) and state.keys() != names:
            held = state.get("__dict__", state)  # that of pydantic models
            given = {
                each.alias: held[name]
                for each in attrs.fields(type(self))
                for name in (each.name, each.alias)
                if each.init and name in held
            }
            made = model_from(type(self), given, type(self).__name__)
            state = {name: getattr(made, name) for name in names}
        restore(self, state)

    return restore_whole


_DERIVED = "converter derived from the annotation"


def _attach_converters(
    made: list[Any], _: type, fields: list[attrs.Attribute[Any]]
) -> list[attrs.Attribute[Any]]:
    """Return `fields`; those without a converter of their own get one. `made` gets the class later."""
    return [
        # An inherited field gets a converter of its own, so that errors name the class the user sees.
        field.evolve(converter=_converter(made, field.name), metadata={**field.metadata, _DERIVED: True})
        if field.init and (field.converter is None or _DERIVED in field.metadata)
        else field
        for field in fields
    ]


def _converter(made: list[Any], name: str) -> Callable[[Any], Any]:
    """Return a converter of the field `name`. Its first call reads the annotation in the class in `made`."""
    exact: set[type] = set()
    choices: frozenset[Any] = frozenset()  # of a literal of texts
    convert: Callable[[Any], Any]

    def prepare(value: Any) -> Any:
        nonlocal exact, choices, convert
        (cls,) = made
        field = getattr(fields_of(cls), name)
        where = f"{cls.__name__}.{name}"
        by_annotation = converter_for(field.type, where)
        convert = _discreet(by_annotation, where) if field.repr is False else by_annotation
        exact = exact_kinds(field.type)
        if get_origin(field.type) is Literal and set(map(type, get_args(field.type))) == {str}:
            choices = frozenset(get_args(field.type))
        return convert(value)

    convert = prepare

    def converted(value: Any) -> Any:
        # Nearly all values are of the declared class, and a look here is faster than a call.
        if type(value) in exact or (type(value) is str and value in choices):
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
    """Return a constructor with clearer errors for unknown parameters and for values given by position."""
    code = construct.__code__
    parameters = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]

    @wraps(construct)
    def advised(*args: P.args, **given: P.kwargs) -> None:
        try:
            construct(*args, **given)
        except TypeError as error:
            unknown = [name for name in given if name not in parameters]
            by_place = code.co_kwonlyargcount > 0 and len(args) > max(code.co_argcount, 1)
            # An error from the constructor's own code comes from an inner frame.
            if not (unknown or by_place) or error.__traceback__ is None or error.__traceback__.tb_next:
                raise
            accepted = cast("Any", type(args[0]))._accept(given, unknown) if unknown else None
            if unknown:
                reason = describe_unknown_parameter(type(args[0]).__name__, unknown[0], parameters)
            else:
                made_by = getattr(type(args[0]), "__made_by__", "")
                names = ", ".join(f"{name}=..." for name in parameters[: len(args) - 1])
                advice = f"{made_by} makes one" if made_by else f"write {type(args[0]).__name__}({names})"
                reason = f"{type(args[0]).__name__} takes its parameters by name; {advice}"
        else:
            return
        # Outside of the handler, so that errors have no context.
        if accepted is None:
            raise TypeError(reason)
        advised(*args, **accepted)

    return advised


class _FrozenValueError(attrs.exceptions.FrozenInstanceError):
    def __init__(self, message: str) -> None:  # that of attrs takes no message
        AttributeError.__init__(self, message)


def _refuse_change(self: Any, name: str, *_: object) -> None:
    cls = type(self).__name__
    raise _FrozenValueError(
        f"{cls}.{name} cannot be changed; make another value: .model_copy(update={{{name!r}: ...}})"
    )


def _names(given: Iterable[str]) -> set[str]:
    if isinstance(given, (str, Mapping)):
        raise TypeError(f"expected a set of field names, got {type(given).__name__}")
    return set(given)


# -------------------------------------------------------------------------------------- as dataclasses


class _OfDataclass:
    """A descriptor that returns an attribute of the dataclass with the fields of its owner."""

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, _: object, owner: type[AsDataclass]) -> Any:
        try:
            return getattr(_dataclass_like(cast("Any", owner)), self._name)
        except attrs.exceptions.NotAnAttrsClassError:  # a base class that has no fields
            raise AttributeError(f"{owner.__name__} has no fields", name=self._name) from None


class AsDataclass:
    """The base class of the classes that `dataclasses` takes for dataclasses.

    The fields are the parameters of the constructor, so `dataclasses.replace` converts and checks new values
    as the constructor does.

    >>> import dataclasses
    >>> from tinker_sync.types import SampledProvenanceSpan
    >>> span = SampledProvenanceSpan(sequence_id="seq-1", length=5)
    >>> dataclasses.asdict(dataclasses.replace(span, offset=2))
    {'sequence_id': 'seq-1', 'offset': 2, 'length': 5}
    """

    __slots__ = ()

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    else:
        __dataclass_fields__ = _OfDataclass()
        __dataclass_params__ = _OfDataclass()

    def __replace__(self, /, **changes: Any) -> Self:  # for `copy.replace`, which is new in Python 3.13
        from dataclasses import replace

        return replace(self, **changes)

    @classmethod
    def _dataclass_fields(cls) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Yield the name and the type of each field, and its arguments for `dataclasses.field`."""
        for field in attrs.fields(cast("Any", cls)):
            if field.init:
                default: Any = field.default
                given = {"repr": bool(field.repr), "compare": bool(field.eq), "kw_only": bool(field.kw_only)}
                if hasattr(default, "factory"):
                    given["default_factory"] = default.factory
                elif default is not attrs.NOTHING:
                    given["default"] = default
                yield field.alias, field.type, given


@cache
def _dataclass_like(cls: type[AsDataclass]) -> type:
    """Return a dataclass with the fields of a class. It is never instantiated."""
    from dataclasses import field, make_dataclass

    fields = [(name, kind, field(**given)) for name, kind, given in cls._dataclass_fields()]
    return make_dataclass(cls.__name__, fields, frozen=True, init=False, repr=False, eq=False)
