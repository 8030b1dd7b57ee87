"""`tinker-sync session`: sessions, and their timelines as files."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from tinker_sync.cli.failures import CliError
from tinker_sync.cli.formatting import MISSING, format_age, format_count, format_size
from tinker_sync.cli.framework import Cli, Group, command, limit_option

if TYPE_CHECKING:
    from tinker_sync.cli.output import Sink
    from tinker_sync.clients.rest import RestClient
    from tinker_sync.types import SessionSummary

_HERE: Final = "tinker_sync.cli.commands.session:"
_PAGE: Final = 200
_READ_S: Final = 60.0
_ADVICE: Final = "Its address is valid for about an hour; try again."
session = Group(
    "session",
    "See what happened in sessions.",
    {
        "list": (f"{_HERE}list_sessions", "List sessions."),
        "export-trace": (f"{_HERE}export_trace", "Fetch a session's timeline as a Perfetto trace."),
    },
)


@command("list", example="tinker-sync session list --limit 50")
@limit_option
def list_sessions(cli: Cli, limit: int) -> None:
    """List your sessions. JSON has their ids alone."""
    from tinker_sync.cli.table import Column, Table

    def table(found: list[str], _: str) -> Table:
        title = format_count(len(found), "session") if found else "no sessions"
        # The server does not report the number of sessions.
        note = "There may be more; --limit 0 shows all." if limit and len(found) >= limit else ""
        known = _describe(rest, found) if found and cli.sink.for_people else {}
        if not known:
            return Table([Column("Session")], [(each,) for each in found], title, note)
        columns = [Column("Session"), Column("Started"), Column("State"), Column("Name")]
        rows = [(each, *_make_cells(known.get(each), cli.now())) for each in found]
        return Table(columns, rows, title, note)

    with cli.rest() as rest:
        entries = rest.iter_sessions(limit=limit or None)
        cli.sink.show_list(entries, "sessions", table, limit=limit, data=lambda each: {"session_id": each})


def _describe(rest: RestClient, wanted: list[str]) -> dict[str, SessionSummary]:
    """Return what the server tells of these sessions by their ids: nothing, if it has no search."""
    import warnings

    from tinker_sync.errors import ExperimentalWarning, TinkerError
    from tinker_sync.types import SessionSearchRequest

    missing, found, cursor = set(wanted), {}, None
    # A search also finds sessions that are not in the list, so it may need a page more.
    for _ in range(len(wanted) // _PAGE + 2):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                page = rest.search_sessions(SessionSearchRequest(limit=_PAGE, cursor=cursor)).result()
        except TinkerError:
            break
        found.update({each.session_id: each for each in page.sessions})
        cursor = page.next_cursor
        missing -= found.keys()
        if cursor is None or not missing:
            break
    return found


def _make_cells(about: SessionSummary | None, now: datetime) -> tuple[str, str, str]:
    if about is None:
        return MISSING, MISSING, MISSING
    state = MISSING if about.status is None else about.status.type.replace("_", " ")
    return format_age(about.created_at, now), state, about.display_name or MISSING


@command(
    "export-trace",
    example="tinker-sync session export-trace SESSION --output timeline.pftrace\n"
    'curl -o timeline.pftrace "$(tinker-sync session export-trace SESSION --url-only)"',
)
@click.argument("session_id")
@click.option("-o", "--output", metavar="FILE", help="The file to write; default: SESSION.pftrace here.")
@click.option(
    "--url-only", is_flag=True, help="Print the address, which is valid for about an hour; fetch nothing."
)
def export_trace(cli: Cli, session_id: str, output: str | None, url_only: bool) -> None:
    """Fetch a session's timeline as a Perfetto trace. Open it at https://ui.perfetto.dev."""
    from tinker_sync.cli.table import record
    from tinker_sync.clients.rest import RestClient

    if cli.sink.for_people:
        cli.sink.say("The server writes the trace; this may take minutes.")
    with cli.service() as service:
        url = RestClient(service.holder).export_session_trace(session_id).result()
        if url_only:
            if cli.sink.for_people:
                cli.sink.raw(url)
            else:
                cli.sink.show_data({"session_id": session_id, "url": url})
            return
        # Without --output the id becomes the name of a file, and an id may have slashes.
        target = Path(output) if output else Path.cwd() / f"{session_id.replace('/', '_')}.pftrace"
        size = _fetch(cli.sink, url, target)
    data: dict[str, Any] = {"session_id": session_id, "destination": str(target)}
    if size:
        data["file_size_bytes"] = size
    pairs = [("Session", session_id), ("Saved to", str(target)), ("Size", format_size(size))]
    cli.sink.show(data, record("", pairs))


def _fetch(sink: Sink, url: str, target: Path) -> int:
    """Fetch the file at an address that grants access without the API key, and return its number of bytes.

    Raises:
        CliError: the file could not be fetched completely, or not be written.
    """
    import requests

    from tinker_sync.cli.output import write_whole

    done = 0
    # Without the password that ~/.netrc may have for this host, because the address itself grants access.
    options: Any = {"headers": {"Accept-Encoding": "identity"}, "auth": lambda request: request}
    try:
        with (
            requests.get(url, stream=True, timeout=_READ_S, **options) as answer,
            write_whole(target) as file,
            sink.progress("Fetching the trace", None, unit="bytes") as bar,
        ):
            if answer.status_code != 200:
                raise CliError(
                    f"the trace could not be fetched: the server answered {answer.status_code}", _ADVICE
                )
            length = int(answer.headers.get("content-length", "0")) or None
            for block in answer.iter_content(1 << 16):
                file.write(block)
                done += len(block)
                bar.update(done, length)
            if length is not None and done != length:
                raise CliError(f"the trace was cut short: {done} of {length} bytes", "Try again.")
    except requests.RequestException as error:  # its text has the address, which grants access
        raise CliError(f"the trace could not be fetched: {type(error).__name__}", _ADVICE) from None
    return done
