"""Groups that load a command when it is run, and commands that share their options and show an example.

What a group's help needs is in its table: no module of a command is loaded for it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from tinker_sync.cli.output import FORMATS, Format, Sink

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinker_sync.clients.rest import AdminClient, RestClient
    from tinker_sync.clients.service import ServiceClient

_META: Final = "tinker_sync.cli."
CONTEXT: Final = {"help_option_names": ["-h", "--help"]}
# Somebody waits at the terminal: about seven seconds for a server that cannot be reached, not minutes.
_RETRIES: Final = 4


class Cli:
    """What a command works with: where to print, and clients of the server the user chose."""

    def __init__(self, sink: Sink, base_url: str | None = None) -> None:
        self.sink = sink
        self.base_url = base_url

    def service(self, **options: Any) -> ServiceClient:
        """A client; use it in a `with` block."""
        from tinker_sync.clients.service import ServiceClient

        return ServiceClient(base_url=self.base_url, **{"max_retries": _RETRIES, **options})

    def rest(self) -> AbstractContextManager[RestClient]:
        """A client for runs, checkpoints and sessions."""
        from tinker_sync.clients.rest import RestClient

        return self._on_service(RestClient)

    def admin(self) -> AbstractContextManager[AdminClient]:
        """A client for billing."""
        from tinker_sync.clients.rest import AdminClient

        return self._on_service(AdminClient)

    @contextmanager
    def _on_service(self, kind: Callable[[Any], Any]) -> Iterator[Any]:
        with self.service() as service:
            yield kind(service.holder)


def _remember(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    # Groups and commands take these options alike; the last one on the line wins.
    if value is not None:
        ctx.meta[_META + str(parameter.name)] = value


def _common_options() -> list[click.Parameter]:
    def option(*names: str, **more: Any) -> click.Option:
        return click.Option(names, expose_value=False, callback=_remember, default=None, **more)

    return [
        option("-f", "--format", "format", type=click.Choice(FORMATS), help="How to print; default: table."),
        option("--base-url", metavar="URL", help="The server; default: TINKER_BASE_URL."),
        option("-q", "--quiet", is_flag=True, flag_value=True, help="No talk and no bars on stderr."),
    ]


def current(ctx: click.Context) -> Cli:
    """What the running command works with, by the options so far."""
    form: Format = ctx.meta.get(f"{_META}format", "table")
    return Cli(Sink(form, quiet=bool(ctx.meta.get(f"{_META}quiet"))), ctx.meta.get(f"{_META}base_url"))


class Command(click.Command):
    """A command with the common options, whose help ends with an example."""

    def __init__(
        self,
        name: str,
        *,
        callback: Callable[..., Any],
        help: str | None,  # noqa: A002  # click's word
        params: list[click.Parameter],
        example: str,
    ) -> None:
        super().__init__(
            name,
            callback=callback,
            help=help,
            params=[*params, *_common_options()],
            context_settings={**CONTEXT},
        )
        self.example = example

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lines of the example, as they are."""
        with formatter.section("Example"):
            for line in self.example.splitlines():
                formatter.write(f"{' ' * formatter.current_indent}{line}\n")


class Group(click.Group):
    """Commands by name: where each is, and its help in short."""

    def __init__(self, name: str | None, help: str, table: Mapping[str, tuple[str, str]]) -> None:  # noqa: A002
        super().__init__(name, help=help, params=_common_options(), context_settings={**CONTEXT})
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in order."""
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load one; None when there is none of that name."""
        if cmd_name not in self.table:
            return None
        module, _, name = self.table[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table, without loading anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, short) for name, (_, short) in self.table.items()])


def command(name: str, *, example: str) -> Callable[[Callable[..., None]], Command]:
    """Make a command of a function that takes a `Cli` first. Its docstring is the help."""

    def make(function: Callable[..., None]) -> Command:
        @functools.wraps(function)
        def called(**values: Any) -> None:
            function(current(click.get_current_context()), **values)

        params = list(reversed(getattr(function, "__click_params__", [])))
        called.__dict__.pop("__click_params__", None)
        return Command(name, callback=called, help=function.__doc__, params=params, example=example)

    return make
