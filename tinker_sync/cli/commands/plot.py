"""`tinker-sync plot`: curves of recorded runs."""

from __future__ import annotations

import click

from tinker_sync.cli.framework import Cli, command


@command("plot", example="tinker-sync plot runs/x runs/y --to curves.html")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--to", metavar="FILE", help="A .html file, or .png with matplotlib; default: in the first run."
)
def plot(cli: Cli, runs: tuple[str, ...], to: str | None) -> None:
    """Draw loss, reward, tokens and time per step of runs that ServiceClient.recorder wrote.

    Several runs are drawn into the same panels. The page of HTML needs no network and no other file.
    """
    from tinker_sync.loop.plot import draw

    path = draw(runs, to)
    if cli.sink.for_people:
        cli.sink.raw(str(path))
    else:
        cli.sink.item({"path": str(path)})
