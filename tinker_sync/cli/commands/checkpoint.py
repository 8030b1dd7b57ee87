"""`tinker-sync checkpoint`: list, show, publish, keep and delete checkpoints.

Without `--yes`, `delete` first lists the checkpoints and asks the user. It lists every failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

import click

from tinker_sync.cli.failures import PARTIAL, CliError
from tinker_sync.cli.formatting import format_age, format_count, format_flag, format_size
from tinker_sync.cli.framework import Cli, Group, base_url_of, command, limit_option
from tinker_sync.cli.output import dump

if TYPE_CHECKING:
    from tinker_sync.cli.output import Sink
    from tinker_sync.cli.table import Table
    from tinker_sync.clients.rest import RestClient
    from tinker_sync.clients.rest.bulk import BulkProgress
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
        "delete": (f"{_HERE}delete", "Delete checkpoints permanently."),
    },
)
PATH: Final = "tinker://RUN/weights/NAME"


def check_paths(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Check the value of an argument: one checkpoint path or several. Return it unchanged. click calls this.

    Raises:
        CliError: a value is not the path of a checkpoint.
    """
    for path in (value,) if isinstance(value, str) else value:
        parse_path(path, base_url_of(ctx))
    return value


def parse_path(path: str, base_url: str | None) -> ParsedCheckpointTinkerPath:
    """Return the parts of a checkpoint path.

    Args:
        path: the path.
        base_url: the server; None: the configured one. Servers other than the hosted service also name a
            sampler checkpoint `tinker://RUN/NAME`.

    Raises:
        CliError: `path` is not the path of a checkpoint.
    """
    from tinker_sync.auth import find_access
    from tinker_sync.errors import InvalidInputError
    from tinker_sync.types import ParsedCheckpointTinkerPath

    bare = path.count("/") == 3 and not find_access(base_url=base_url).is_hosted
    try:
        return ParsedCheckpointTinkerPath.from_tinker_path(path, bare=bare)
    except InvalidInputError as error:
        raise CliError(f"not the path of a checkpoint: {error}", f"Such a path is {PATH}.") from error


@command("list", example="tinker-sync checkpoint list --run-id RUN")
@click.option("--run-id", metavar="RUN", help="All checkpoints of this run.")
@limit_option
def list_checkpoints(cli: Cli, run_id: str | None, limit: int) -> None:
    """List checkpoints: of all your runs, the newest first, or of one run."""

    def table(found: list[Checkpoint], note: str) -> Table:
        title = format_count(len(found), "checkpoint") if found else "no checkpoints"
        return _make_table(found, cli.now(), title + (f" of run {run_id}" if run_id else ""), note)

    with cli.rest() as rest:
        if run_id is not None:
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
    run_id = parsed.training_run_id
    names = {checkpoint_path, f"tinker://{run_id}/{parsed.checkpoint_id}"}
    with cli.rest() as rest:
        listed, future = rest.list_checkpoints(run_id), rest.get_training_run(run_id)
        for each in (listed, future):
            each.exception()  # the failure of the second would be logged as one that nobody has looked at
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
@click.option(
    "--ttl",
    type=click.IntRange(min=1),
    metavar="SECONDS",
    help="Delete the checkpoint after this many seconds.",
)
@click.option("--remove", is_flag=True, help="Remove the expiry, so that the checkpoint is kept.")
def set_ttl(cli: Cli, checkpoint_path: str, ttl: int | None, remove: bool) -> None:
    """Set how long a checkpoint is kept: give --ttl or --remove."""
    if (ttl is None) != remove:
        raise click.UsageError("give either --ttl SECONDS or --remove")
    with cli.rest() as rest:
        rest.set_checkpoint_ttl_from_tinker_path(checkpoint_path, ttl).result()
    if remove:
        cli.sink.say(f"{checkpoint_path} is kept forever.")
    else:
        from tinker_sync.insight import page

        cli.sink.say(f"{checkpoint_path} will be deleted in {page.seconds(ttl or 0)}.")


_KINDS: Final = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
    "training": "training",
    "sampler": "sampler",
    "external": "external",
}
# The question names this many checkpoints at most.
_NAMED: Final = 30


def _parse_time(ctx: click.Context, parameter: click.Parameter, value: str | None) -> datetime | None:
    """Parse a date, which stands for its midnight, or a time. A text without a zone is in UTC."""
    from tinker_sync.types._moment import parse_moment

    if value is None:
        return None
    try:
        moment = parse_moment(value.strip())
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(
            f"not a date: {value!r}. Write 2026-01-31 or 2026-01-31T12:00:00Z."
        ) from error
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


