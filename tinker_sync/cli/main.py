"""The commands, and what their outcome is as an exit code. Loads no command and no client by itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

import click

from tinker_sync.cli.failures import BROKEN_PIPE, DONE, FAILED, INTERRUPTED, CliError
from tinker_sync.cli.lazy import Group

_HERE: Final = "tinker_sync.cli.commands."

COMPLETE_VARIABLE: Final = "_TINKER_SYNC_COMPLETE"
COMMANDS: Final = {
    "auth": (f"{_HERE}auth:auth", "Log in, log out, and see who you are."),
    "billing": (f"{_HERE}billing:billing", "See what was used, and what it costs."),
    "checkpoint": (f"{_HERE}checkpoint:checkpoint", "List, publish, keep, delete and fetch checkpoints."),
    "completion": (f"{_HERE}completion:completion", "Print what makes a shell complete commands."),
    "demo": (f"{_HERE}demo:demo", "See a model learn, on this machine, in under a minute."),
    "doctor": (f"{_HERE}diagnose:doctor", "Find out what is wrong between here and the server."),
    "model": (f"{_HERE}model:model", "See the models you can use."),
    "probe": (f"{_HERE}diagnose:probe", "Ask a server what it speaks."),
    "run": (f"{_HERE}run:run", "See training runs."),
    "sample": (f"{_HERE}sample:sample", "Sample continuations of a prompt."),
    "serve": (f"{_HERE}serve:serve", "Run a server on this machine."),
    "session": (f"{_HERE}session:session", "See what happened in sessions."),
    "version": (f"{_HERE}version:version", "Print the version."),
}


def root() -> Group:
    """The command `tinker-sync`.

    >>> root().name
    'tinker-sync'
    """
    return Group(
        "tinker-sync",
        "Train, sample and look after what you have trained, on any server that speaks the Tinker protocol.",
        COMMANDS,
    )


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code. Whatever goes wrong is said on stderr."""
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
    except BrokenPipeError:
        # Nobody reads any more; what is still buffered must not be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:  # noqa: BLE001  # nothing may end as a traceback
        return _say(error)
    return outcome if isinstance(outcome, int) else DONE


def _say(error: Exception) -> int:
    from tinker_sync.cli.failures import explained

    told = explained(error)
    for text in (f"Error: {told.message}", told.advice):
        if text:
            sys.stderr.write(f"{_fitted(text)}\n")
    if not isinstance(error, CliError) and told.message.startswith("Unexpected"):
        _show_where(error)
    return told.code or FAILED


def _fitted(text: str) -> str:
    """Broken at blanks where a terminal ends; a pipe gets lines as they are."""
    if not sys.stderr.isatty():
        return text
    import shutil
    import textwrap

    width = shutil.get_terminal_size().columns
    wrap = textwrap.TextWrapper(width=width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrap.fill(line) for line in text.splitlines())


def _show_where(error: Exception) -> None:
    """What nobody expected is for a report; a terminal gets its traceback."""
    if sys.stderr.isatty():
        import traceback

        traceback.print_exception(type(error), error, error.__traceback__)
