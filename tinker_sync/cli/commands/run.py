"""`tinker-sync run`: training runs; `tinker-sync plot`: curves of recorded ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

import click

from tinker_sync.cli.formatting import MISSING, format_age, format_count
from tinker_sync.cli.framework import Cli, Group, command, limit_option
from tinker_sync.cli.output import dump

if TYPE_CHECKING:
    from tinker_sync.cli.table import Table
    from tinker_sync.types import Checkpoint, TrainingRun

_HERE: Final = "tinker_sync.cli.commands.run:"
run = Group(
    "run",
    "See training runs.",
    {
        "list": (f"{_HERE}list_runs", "List training runs, the newest first."),
        "info": (f"{_HERE}info", "Show one run."),
    },
)


def _format_lora(run: TrainingRun) -> str:
    if not run.is_lora:
        return "no"
    return f"rank {run.lora_rank}" if run.lora_rank else "yes"


def _format_status(run: TrainingRun) -> str:
    return "failed" if run.corrupted else "ok"


COLUMNS: Final[dict[str, tuple[str, Callable[[TrainingRun, datetime], str]]]] = {
    "id": ("Run", lambda run, _: run.training_run_id),
    "model": ("Base model", lambda run, _: run.base_model),
    "owner": ("Owner", lambda run, _: run.model_owner),
    "lora": ("LoRA", lambda run, _: _format_lora(run)),
    "updated": ("Last used", lambda run, now: format_age(run.last_request_time, now)),
    "status": ("Status", lambda run, _: _format_status(run)),
    "checkpoint": (
        "Last checkpoint",
        lambda run, _: run.last_checkpoint.checkpoint_id if run.last_checkpoint else MISSING,
    ),
    "checkpoint_time": (
        "Saved",
        lambda run, now: format_age(run.last_checkpoint.time if run.last_checkpoint else None, now),
    ),
}
_BELOW: Final = ("id", "owner", "checkpoint")
_DEFAULT: Final = ("id", "model", "lora", "updated", "status")


def _parse_columns(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Sequence[str]:
    names = [name.strip() for name in value.split(",")] if value else list(_DEFAULT)
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise click.BadParameter(f"no such column: {', '.join(unknown)}. There are {', '.join(COLUMNS)}.")
    return names


@command("list", example="tinker-sync run list --limit 50 --columns id,model,checkpoint")
@limit_option
@click.option(
    "-c",
    "--columns",
    callback=_parse_columns,
    metavar="NAMES",
    help=f"The columns to show, separated by commas: {', '.join(COLUMNS)}. Default: {','.join(_DEFAULT)}.",
)
def list_runs(cli: Cli, limit: int, columns: Sequence[str]) -> None:
    """List training runs, the newest first."""
    from tinker_sync.cli.table import Column, Table

    now = cli.now()

    def table(runs: list[TrainingRun], note: str) -> Table:
        rows = [[COLUMNS[name][1](each, now) for name in columns] for each in runs]
        title = format_count(len(runs), "training run") if runs else "no training runs"
        heads = [Column(COLUMNS[name][0], below=name in _BELOW) for name in columns]
        return Table(heads, rows, title, note)

    with cli.rest() as rest:
        cli.sink.show_list(rest.iter_training_runs(limit=limit or None), "runs", table, limit=limit)


@command("info", example="tinker-sync run info RUN")
@click.argument("run_id")
def info(cli: Cli, run_id: str) -> None:
    """Show one run."""
    with cli.rest() as rest:
        found = rest.get_training_run(run_id).result()
    cli.sink.show(dump(found), _make_record(found, cli.now()))


def _make_record(run: TrainingRun, now: datetime) -> Table:
    from tinker_sync.cli.table import record

    pairs = [
        ("Run", run.training_run_id),
        ("Base model", run.base_model),
        ("Owner", run.model_owner),
        ("LoRA", _format_lora(run)),
        ("Last used", format_age(run.last_request_time, now)),
        ("Status", _format_status(run)),
        *_make_pairs("Last training checkpoint", run.last_checkpoint, now),
        *_make_pairs("Last sampler checkpoint", run.last_sampler_checkpoint, now),
        *((f"  {key}", value) for key, value in (run.user_metadata or {}).items()),
    ]
    return record("", pairs)


def _make_pairs(title: str, saved: Checkpoint | None, now: datetime) -> list[tuple[str, str]]:
    if saved is None:
        return [(title, MISSING)]
    return [(title, saved.tinker_path), ("  saved", format_age(saved.time, now))]


@command("plot", example="tinker-sync plot runs/x runs/y --to curves.html")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--to", metavar="FILE", help="A .html file, or .png with matplotlib; default: in the first run."
)
def plot(cli: Cli, runs: tuple[str, ...], to: str | None) -> None:
    """Draw loss, reward, tokens, time and all other numbers of each step.

    ServiceClient.recorder writes such runs. Several runs are drawn into the same panels of one file. An HTML
    file needs no network and no other file.
    """
    from tinker_sync.loop.plot import draw

    path = draw(runs, to)
    if cli.sink.for_people:
        cli.sink.raw(str(path))
    else:
        cli.sink.item({"path": str(path)})
