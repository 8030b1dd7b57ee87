"""The table of commands, and `run`: one command line and its exit code.

`version` and `completion` are in this module, because they need no other. Other commands and the clients load
on first use.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from typing import Final

import click

from tinker_sync.cli.failures import BROKEN_PIPE, DONE, FAILED, INTERRUPTED, CliError
from tinker_sync.cli.framework import Cli, Group, ReaderGone, command
from tinker_sync.cli.output import show_warnings

_HERE: Final = "tinker_sync.cli.commands."

COMPLETE_VARIABLE: Final = "_TINKER_SYNC_COMPLETE"
COMMANDS: Final = {
    "auth": (f"{_HERE}auth:auth", "Log in, log out, and see who you are."),
    "billing": (f"{_HERE}billing:billing", "See what was used, and what it costs."),
    "check": (f"{_HERE}diagnose:check", "Try everything once at a server, within a budget, and clean up."),
    "checkpoint": (f"{_HERE}checkpoint:checkpoint", "List, publish, keep, delete and fetch checkpoints."),
    "completion": (f"{__name__}:completion", "Print the completion script of a shell."),
    "demo": (f"{_HERE}demo:demo", "See a model learn, on this machine, in under a minute."),
    "doctor": (f"{_HERE}diagnose:doctor", "Find out what is wrong between here and the server."),
    "gateway": (f"{_HERE}gateway:gateway", "Serve chats over a model, and keep the exact tokens."),
    "model": (f"{_HERE}model:model", "See the models you can use."),
    "plot": (f"{_HERE}run:plot", "Draw the curves of recorded runs."),
    "probe": (f"{_HERE}diagnose:probe", "Find out which calls and features a server has."),
    "run": (f"{_HERE}run:run", "See training runs."),
    "sample": (f"{_HERE}sample:sample", "Sample continuations of a prompt."),
    "serve": (f"{_HERE}serve:serve", "Run a server on this machine."),
    "session": (f"{_HERE}session:session", "See what happened in sessions."),
    "version": (f"{__name__}:version", "Print the version."),
}


def root() -> Group:
    """Return the command `tinker-sync`.

    >>> root().name
    'tinker-sync'
    """
    group = Group(
        "tinker-sync",
        "Train, sample and look after what you have trained, on any server that speaks the Tinker protocol.",
        COMMANDS,
    )
    shows = click.Option(
        ["--version"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show_version,
        help="Print the version.",
    )
    group.params.append(shows)
    return group


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from tinker_sync._version import __version__

        click.echo(f"tinker-sync {__version__}")
        ctx.exit()


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors and warnings become messages on stderr."""
    with ExitStack() as standing_in:
        for name, redirect in (("stdout", redirect_stdout), ("stderr", redirect_stderr)):
            if getattr(sys, name) is None:  # the shell has closed it, as with >&-
                nothing = standing_in.enter_context(open(os.devnull, "w", encoding="utf-8"))
                standing_in.enter_context(redirect(nothing))
        with show_warnings():
            return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        outcome = root().main(
            args=None if arguments is None else list(arguments),
            prog_name="tinker-sync",
            standalone_mode=False,
            complete_var=COMPLETE_VARIABLE,
        )
        sys.stdout.flush()
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as misuse:
        misuse.show()
        return misuse.exit_code
    except (click.Abort, KeyboardInterrupt):
        sys.stderr.write("\n")
        return INTERRUPTED
    except (BrokenPipeError, ReaderGone):
        # The reader of the pipe has closed it. Without this, the interpreter would flush the rest at exit and
        # print another error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:  # noqa: BLE001  # no error may end as a bare traceback
        return _report(error)
    return outcome if isinstance(outcome, int) else DONE


def _report(error: Exception) -> int:
    from tinker_sync.cli.failures import explain

    failure = explain(error)
    for text in (f"Error: {failure.message}", failure.advice):
        if text:
            sys.stderr.write(f"{_wrap(text)}\n")
    unexpected = not isinstance(error, CliError) and failure.message.startswith("Unexpected")
    if unexpected and sys.stderr.isatty():  # the traceback is for a bug report
        import traceback

        traceback.print_exception(type(error), error, error.__traceback__)
    return failure.code or FAILED


def _wrap(text: str) -> str:
    """Return a text with its lines broken at blanks, to fit the terminal. For a pipe, return it unchanged."""
    if not sys.stderr.isatty():
        return text
    import shutil
    import textwrap

    width = shutil.get_terminal_size().columns
    wrap = textwrap.TextWrapper(width=width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrap.fill(line) for line in text.splitlines())


@command("version", example="tinker-sync version")
def version(cli: Cli) -> None:
    """Print the version.

    JSON also has the version of the protocol.
    """
    from tinker_sync._version import PROTOCOL_VERSION, __version__

    if cli.sink.for_people:
        cli.sink.raw(f"tinker-sync {__version__}")
        return
    cli.sink.item({"version": __version__, "protocol": PROTOCOL_VERSION})


@command("completion", example='eval "$(tinker-sync completion bash)"')
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(cli: Cli, shell: str) -> None:
    """Print the script with which a shell completes commands and options.

    Add the line of the example to the start-up file of your shell; for fish:
    tinker-sync completion fish > ~/.config/fish/completions/tinker-sync.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101  # one of the three choices
    cli.sink.raw(kind(root(), {}, "tinker-sync", COMPLETE_VARIABLE).source())