@command(
    "delete",
    example="tinker-sync checkpoint delete tinker://RUN/weights/NAME\n"
    "tinker-sync checkpoint delete --run-id RUN --type sampler --before 2026-01-31",
)
@click.argument("checkpoint_paths", nargs=-1, callback=check_paths)
@click.option("--run-id", metavar="RUN", help="All checkpoints of this run that match the options below.")
@click.option("--type", "kind", type=click.Choice(list(_KINDS)), help="Only checkpoints of this kind.")
@click.option(
    "--before", callback=_parse_time, metavar="DATE", help="Only checkpoints saved before this time (UTC)."
)
@click.option(
    "--after", callback=_parse_time, metavar="DATE", help="Only checkpoints saved after this time (UTC)."
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
def delete(
    cli: Cli,
    checkpoint_paths: Sequence[str],
    run_id: str | None,
    kind: str | None,
    before: datetime | None,
    after: datetime | None,
    yes: bool,
) -> None:
    """Delete checkpoints permanently, by path or by run.

    Without --yes, it lists the checkpoints and asks first. Exit code 3: some could not be deleted; each is
    listed.
    """
    if bool(checkpoint_paths) == bool(run_id):
        raise click.UsageError("give either paths or --run-id RUN")
    if (kind or before or after) and not run_id:
        raise click.UsageError("--type, --before and --after go with --run-id RUN")
    with cli.rest() as rest:
        if run_id:
            listed = rest.list_checkpoints(run_id).result().checkpoints
            found = [each for each in listed if _matches(each, kind, before, after)]
            paths = [each.tinker_path for each in found]
            shown = [_describe(each, cli.now()) for each in found]
            size = sum(each.size_bytes or 0 for each in found)
        else:
            paths = shown = list(dict.fromkeys(checkpoint_paths))
            size = 0
        if not paths and cli.sink.for_people:
            cli.sink.say(f"No checkpoint of run {run_id} matches; nothing was deleted.")
            return
        if paths and not yes and not _confirm(cli.sink, shown, size):
            cli.sink.say("Nothing was deleted.")
            return
        failed = _delete(cli.sink, rest, paths)
    _report(cli.sink, paths, failed)


def _matches(each: Checkpoint, kind: str | None, before: datetime | None, after: datetime | None) -> bool:
    moment = each.time if each.time.tzinfo else each.time.replace(tzinfo=timezone.utc)
    return (
        (kind is None or each.checkpoint_type == _KINDS[kind])
        and (before is None or moment < before)
        and (after is None or moment > after)
    )


def _describe(each: Checkpoint, now: datetime) -> str:
    about = f"{format_size(each.size_bytes)}, saved {format_age(each.time, now)}"
    return f"{each.tinker_path}\n    {about}"


def _confirm(sink: Sink, shown: Sequence[str], size: int) -> bool:
    what = format_count(len(shown), "checkpoint") + (f", {format_size(size)}" if size else "")
    lines = [f"  {each}" for each in shown[:_NAMED]]
    if len(shown) > _NAMED:
        lines.append(f"  and {len(shown) - _NAMED:,} more")
    sink.complain("\n".join([f"To be deleted permanently: {what}", *lines]))
    return sink.confirm("Delete them?" if len(shown) > 1 else "Delete it?")


def _delete(sink: Sink, rest: RestClient, paths: Sequence[str]) -> dict[str, str]:
    """Delete checkpoints in parallel; return the error texts of those that failed, by path."""
    done = 0
    with sink.progress("Deleting", len(paths), unit="checkpoints") as bar:

        def show(state: BulkProgress) -> None:
            nonlocal done
            done = state.done - state.failed
            bar.update(state.done)

        future = rest.delete_checkpoints(paths, progress=show)
        try:
            outcomes = future.result()
        except KeyboardInterrupt:
            future.cancel()
            sink.complain(f"\ninterrupted: {done} of {len(paths)} or a few more are deleted")
            raise
    return {each.tinker_path: str(each.error) for each in outcomes if not each.ok}


def _report(sink: Sink, paths: Sequence[str], failed: dict[str, str]) -> None:
    deleted = len(paths) - len(failed)
    listed = [{"tinker_path": path, "error": error} for path, error in failed.items()]
    if sink.for_people:
        sink.say(f"{format_count(deleted, 'checkpoint')} deleted")
        for path, error in failed.items():
            sink.complain(f"  not deleted: {path}: {error}")
    else:
        # One line in both forms, as in earlier versions and the reference client.
        sink.item({"deleted_count": deleted, "failed": listed})
    if failed:
        raise CliError(
            f"{format_count(len(failed), 'checkpoint')} of {len(paths)} could not be deleted", code=PARTIAL
        )
