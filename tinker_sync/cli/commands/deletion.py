"""`tinker-sync checkpoint delete`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final

import click

from tinker_sync.cli import words
from tinker_sync.cli.commands.checkpoint import path_argument
from tinker_sync.cli.failures import PARTIAL, CliError
from tinker_sync.cli.lazy import Cli, command

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
# So many are named in the question; of more, the number.
_NAMED: Final = 30


def _moment(ctx: click.Context, parameter: click.Parameter, value: str | None) -> datetime | None:
    """A date or a moment; without a zone it is UTC, and a date is its midnight."""
    from tinker_sync.types._moment import parse_moment

    if value is None:
        return None
    try:
        moment = parse_moment(value.strip())
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(f"no date: {value!r}. Write 2026-01-31 or 2026-01-31T12:00:00Z.") from error
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


@command(
    "delete",
    example="tinker-sync checkpoint delete tinker://RUN/weights/NAME\n"
    "tinker-sync checkpoint delete --run-id RUN --type sampler --before 2026-01-31",
)
@click.argument("checkpoint_paths", nargs=-1, callback=path_argument)
@click.option("--run-id", metavar="RUN", help="All checkpoints of this run that fit the options below.")
@click.option("--type", "kind", type=click.Choice(list(_KINDS)), help="Only of this kind.")
@click.option("--before", callback=_moment, metavar="DATE", help="Only those saved before; UTC.")
@click.option("--after", callback=_moment, metavar="DATE", help="Only those saved after; UTC.")
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
    """Delete checkpoints for good: those at the paths, or those of a run.

    Names what goes and asks first. Exit code 3 says that some could not be deleted; each is listed.
    """
    if bool(checkpoint_paths) == bool(run_id):
        raise click.UsageError("give either paths or --run-id RUN")
    if (kind or before or after) and not run_id:
        raise click.UsageError("--type, --before and --after go with --run-id RUN")
    with cli.rest() as rest:
        if run_id:
            listed = rest.list_checkpoints(run_id).result().checkpoints
            found = [each for each in listed if _fits(each, kind, before, after)]
            paths = [each.tinker_path for each in found]
            shown = [_described(each) for each in found]
            size = sum(each.size_bytes or 0 for each in found)
        else:
            paths = shown = list(dict.fromkeys(checkpoint_paths))
            size = 0
        if not paths:
            cli.sink.say(f"No checkpoint of run {run_id} fits.")
        elif not yes and not _agreed(cli.sink, shown, size):
            cli.sink.say("Nothing was deleted.")
            return
        failed = _delete(cli.sink, rest, paths)
    _report(cli.sink, paths, failed)


def _fits(each: Checkpoint, kind: str | None, before: datetime | None, after: datetime | None) -> bool:
    moment = each.time if each.time.tzinfo else each.time.replace(tzinfo=timezone.utc)
    return (
        (kind is None or each.checkpoint_type == _KINDS[kind])
        and (before is None or moment < before)
        and (after is None or moment > after)
    )


def _described(each: Checkpoint) -> str:
    about = f"{words.size(each.size_bytes)}, saved {words.age(each.time, words.utc_now())}"
    return f"{each.tinker_path}\n    {about}"


def _agreed(sink: Sink, shown: Sequence[str], size: int) -> bool:
    what = words.counted(len(shown), "checkpoint") + (f", {words.size(size)}" if size else "")
    lines = [f"  {each}" for each in shown[:_NAMED]]
    if len(shown) > _NAMED:
        lines.append(f"  and {len(shown) - _NAMED:,} more")
    sink.complain("\n".join([f"To be deleted for good: {what}", *lines]))
    return sink.confirm("Delete them?" if len(shown) > 1 else "Delete it?")


def _delete(sink: Sink, rest: RestClient, paths: Sequence[str]) -> dict[str, str]:
    """Delete side by side; give what failed, and why."""
    done = 0
    with sink.progress("Deleting", len(paths), unit="checkpoints") as bar:

        def tell(state: BulkProgress) -> None:
            nonlocal done
            done = state.done - state.failed
            bar.update(state.done)

        future = rest.delete_checkpoints(paths, progress=tell)
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
        sink.say(f"{words.counted(deleted, 'checkpoint')} deleted")
        for path, error in failed.items():
            sink.complain(f"  not deleted: {path}: {error}")
    else:
        # One line, also of the indented kind: it always was.
        sink.item({"deleted_count": deleted, "failed": listed})
    if failed:
        raise CliError(
            f"{words.counted(len(failed), 'checkpoint')} of {len(paths)} could not be deleted", code=PARTIAL
        )
