"""Groups, commands and the options that they share, on top of click.

A group prints its help from its table, without loading the modules of its commands. This module knows no
command, and loads a client only when a command asks for one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import click

from tinker_sync.cli import formatting
from tinker_sync.cli.output import FORMATS, Format, Sink

if TYPE_CHECKING:
    from tinker_sync.clients.rest import AdminClient, RestClient
    from tinker_sync.clients.service import ServiceClient

_META: Final = "tinker_sync.cli."
CONTEXT: Final = {"help_option_names": ["-h", "--help"]}
# A user waits at the terminal: an unreachable server is reported after about seven seconds, not minutes.
_RETRIES: Final = 4


class Cli:
    """The first argument of every command: the output, and clients of the server that the user chose."""

    def __init__(self, sink: Sink, base_url: str | None = None) -> None:
        self.sink = sink
        self.base_url = base_url

    def now(self) -> datetime:
        """Return the present time, from which tables count ages."""
        return formatting.utc_now()

    def service(self, **options: Any) -> ServiceClient:
        """Return a `ServiceClient` for a `with` block.

        `options` are arguments of `ServiceClient`. Without `max_retries` among them, a call has four retries.
        """
        from tinker_sync.clients.service import ServiceClient

        return ServiceClient(base_url=self.base_url, **{"max_retries": _RETRIES, **options})

    def rest(self) -> AbstractContextManager[RestClient]:
        """Return a context manager that yields a client for runs, checkpoints and sessions."""
        from tinker_sync.clients.rest import RestClient

        return self._on_service(RestClient)

    def admin(self) -> AbstractContextManager[AdminClient]:
        """Return a context manager that yields a client for billing."""
        from tinker_sync.clients.rest import AdminClient

        return self._on_service(AdminClient)

    @contextmanager
    def _on_service(self, kind: Callable[[Any], Any]) -> Iterator[Any]:
        with self.service() as service:
            yield kind(service.holder)


def _store_option(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    # Groups and commands accept these options alike; the last one on the line wins.
    if value is not None:
        ctx.meta[_META + str(parameter.name)] = value


def _common_options() -> list[click.Parameter]:
    def option(*names: str, **more: Any) -> click.Option:
        return click.Option(names, expose_value=False, callback=_store_option, default=None, **more)

    return [
        option("-f", "--format", "format", type=click.Choice(FORMATS), help="Output format; default: table."),
        option("--base-url", metavar="URL", is_eager=True, help="The server; default: TINKER_BASE_URL."),
        option(
            "-q",
            "--quiet",
            is_flag=True,
            flag_value=True,
            help="Print no messages and no progress bars on stderr.",
        ),
    ]


def base_url_of(ctx: click.Context) -> str | None:
    """Return the address of the server that the command line names, or None."""
    chosen: str | None = ctx.meta.get(f"{_META}base_url")
    return chosen


def _make_cli(ctx: click.Context) -> Cli:
    form: Format = ctx.meta.get(f"{_META}format", "table")
    return Cli(Sink(form, quiet=bool(ctx.meta.get(f"{_META}quiet"))), base_url_of(ctx))


class ReaderGone(Exception):  # the end of the reader is no error of the command
    """The error for a broken pipe, in place of `BrokenPipeError`, for which click would exit with 1."""


@contextmanager
def _name_gone_reader() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise ReaderGone from error


class Command(click.Command):
    """A command with the options that all commands share. Its help ends with an example."""

    def __init__(
        self,
        name: str,
        *,
        callback: Callable[..., Any],
        help: str | None,  # noqa: A002  # the name that click uses
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
        """Write the lines of the example unchanged."""
        with formatter.section("Example"):
            for line in self.example.splitlines():
                formatter.write(f"{' ' * formatter.current_indent}{line}\n")


class Group(click.Group):
    """A group of commands, which prints its help without loading the modules of its commands.

    Args:
        name: the name of the group.
        help: the help text of the group.
        table: the place ("module:name") and the short help of each command, by its name.
    """

    def __init__(self, name: str | None, help: str, table: Mapping[str, tuple[str, str]]) -> None:  # noqa: A002
        super().__init__(name, help=help, params=_common_options(), context_settings={**CONTEXT})
        self.table = table

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Parse the arguments, which may print a help. Raise `ReaderGone` if the output cannot be written."""
        with _name_gone_reader():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Raise `ReaderGone` if its output cannot be written."""
        with _name_gone_reader():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table; click would sort them."""
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command; return None for an unknown name."""
        if cmd_name not in self.table:
            return None
        module, _, name = self.table[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name. The error for an unknown name suggests similar ones."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            raise click.UsageError(self._explain_unknown(ctx, name), ctx)
        return super().resolve_command(ctx, args)

    def _explain_unknown(self, ctx: click.Context, name: str) -> str:
        from tinker_sync._base.spelling import find_closest

        text = f"there is no command {name!r} of {ctx.command_path}"
        close = find_closest(name, self.table, loosely=False)
        if close is not None:
            return f"{text}; did you mean {ctx.command_path} {close}?"
        within = [
            f"{ctx.command_path} {each} {name}"
            for each in self.table
            if isinstance(group := self.get_command(ctx, each), Group) and name in group.table
        ]
        if within:
            return f"{text}; did you mean {' or '.join(within)}?"
        return f"{text}. There are: {', '.join(self.table)}"

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names and short helps of the table, without loading a command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, short) for name, (_, short) in self.table.items()])


def command(name: str, *, example: str) -> Callable[[Callable[..., None]], Command]:
    """Return a decorator that turns a function into a command.

    The function takes a `Cli` as its first argument, and its docstring is the help of the command.
    """

    def make(function: Callable[..., None]) -> Command:
        @functools.wraps(function)
        def call(**values: Any) -> None:
            function(_make_cli(click.get_current_context()), **values)

        params = list(reversed(getattr(function, "__click_params__", [])))
        call.__dict__.pop("__click_params__", None)
        return Command(name, callback=call, help=function.__doc__, params=params, example=example)

    return make


limit_option = click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="Maximum number of entries; 0 means all.",
)
"""The option of commands that list entries."""
