"""Chat templates in Jinja. They come with a model, so they run in a sandbox and see plain data only.

Threads share the compiled templates. A failure inside a template raises `InvalidInputError`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

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
        marked: put `BEGIN` and `END` around the text between generation tags.

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
        """The tags around the assistant's text."""

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
    """Copy a value as JSON types. Other objects become the name of their class, without their methods.

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
