"""A fast path for models and trees whose values need no conversion: most requests and answers without arrays.

`tree_of` and `model_of` look at the class of each value. At the first value that may need a conversion they
raise `NotExact`, and the caller uses the cattrs converters instead. So a program whose values all have the
declared classes loads no converter.
"""

from __future__ import annotations

from functools import cache
from math import isfinite
from typing import Any, Literal, cast, get_args, get_origin

import attrs

from tinker_sync.errors import InvalidInputError
from tinker_sync.types._convert import exact_kinds
from tinker_sync.types._model import Model
from tinker_sync.types._structured import Structured, fields_of, is_model, members_of

_SIMPLE = frozenset({str, int, bool, type(None)})
_OF_ARRAYS = {"TensorData", "SampledSequence", "SampleResponse", "Datum"}
"""The models whose JSON form differs from their declared fields."""


class NotExact(Exception):
    """The error for a value that may need a conversion."""


def tree_of(value: Any) -> Any:
    """Return the JSON tree of a value that consists of plain JSON values, tuples and models without arrays.

    A model becomes a dict of its fields that are not None.

    Raises:
        NotExact: a value in the tree has another class, so a converter must convert or refuse it.

    >>> from tinker_sync.types import LoraConfig
    >>> tree_of({"config": LoraConfig(rank=8), "n": None})["config"]["rank"]
    8
    """
    kind = type(value)
    if kind in _SIMPLE or (kind is float and isfinite(value)):
        return value
    if kind is list or kind is tuple:
        return value if _SIMPLE.issuperset(map(type, value)) else [tree_of(item) for item in value]
    if kind is dict:
        if not {str}.issuperset(map(type, value)):
            raise NotExact
        return {name: tree_of(item) for name, item in value.items()}
    if not _leaves_as_declared(cast("Any", kind)):
        raise NotExact
    tree = {}
    for name, item in value._fields_out().items():
        if item is not None:  # a declared field with the value None is left out
            plain = type(item) in _SIMPLE or (type(item) is float and isfinite(item))
            tree[name] = item if plain else tree_of(item)
    return tree


@cache
def _leaves_as_declared(kind: type) -> bool:
    return issubclass(kind, Model) and not _OF_ARRAYS.intersection(base.__name__ for base in kind.__mro__)


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
