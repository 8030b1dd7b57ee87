"""A fast path for answers whose values need no conversion: most answers without arrays.

`model_of` looks at the class of each value. At the first value that may need a conversion it raises
`NotExact`, and the caller uses the cattrs converters instead. So a program whose answers all have the
declared classes loads no converter: the import of cattrs takes longer than a first request.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, get_args, get_origin

import attrs

from tinker_sync.errors import InvalidInputError
from tinker_sync.types._convert import exact_kinds
from tinker_sync.types._structured import Structured, fields_of, is_model, members_of


class NotExact(Exception):
    """The error for a value that may need a conversion."""


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
