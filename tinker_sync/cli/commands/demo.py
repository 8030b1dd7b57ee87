"""`tinker-sync demo`."""

from __future__ import annotations

import click

from tinker_sync.cli.failures import CliError
from tinker_sync.cli.lazy import Cli, command


@command("demo", example="tinker-sync demo --png curves.png")
@click.option("--model", metavar="NAME", help="What to fine-tune instead of the built-in model.")
@click.option("--seed", type=int, default=0, show_default=True, help="Equal seeds give equal curves.")
@click.option("--png", metavar="FILE", help="Also draw the curves into a file.")
@click.option("--supervised", type=click.IntRange(min=1), metavar="STEPS", help="Steps of the first lesson.")
@click.option("--reinforced", type=click.IntRange(min=1), metavar="STEPS", help="Steps of the second one.")
def demo(
    cli: Cli, model: str | None, seed: int, png: str | None, supervised: int | None, reinforced: int | None
) -> None:
    """Fine-tune the built-in model, by examples and then by reward, in under a minute.

    Starts a server on this machine and shows what is learnt; nothing else is needed, no key and no network.
    With --base-url the same happens on another server. Fails if the model did not learn what it should.
    """
    from tinker_sync.demo import Steps, run

    usual = Steps()
    steps = Steps(supervised=supervised or usual.supervised, reinforced=reinforced or usual.reinforced)
    result = run(cli.base_url, seed=seed, png=png, steps=steps, model=model)
    if result.exit_code:
        raise CliError("the model did not learn what it should", code=result.exit_code)
