"""`tinker-sync session`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from tinker_sync.cli import words
from tinker_sync.cli.failures import CliError
from tinker_sync.cli.lazy import Cli, Group, command

_HERE: Final = "tinker_sync.cli.commands.session:"
session = Group(
    "session",
    "See what happened in sessions.",
    {
        "list": (f"{_HERE}list_sessions", "List sessions."),
        "export-trace": (f"{_HERE}export_trace", "Fetch a session's timeline as a Perfetto trace."),
    },
)


@command("list", example="tinker-sync session list --limit 50")
@click.option("--limit", type=click.IntRange(min=0), default=20, show_default=True, help="How many; 0: all.")
def list_sessions(cli: Cli, limit: int) -> None:
    """List your sessions, by their ids."""
    from tinker_sync.cli.pages import show_list
    from tinker_sync.cli.table import Column, Table

    def table(found: list[str], _: str) -> Table:
        title = words.counted(len(found), "session") if found else "no sessions"
        # The server does not say how many there are.
        note = "There may be more; --limit 0 shows all." if limit and len(found) >= limit else ""
        return Table([Column("Session")], [(each,) for each in found], title, note)

    with cli.rest() as rest:
        entries = rest.iter_sessions(limit=limit or None)
        show_list(cli.sink, entries, "sessions", table, limit=limit, data=lambda each: {"session_id": each})


@command(
    "export-trace",
    example="tinker-sync session export-trace SESSION --output timeline.pftrace\n"
    'curl -o timeline.pftrace "$(tinker-sync session export-trace SESSION --url-only)"',
)
@click.argument("session_id")
@click.option("-o", "--output", metavar="FILE", help="Where to put it; default: SESSION.pftrace here.")
@click.option("--url-only", is_flag=True, help="Print the address, good for about an hour; fetch nothing.")
def export_trace(cli: Cli, session_id: str, output: str | None, url_only: bool) -> None:
    """Fetch a session's timeline as a Perfetto trace, to be opened at https://ui.perfetto.dev."""
    from tinker_sync.cli.table import record

    if cli.sink.for_people:
        cli.sink.say("The server writes the trace; this may take minutes.")
    with cli.rest() as rest:
        url = rest.export_session_trace(session_id).result()
    if url_only:
        if cli.sink.for_people:
            cli.sink.raw(url)
        else:
            cli.sink.show_data({"session_id": session_id, "url": url})
        return
    # Without an output the id is the name of a file, and servers may have slashes in ids.
    target = Path(output) if output else Path.cwd() / f"{session_id.replace('/', '_')}.pftrace"
    size = _fetch(cli, url, target)
    data: dict[str, Any] = {"session_id": session_id, "destination": str(target)}
    if size:
        data["file_size_bytes"] = size
    pairs = [("Session", session_id), ("Saved to", str(target)), ("Size", words.size(size))]
    cli.sink.show(data, record("", pairs))


def _fetch(cli: Cli, url: str, target: Path) -> int:
    """Fetch a file from a signed address, which needs no key and must get none."""
    import requests

    from tinker_sync.cli.output import whole_file

    done = 0
    try:
        with (
            requests.get(url, stream=True, timeout=60) as reply,
            whole_file(target) as file,
            cli.sink.progress("Fetching the trace", None, unit="bytes") as bar,
        ):
            reply.raise_for_status()
            said = reply.headers.get("content-length")
            for block in reply.iter_content(1 << 16):
                file.write(block)
                done += len(block)
                bar.update(done, int(said) if said else None)
            if said and "content-encoding" not in reply.headers and done != int(said):
                raise CliError(f"the trace was cut short: {done} of {said} bytes", "Try again.")
    except requests.RequestException as error:
        status = getattr(error.response, "status_code", None)
        why = f"the server answered {status}" if status else type(error).__name__
        raise CliError(
            f"the trace could not be fetched: {why}", "Its address is good for about an hour; try again."
        ) from None
    return done
