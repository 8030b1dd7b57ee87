"""`tinker-sync run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

import click

from tinker_sync.cli import words
from tinker_sync.cli.data import plain
from tinker_sync.cli.lazy import Cli, Group, command

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


def _lora(run: TrainingRun) -> str:
    if not run.is_lora:
        return "no"
    return f"rank {run.lora_rank}" if run.lora_rank else "yes"


def _status(run: TrainingRun) -> str:
    return "failed" if run.corrupted else "ok"


COLUMNS: Final[dict[str, tuple[str, Callable[[TrainingRun, datetime], str]]]] = {
    "id": ("Run", lambda run, _: run.training_run_id),
    "model": ("Base model", lambda run, _: run.base_model),
    "owner": ("Owner", lambda run, _: run.model_owner),
    "lora": ("LoRA", lambda run, _: _lora(run)),
    "updated": ("Last used", lambda run, now: words.age(run.last_request_time, now)),
    "status": ("Status", lambda run, _: _status(run)),
    "checkpoint": (
        "Last checkpoint",
        lambda run, _: run.last_checkpoint.checkpoint_id if run.last_checkpoint else words.MISSING,
    ),
    "checkpoint_time": (
        "Saved",
        lambda run, now: words.age(run.last_checkpoint.time if run.last_checkpoint else None, now),
    ),
}
_LONG: Final = ("id", "owner", "checkpoint")
_USUAL: Final = ("id", "model", "lora", "updated", "status")


def _chosen(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Sequence[str]:
    names = [name.strip() for name in value.split(",")] if value else list(_USUAL)
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise click.BadParameter(f"no such column: {', '.join(unknown)}. There are {', '.join(COLUMNS)}.")
    return names


@command("list", example="tinker-sync run list --limit 50 --columns id,model,checkpoint")
@click.option("--limit", type=click.IntRange(min=0), default=20, show_default=True, help="How many; 0: all.")
@click.option(
    "-c",
    "--columns",
    callback=_chosen,
    metavar="NAMES",
    help=f"What to show, separated by commas: {', '.join(COLUMNS)}. Default: {','.join(_USUAL)}.",
)
def list_runs(cli: Cli, limit: int, columns: Sequence[str]) -> None:
    """List training runs, the newest first."""
    from tinker_sync.cli.pages import show_list
    from tinker_sync.cli.table import Column, Table

    now = words.utc_now()

    def table(runs: list[TrainingRun], note: str) -> Table:
        rows = [[COLUMNS[name][1](each, now) for name in columns] for each in runs]
        title = words.counted(len(runs), "training run") if runs else "no training runs"
        heads = [Column(COLUMNS[name][0], below=name in _LONG) for name in columns]
        return Table(heads, rows, title, note)

    with cli.rest() as rest:
        show_list(cli.sink, rest.iter_training_runs(limit=limit or None), "runs", table, limit=limit)


@command("info", example="tinker-sync run info RUN")
@click.argument("run_id")
def info(cli: Cli, run_id: str) -> None:
    """Show one run."""
    with cli.rest() as rest:
        found = rest.get_training_run(run_id).result()
    cli.sink.show(plain(found), _sheet(found))


def _sheet(run: TrainingRun) -> Table:
    from tinker_sync.cli.table import record

    now = words.utc_now()
    pairs = [
        ("Run", run.training_run_id),
        ("Base model", run.base_model),
        ("Owner", run.model_owner),
        ("LoRA", _lora(run)),
        ("Last used", words.age(run.last_request_time, now)),
        ("Status", _status(run)),
        *_checkpoint("Last training checkpoint", run.last_checkpoint, now),
        *_checkpoint("Last sampler checkpoint", run.last_sampler_checkpoint, now),
        *((f"  {key}", value) for key, value in (run.user_metadata or {}).items()),
    ]
    return record("", pairs)


def _checkpoint(title: str, saved: Checkpoint | None, now: datetime) -> list[tuple[str, str]]:
    if saved is None:
        return [(title, words.MISSING)]
    return [(title, saved.tinker_path), ("  saved", words.age(saved.time, now))]
