"""`tinker-sync checkpoint`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from tinker_sync.cli import words
from tinker_sync.cli.data import plain
from tinker_sync.cli.failures import CliError
from tinker_sync.cli.lazy import Cli, Group, command

if TYPE_CHECKING:
    from tinker_sync.cli.table import Table
    from tinker_sync.types import Checkpoint

_HERE: Final = "tinker_sync.cli.commands.checkpoint:"
checkpoint = Group(
    "checkpoint",
    "List, publish, keep, delete and fetch checkpoints.",
    {
        "list": (f"{_HERE}list_checkpoints", "List checkpoints."),
        "info": (f"{_HERE}info", "Show one checkpoint."),
        "publish": (f"{_HERE}publish", "Let everybody read a checkpoint."),
        "unpublish": (f"{_HERE}unpublish", "Let nobody else read a checkpoint any more."),
        "set-ttl": (f"{_HERE}set_ttl", "Say how long a checkpoint is kept."),
        "download": ("tinker_sync.cli.commands.transfer:download", "Fetch the files of a checkpoint."),
        "push-hf": ("tinker_sync.cli.commands.transfer:push_hf", "Upload one to the Hugging Face hub."),
        "delete": ("tinker_sync.cli.commands.deletion:delete", "Delete checkpoints for good."),
    },
)
PATH: Final = "tinker://RUN/weights/NAME"


def path_argument(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Refuse what is no path of a checkpoint before anything is asked."""
    for path in (value,) if isinstance(value, str) else value:
        checked(path)
    return value


def checked(path: str) -> Any:
    """The parts of a path.

    Raises:
        CliError: it is none.
    """
    from tinker_sync.errors import InvalidInputError
    from tinker_sync.types import ParsedCheckpointTinkerPath

    try:
        return ParsedCheckpointTinkerPath.from_tinker_path(path)
    except InvalidInputError as error:
        raise CliError(f"not the path of a checkpoint: {error}", f"Such a path is {PATH}.") from error


@command("list", example="tinker-sync checkpoint list --run-id RUN")
@click.option("--run-id", metavar="RUN", help="Only those of this run; all of them then.")
@click.option("--limit", type=click.IntRange(min=0), default=20, show_default=True, help="How many; 0: all.")
def list_checkpoints(cli: Cli, run_id: str | None, limit: int) -> None:
    """List checkpoints: of all your runs, the newest first, or of one run."""
    from tinker_sync.cli.pages import show_list

    def table(found: list[Checkpoint], note: str) -> Table:
        title = words.counted(len(found), "checkpoint") if found else "no checkpoints"
        return listing(found, title + (f" of run {run_id}" if run_id else ""), note)

    with cli.rest() as rest:
        if run_id:
            entries, limit, more = rest.iter_checkpoints(run_id), 0, {"run_id": run_id}
        else:
            entries, more = rest.iter_user_checkpoints(limit=limit or None), {}
        show_list(cli.sink, entries, "checkpoints", table, limit=limit, more=more)


def listing(found: Sequence[Checkpoint], title: str, note: str = "") -> Table:
    """Checkpoints for people."""
    from tinker_sync.cli.table import Column, Table

    now = words.utc_now()
    rows = [
        (
            each.checkpoint_id.rpartition("/")[2],
            each.checkpoint_type,
            words.size(each.size_bytes),
            words.age(each.time, now),
            words.age(each.expires_at, now) if each.expires_at else "never",
            words.yes_no(each.public),
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
@click.argument("checkpoint_path", callback=path_argument)
def info(cli: Cli, checkpoint_path: str) -> None:
    """Show one checkpoint, and the LoRA rank of its run."""
    from tinker_sync.cli.table import record

    run_id = checked(checkpoint_path).training_run_id
    with cli.rest() as rest:
        listed, asked = rest.list_checkpoints(run_id), rest.get_training_run(run_id)
        found = next((c for c in listed.result().checkpoints if c.tinker_path == checkpoint_path), None)
        if found is None:
            raise CliError(
                f"there is no checkpoint {checkpoint_path}",
                f"See tinker-sync checkpoint list --run-id {run_id}.",
            )
        run = asked.result()
    now = words.utc_now()
    lora = (f"rank {run.lora_rank}" if run.lora_rank else "yes") if run.is_lora else "no"
    pairs = [
        ("Path", found.tinker_path),
        ("Kind", found.checkpoint_type),
        ("Size", words.size(found.size_bytes)),
        ("Public", words.yes_no(found.public)),
        ("Saved", words.age(found.time, now)),
        ("Expires", words.age(found.expires_at, now) if found.expires_at else "never"),
        ("Run", run_id),
        ("Base model", run.base_model),
        ("LoRA", lora),
        *((f"  {key}", value) for key, value in (found.user_metadata or {}).items()),
    ]
    data = {**plain(found), "is_lora": run.is_lora, "lora_rank": run.lora_rank}
    cli.sink.show(data, record("", pairs))


@command("publish", example="tinker-sync checkpoint publish tinker://RUN/weights/NAME")
@click.argument("checkpoint_path", callback=path_argument)
def publish(cli: Cli, checkpoint_path: str) -> None:
    """Let everybody read a checkpoint. Only its owner may."""
    with cli.rest() as rest:
        rest.publish_checkpoint_from_tinker_path(checkpoint_path).result()
    cli.sink.say(f"Everybody can read {checkpoint_path} now.")


@command("unpublish", example="tinker-sync checkpoint unpublish tinker://RUN/weights/NAME")
@click.argument("checkpoint_path", callback=path_argument)
def unpublish(cli: Cli, checkpoint_path: str) -> None:
    """Let nobody else read a checkpoint any more. Only its owner may."""
    with cli.rest() as rest:
        rest.unpublish_checkpoint_from_tinker_path(checkpoint_path).result()
    cli.sink.say(f"Only you can read {checkpoint_path} now.")


@command("set-ttl", example="tinker-sync checkpoint set-ttl tinker://RUN/weights/NAME --ttl 86400")
@click.argument("checkpoint_path", callback=path_argument)
@click.option("--ttl", type=click.IntRange(min=1), metavar="SECONDS", help="Delete it in so many seconds.")
@click.option("--remove", is_flag=True, help="Keep it for good.")
def set_ttl(cli: Cli, checkpoint_path: str, ttl: int | None, remove: bool) -> None:
    """Say how long a checkpoint is kept: give --ttl or --remove."""
    if (ttl is None) != remove:
        raise click.UsageError("give either --ttl SECONDS or --remove")
    with cli.rest() as rest:
        rest.set_checkpoint_ttl_from_tinker_path(checkpoint_path, ttl).result()
    if remove:
        cli.sink.say(f"{checkpoint_path} is kept for good.")
    else:
        cli.sink.say(f"{checkpoint_path} will be deleted in {words.duration(ttl or 0)}.")
