"""`tinker-sync completion`: the completion script of a shell."""

from __future__ import annotations

import click

from tinker_sync.cli.framework import Cli, command


@command("completion", example='eval "$(tinker-sync completion bash)"')
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(cli: Cli, shell: str) -> None:
    """Print the script with which a shell completes commands and options.

    Add the line of the example to the start-up file of your shell; for fish:
    tinker-sync completion fish > ~/.config/fish/completions/tinker-sync.fish
    """
    from click.shell_completion import get_completion_class

    from tinker_sync.cli.main import COMPLETE_VARIABLE, root

    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101  # one of the three choices
    cli.sink.raw(kind(root(), {}, "tinker-sync", COMPLETE_VARIABLE).source())
