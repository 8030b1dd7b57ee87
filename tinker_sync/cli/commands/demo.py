"""`tinker-sync demo`: runs `tinker_sync.examples.demo`, with its outcome as an exit code."""

from __future__ import annotations

import click

from tinker_sync.cli.failures import CliError
from tinker_sync.cli.framework import Cli, command


@command("demo", example="tinker-sync demo")
def demo(cli: Cli) -> None:
    """Fine-tune the built-in model, in a process that the demo kills halfway, and show the code.

    The demo takes about 15 seconds. It starts a server on this machine, and needs no key and no network.
    It fails if the model did not learn enough, or if the resumed training is not the same.
    """
    if cli.base_url not in (None, "local") or not cli.sink.for_people:
        raise click.UsageError(
            "the demo prints text, and runs on this machine; for another server, copy "
            "tinker_sync/examples/demo.py and change MODEL and base_url"
        )
    from tinker_sync.examples.demo import main

    if not main():
        raise CliError("the model did not learn enough, or lost a step; the output shows which")
