"""Chat templates: programs in Jinja that came with a model, so they run in a sandbox and see plain data only.

Compiled templates are kept, and threads share them. Whatever goes wrong in one is an `InvalidInputError`.
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
"""Around what the assistant says, while it is looked for: code points reserved for such private use."""

_KEPT: Final = 64


def render(template: str, variables: Mapping[str, Any], *, marked: bool = False) -> str:
    """The text a template makes of its variables.

    Args:
        template: the template's text.
        variables: plain data, see `plain`.
        marked: put `BEGIN` and `END` around what stands between generation tags.

    Raises:
        InvalidInputError: the template is broken, forbidden or refuses what it was given.
        MissingExtraError: Jinja is not installed.
    """
    try:
        import jinja2
    except ImportError:
        raise MissingExtraError("chat", feature="chat templates") from None
    try:
        return _compiled(template, marked).render(**variables)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidInputError(f"chat template, line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise InvalidInputError(f"chat template: {error.message or type(error).__name__}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidInputError(f"chat template: {type(error).__name__}: {error}") from error


@lru_cache(_KEPT)
def _compiled(template: str, marked: bool) -> Template:
    return _environment(marked).from_string(template)


@lru_cache(None)
def _environment(marked: bool) -> ImmutableSandboxedEnvironment:
    from jinja2 import ext, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """The tags around what the assistant says."""

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
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    environment.globals["dict"] = _Dictionaries()
    environment.globals["namespace"] = _namespace()
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes what HTML gives a meaning; models have seen it as it is."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005  # what the user's clock shows is what is asked for


class _Dictionaries:
    """`dict` for templates: makes dictionaries and offers no way to the class."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _namespace() -> type[Any]:
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    def check(names: Any) -> None:
        for name in names:
            if isinstance(name, str) and name.startswith("_"):
                raise SecurityError(f"a namespace takes no names with a leading underscore, got {name!r}")

    class PublicNamespace(Namespace):
        """A namespace without underscored names, which lead into the interpreter."""

        def __init__(*args: Any, **items: Any) -> None:  # a template may well have an item called self
            self, *given = args
            made = dict(*given, **items)
            check(made)
            Namespace.__init__(self, made)

        def __setitem__(self, name: str, value: Any) -> None:
            check([name])
            Namespace.__setitem__(self, name, value)

    return PublicNamespace


# ------------------------------------------------------------------------------------------- plain data


def plain(value: Any) -> Any:
    """A copy of what JSON knows; of anything else its class's name: its methods are not for templates.

    >>> plain({"content": [{"type": "image", "image": object()}]})
    {'content': [{'type': 'image', 'image': '<object>'}]}
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, str):  # enums and the like, as the plain class writes them
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, float) else _unpacked(value)


def _unpacked(value: Any) -> Any:
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    dumped = getattr(value, "model_dump", None)
    return plain(dumped()) if callable(dumped) else f"<{type(value).__name__}>"
