"""`tinker-sync checkpoint`: list, show, publish and keep checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import click

from tinker_sync.cli.failures import CliError
from tinker_sync.cli.formatting import format_age, format_count, format_duration, format_flag, format_size
from tinker_sync.cli.framework import Cli, Group, base_url_of, command
from tinker_sync.cli.output import dump

if TYPE_CHECKING:
    from tinker_sync.cli.table import Table
    from tinker_sync.types import Checkpoint, ParsedCheckpointTinkerPath

_HERE: Final = "tinker_sync.cli.commands.checkpoint:"
checkpoint = Group(
    "checkpoint",
    "List, publish, keep, delete and fetch checkpoints.",
    {
        "list": (f"{_HERE}list_checkpoints", "List checkpoints."),
        "info": (f"{_HERE}info", "Show one checkpoint."),
        "publish": (f"{_HERE}publish", "Make a checkpoint readable for all users."),
        "unpublish": (f"{_HERE}unpublish", "Make a checkpoint private again."),
        "set-ttl": (f"{_HERE}set_ttl", "Set how long a checkpoint is kept."),
        "download": ("tinker_sync.cli.commands.transfer:download", "Fetch the files of a checkpoint."),
        "push-hf": ("tinker_sync.cli.commands.transfer:push_hf", "Upload one to the Hugging Face hub."),
        "delete": ("tinker_sync.cli.commands.deletion:delete", "Delete checkpoints permanently."),
    },
)
PATH: Final = "tinker://RUN/weights/NAME"


def check_paths(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Return the argument if it is a checkpoint path or several; else raise CliError, before any request."""
    for path in (value,) if isinstance(value, str) else value:
        parse_path(path, base_url_of(ctx))
    return value


def parse_path(path: str, base_url: str | None) -> ParsedCheckpointTinkerPath:
    """Return the parts of a checkpoint path.

    Args:
        path: the path.
        base_url: the server; open servers also name a sampler checkpoint `tinker://RUN/NAME`.

    Raises:
        CliError: the text is not such a path.
    """
    from tinker_sync.clients.rest._base import parse_checkpoint_path
    from tinker_sync.config import Settings
    from tinker_sync.errors import InvalidInputError

    try:
        return parse_checkpoint_path(path, bare=False)
    except InvalidInputError as error:
        if not Settings.resolve(base_url=base_url).is_vendor_host:
            with suppress(InvalidInputError):
                return parse_checkpoint_path(path, bare=True)
        raise CliError(f"not the path of a checkpoint: {error}", f"Such a path is {PATH}.") from error


@command("list", example="tinker-sync checkpoint list --run-id RUN")
@click.option("--run-id", metavar="RUN", help="All checkpoints of this run.")
@click.option("--limit", type=click.IntRange(min=0), default=20, show_default=True, help="How many; 0: all.")
def list_checkpoints(cli: Cli, run_id: str | None, limit: int) -> None:
    """List checkpoints: of all your runs, the newest first, or of one run."""

    def table(found: list[Checkpoint], note: str) -> Table:
        title = format_count(len(found), "checkpoint") if found else "no checkpoints"
        return _make_table(found, cli.now(), title + (f" of run {run_id}" if run_id else ""), note)

    with cli.rest() as rest:
        if run_id:
            entries, limit, more = rest.iter_checkpoints(run_id), 0, {"run_id": run_id}
        else:
            entries, more = rest.iter_user_checkpoints(limit=limit or None), {}
        cli.sink.show_list(entries, "checkpoints", table, limit=limit, more=more)


def _make_table(found: Sequence[Checkpoint], now: datetime, title: str, note: str) -> Table:
    from tinker_sync.cli.table import Column, Table

    rows = [
        (
            each.checkpoint_id.rpartition("/")[2],
            each.checkpoint_type,
            format_size(each.size_bytes),
            format_age(each.time, now),
            format_age(each.expires_at, now) if each.expires_at else "never",
            format_flag(each.public),
            each.tinker_path,
        )
        for each in found
    ]
    columns = (
        Column("Name"),
        Column("Kind"),
        Column("Size", right=True),
        Column("Saved"),
        Column("Expires"),
        Column("Public"),
        Column("Path", below=True),
    )
    return Table(columns, rows, title, note)


