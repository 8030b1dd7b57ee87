"""Chat templates in Jinja, and the JSON schemas of tools, which templates get.

Templates come with a model, so they run in a sandbox and see plain data only. Threads share the compiled
templates. A failure inside a template raises `InvalidInputError`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
from collections.abc import Callable, Mapping
from datetime import datetime
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from tinker_sync.errors import InvalidInputError, MissingExtraError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

BEGIN: Final = "\ufdd0"
END: Final = "\ufdd1"
"""Marks around the assistant's text: code points that Unicode reserves for private use in a process."""

_KEPT: Final = 64


def render(template: str, variables: Mapping[str, Any], *, marked: bool = False) -> str:
    """Render a template.

    Args:
        template: the template's text.
        variables: plain data, see `to_plain`.
        marked: put `BEGIN` and `END` around the text between the template's `{% generation %}` tags.

    Raises:
        InvalidInputError: the template is broken, does something forbidden, or refuses its input.
        MissingExtraError: Jinja is not installed.
    """
    try:
        import jinja2
    except ImportError:
        raise MissingExtraError("chat", feature="chat templates") from None
    try:
        return _compile(template, marked).render(**variables)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidInputError(f"chat template, line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise InvalidInputError(f"chat template: {error.message or type(error).__name__}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidInputError(f"chat template: {type(error).__name__}: {error}") from error


@lru_cache(_KEPT)
def _compile(template: str, marked: bool) -> Template:
    return _make_environment(marked).from_string(template)


@lru_cache(None)
def _make_environment(marked: bool) -> ImmutableSandboxedEnvironment:
    from jinja2 import ext, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """An extension of Jinja: the tag `generation`, which templates put around the assistant's text."""

        tags = {"generation"}  # noqa: RUF012  # the base class declares it so

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_around", [])
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _around(self, caller: Callable[[], str]) -> str:
            return f"{BEGIN}{caller()}{END}" if marked else caller()

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _format_now
    environment.globals["dict"] = _DictFactory()
    environment.globals["namespace"] = _make_namespace()
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode JSON without the HTML escapes of Jinja's own filter, as in the models' training data."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _format_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005  # templates want the user's local time


class _DictFactory:
    """`dict` for templates: creates dictionaries without giving access to the class."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _make_namespace() -> type[Any]:
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    def check(names: Any) -> None:
        for name in names:
            if isinstance(name, str) and name.startswith("_"):
                raise SecurityError(f"a namespace takes no names with a leading underscore, got {name!r}")

    class PublicNamespace(Namespace):
        """A namespace that refuses names with a leading underscore, which could escape from the sandbox."""

        def __init__(*args: Any, **items: Any) -> None:  # a template may use an item named self
            self, *given = args
            made = dict(*given, **items)
            check(made)
            Namespace.__init__(self, made)

        def __setitem__(self, name: str, value: Any) -> None:
            check([name])
            Namespace.__setitem__(self, name, value)

    return PublicNamespace


# ------------------------------------------------------------------------------------------- plain data


def to_plain(value: Any) -> Any:
    """Copy a value as plain types. Dataclasses and models become dictionaries.

    Other objects become the name of their class, so that a template cannot call their methods.

    >>> to_plain({"content": [{"type": "image", "image": object()}]})
    {'content': [{'type': 'image', 'image': '<object>'}]}
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(to_plain(item) for item in value)
    if isinstance(value, str):  # enums and other subclasses, as the base class shows them
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, float) else _unpack(value)


def _unpack(value: Any) -> Any:
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return to_plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    dumped = getattr(value, "model_dump", None)
    return to_plain(dumped()) if callable(dumped) else f"<{type(value).__name__}>"


_SCALARS: Final = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_SECTION: Final = re.compile(r"^\s*(Args|Returns|Raises):\s*$", re.MULTILINE)
_ARGUMENT: Final = re.compile(r"^[ \t]*(\w+)\s*(?:\([^)]*\))?\s*:[ \t]*(.*)$")
_CHOICES: Final = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def schema_of(tool: Any) -> Mapping[str, Any]:
    """Return the JSON schema of a tool: a dictionary unchanged; for a function, from its types and docstring.

    Raises:
        InvalidInputError: the tool is neither, the function lacks a type or a description, a type has no
            schema or cannot be read, or the choices of an argument are no JSON list.

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
    try:
        hints = get_type_hints(function)
    except Exception as error:  # an annotation in quotes can raise any class
        raise InvalidInputError(f"tools: the types of {name} cannot be read: {error}") from error
    result = hints.pop("return", None)
    properties: dict[str, Any] = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in hints:
            raise InvalidInputError(f"tools: {name} has no type for {parameter.name!r}")
        if parameter.name not in arguments:
            raise InvalidInputError(f"tools: the docstring of {name} does not describe {parameter.name!r}")
        properties[parameter.name] = _describe(
            _schema_of_type(hints[parameter.name]), arguments[parameter.name], f"{name}: {parameter.name!r}"
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


def _describe(schema: dict[str, Any], words: str, place: str) -> dict[str, Any]:
    choices = _CHOICES.search(words)
    if choices is not None:
        try:
            listed = json.loads(choices.group(1))
        except ValueError:
            listed = None
        if not isinstance(listed, list):
            got = choices.group(1)
            raise InvalidInputError(f"tools: {place}: expected a JSON list of choices, got {got!r}")
        schema["enum"] = [each.strip() if isinstance(each, str) else each for each in listed]
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
    if isinstance(hint, type) and hint in _SCALARS:
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
