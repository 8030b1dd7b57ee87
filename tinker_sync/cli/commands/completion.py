"""`tinker-sync completion`."""

from __future__ import annotations

import click

from tinker_sync.cli.lazy import Cli, command


@command("completion", example='eval "$(tinker-sync completion bash)"')
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(cli: Cli, shell: str) -> None:
    """Print what makes a shell complete commands and options.

    Put the line of the example into the file that your shell reads at its start; for fish:
    tinker-sync completion fish > ~/.config/fish/completions/tinker-sync.fish
    """
    from click.shell_completion import get_completion_class

    from tinker_sync.cli.main import COMPLETE_VARIABLE, root

    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101  # it is one of the three above
    cli.sink.raw(kind(root(), {}, "tinker-sync", COMPLETE_VARIABLE).source())