@command("info", example="tinker-sync checkpoint info tinker://RUN/weights/NAME")
@click.argument("checkpoint_path", callback=check_paths)
def info(cli: Cli, checkpoint_path: str) -> None:
    """Show one checkpoint, and the LoRA rank of its run."""
    from tinker_sync.cli.table import record

    parsed = parse_path(checkpoint_path, cli.base_url)
    run_id, names = (
        parsed.training_run_id,
        {checkpoint_path, f"tinker://{parsed.training_run_id}/{parsed.checkpoint_id}"},
    )
    with cli.rest() as rest:
        listed, future = rest.list_checkpoints(run_id), rest.get_training_run(run_id)
        found = next((c for c in listed.result().checkpoints if c.tinker_path in names), None)
        if found is None:
            raise CliError(
                f"there is no checkpoint {checkpoint_path}",
                f"See tinker-sync checkpoint list --run-id {run_id}.",
            )
        run = future.result()
    now = cli.now()
    lora = (f"rank {run.lora_rank}" if run.lora_rank else "yes") if run.is_lora else "no"
    pairs = [
        ("Path", found.tinker_path),
        ("Kind", found.checkpoint_type),
        ("Size", format_size(found.size_bytes)),
        ("Public", format_flag(found.public)),
        ("Saved", format_age(found.time, now)),
        ("Expires", format_age(found.expires_at, now) if found.expires_at else "never"),
        ("Run", run_id),
        ("Base model", run.base_model),
        ("LoRA", lora),
        *((f"  {key}", value) for key, value in (found.user_metadata or {}).items()),
    ]
    data = {**dump(found), "is_lora": run.is_lora, "lora_rank": run.lora_rank}
    cli.sink.show(data, record("", pairs))


@command("publish", example="tinker-sync checkpoint publish tinker://RUN/weights/NAME")
@click.argument("checkpoint_path", callback=check_paths)
def publish(cli: Cli, checkpoint_path: str) -> None:
    """Make a checkpoint readable for all users. Only its owner may do this."""
    with cli.rest() as rest:
        rest.publish_checkpoint_from_tinker_path(checkpoint_path).result()
    cli.sink.say(f"All users can read {checkpoint_path} now.")


@command("unpublish", example="tinker-sync checkpoint unpublish tinker://RUN/weights/NAME")
@click.argument("checkpoint_path", callback=check_paths)
def unpublish(cli: Cli, checkpoint_path: str) -> None:
    """Make a checkpoint private again. Only its owner may do this."""
    with cli.rest() as rest:
        rest.unpublish_checkpoint_from_tinker_path(checkpoint_path).result()
    cli.sink.say(f"Only you can read {checkpoint_path} now.")


@command("set-ttl", example="tinker-sync checkpoint set-ttl tinker://RUN/weights/NAME --ttl 86400")
@click.argument("checkpoint_path", callback=check_paths)
@click.option("--ttl", type=click.IntRange(min=1), metavar="SECONDS", help="Delete it after this time.")
@click.option("--remove", is_flag=True, help="Keep it forever.")
def set_ttl(cli: Cli, checkpoint_path: str, ttl: int | None, remove: bool) -> None:
    """Set how long a checkpoint is kept: give --ttl or --remove."""
    if (ttl is None) != remove:
        raise click.UsageError("give either --ttl SECONDS or --remove")
    with cli.rest() as rest:
        rest.set_checkpoint_ttl_from_tinker_path(checkpoint_path, ttl).result()
    if remove:
        cli.sink.say(f"{checkpoint_path} is kept forever.")
    else:
        cli.sink.say(f"{checkpoint_path} will be deleted in {format_duration(ttl or 0)}.")
