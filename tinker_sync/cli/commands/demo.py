"""`tinker-sync demo`: the demo of `tinker_sync.demo`, with its outcome as an exit code."""

from __future__ import annotations

import click

from tinker_sync.cli.failures import CliError
from tinker_sync.cli.framework import Cli, command


@command("demo", example="tinker-sync demo --png curves.png")
@click.option("--model", metavar="NAME", help="Fine-tune this model instead of the built-in one.")
@click.option("--seed", type=int, default=0, show_default=True, help="Equal seeds give equal curves.")
@click.option("--png", metavar="FILE", help="Also draw the curves into a file; needs matplotlib.")
@click.option("--supervised", type=click.IntRange(min=1), metavar="STEPS", help="Steps of the first lesson.")
@click.option("--reinforced", type=click.IntRange(min=1), metavar="STEPS", help="Steps of the second one.")
def demo(
    cli: Cli, model: str | None, seed: int, png: str | None, supervised: int | None, reinforced: int | None
) -> None:
    """Fine-tune the built-in model, by examples and then by reward, in under a minute.

    The demo starts a server on this machine and shows what the model learns, without a key and without a
    network. With --base-url it uses another server. With --quiet it prints only whether all checks passed,
    and with --format json the result as JSON. It fails if the model did not learn enough.
    """
    import io

    from attrs import asdict

    from tinker_sync.demo import Steps, run

    default = Steps()
    steps = Steps(supervised or default.supervised, reinforced or default.reinforced)
    hidden = io.StringIO() if cli.sink.quiet or not cli.sink.for_people else None
    result = run(cli.base_url, seed=seed, png=png, steps=steps, model=model, out=hidden)
    if not cli.sink.for_people:
        cli.sink.show_data({**asdict(result), "problems": result.problems})
    elif hidden is not None:
        cli.sink.raw("\n".join(f"FAILED: {problem}" for problem in result.problems) or "all checks passed")
    if result.exit_code:
        raise CliError(
            "the model did not learn enough; the output names what is missing", code=result.exit_code
        )
