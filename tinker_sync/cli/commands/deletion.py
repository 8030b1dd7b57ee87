"""`tinker-sync checkpoint delete`: name the checkpoints, ask, delete, and list every failure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final

import click

from tinker_sync.cli.commands.checkpoint import check_paths
from tinker_sync.cli.failures import PARTIAL, CliError
from tinker_sync.cli.formatting import format_age, format_count, format_size
from tinker_sync.cli.framework import Cli, command

if TYPE_CHECKING:
    from tinker_sync.cli.output import Sink
    from tinker_sync.clients.rest import RestClient
    from tinker_sync.clients.rest.bulk import BulkProgress
    from tinker_sync.types import Checkpoint

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
@click.option("--type", "kind", type=click.Choice(list(_KINDS)), help="Only of this kind.")
@click.option("--before", callback=_parse_time, metavar="DATE", help="Only those saved before; UTC.")
@click.option("--after", callback=_parse_time, metavar="DATE", help="Only those saved after; UTC.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
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

    It lists the checkpoints and asks first. Exit code 3: some could not be deleted; each is listed.
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
        if not paths:
            cli.sink.say(f"No checkpoint of run {run_id} matches.")
        elif not yes and not _confirm(cli.sink, shown, size):
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
