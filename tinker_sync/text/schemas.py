"""JSON schemas of tools for chat templates, built from a function's types and docstring. Pure."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from tinker_sync.errors import InvalidInputError

_SCALARS: Final = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_SECTION: Final = re.compile(r"^\s*(Args|Returns|Raises):\s*$", re.MULTILINE)
_ARGUMENT: Final = re.compile(r"^[ \t]*(\w+)\s*(?:\([^)]*\))?\s*:[ \t]*(.*)$")
_CHOICES: Final = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def schema_of(tool: Any) -> Mapping[str, Any]:
    """Return the schema of a tool: a dictionary unchanged, or a description of a function.

    Raises:
        InvalidInputError: the tool is neither, or the function lacks a type or a description.

    >>> def double(n: int):
    ...     '''Double a number.
    ...
    ...     Args:
    ...         n: the number
    ...     '''
    >>> schema_of(double)["function"]["parameters"]["properties"]
    {'n': {'type': 'integer', 'description': 'the number'}}
    """
    if isinstance(tool, Mapping):
        return tool
    if inspect.isfunction(tool) or inspect.ismethod(tool):
        return _schema_of_function(tool)
    raise InvalidInputError(f"tools: expected a JSON schema or a function, got a {type(tool).__name__}")


def _schema_of_function(function: Callable[..., Any]) -> dict[str, Any]:
    name = getattr(function, "__name__", "operation")
    doc = inspect.getdoc(function)
    if not doc:
        raise InvalidInputError(f"tools: {name} needs a docstring that describes it to the model")
    about, arguments, returned = _read_docstring(doc.strip())
    hints = get_type_hints(function)
    result = hints.pop("return", None)
    properties: dict[str, Any] = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in hints:
            raise InvalidInputError(f"tools: {name} has no type for {parameter.name!r}")
        if parameter.name not in arguments:
            raise InvalidInputError(f"tools: the docstring of {name} does not describe {parameter.name!r}")
        properties[parameter.name] = _describe(
            _schema_of_type(hints[parameter.name]), arguments[parameter.name]
        )
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    made = {"name": name, "description": about, "parameters": parameters}
    if result is not None:
        made["return"] = {
            **_schema_of_type(result),
            **({"description": returned} if returned is not None else {}),
        }
    return {"type": "function", "function": made}


def _describe(schema: dict[str, Any], words: str) -> dict[str, Any]:
    choices = _CHOICES.search(words)
    if choices is not None:
        schema["enum"] = [
            each.strip() if isinstance(each, str) else each for each in json.loads(choices.group(1))
        ]
        words = words[: choices.start()].strip()
    schema["description"] = words
    return schema


# ------------------------------------------------------------------------------------------- docstrings


def _read_docstring(doc: str) -> tuple[str, dict[str, str], str | None]:
    """Return the descriptions in a docstring: the function's, those of arguments by name, the result's."""
    parts = _SECTION.split(doc)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    arguments: dict[str, str] = {}
    indent = name = None
    for line in sections.get("Args", "").splitlines():
        depth = len(line) - len(line.lstrip())
        found = _ARGUMENT.match(line)
        if found and (indent is None or depth <= indent):
            name, indent = found.group(1), depth
            arguments[name] = found.group(2).strip()
        elif name is not None and line.strip():
            arguments[name] = f"{arguments[name]} {line.strip()}".strip()
    returned = sections.get("Returns")
    return parts[0].strip(), arguments, returned.strip() if returned is not None else None


# ------------------------------------------------------------------------------------------- types


def _schema_of_type(hint: Any) -> dict[str, Any]:
    if hint is Any:
        return {}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    origin, inside = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _schema_of_choices([member.value for member in hint])
    if origin is Literal:
        return _schema_of_choices(list(inside))
    if origin in (Union, types.UnionType):
        return _schema_of_union(inside)
    if hint is list or origin is list:
        return {"type": "array", **({"items": _schema_of_type(inside[0])} if inside else {})}
    if hint is tuple or (origin is tuple and ... not in inside):
        return {
            "type": "array",
            **({"prefixItems": [_schema_of_type(each) for each in inside]} if inside else {}),
        }
    if hint is dict or origin is dict:
        return {
            "type": "object",
            **({"additionalProperties": _schema_of_type(inside[1])} if len(inside) == 2 else {}),
        }
    raise InvalidInputError(f"tools: no JSON schema for the type {hint!r}")


def _schema_of_choices(choices: list[Any]) -> dict[str, Any]:
    if not choices or any(type(each) not in _SCALARS for each in choices):
        raise InvalidInputError(f"tools: no JSON schema for a choice of {choices!r}")
    kinds = list(dict.fromkeys(_SCALARS[type(each)] for each in choices))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": choices}


def _schema_of_union(members: tuple[Any, ...]) -> dict[str, Any]:
    some = [_schema_of_type(each) for each in members if each is not type(None)]
    if len(some) == 1:
        made = some[0]
    elif all(isinstance(each.get("type"), str) and len(each) == 1 for each in some):
        kinds = sorted({each["type"] for each in some})
        made = {"type": kinds[0] if len(kinds) == 1 else kinds}
    else:
        made = {"anyOf": some}
    return {**made, "nullable": True} if len(some) < len(members) else made
