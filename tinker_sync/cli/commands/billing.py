"""`tinker-sync billing`: usage by the hour and checkpoint storage, as tables, JSON or CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, Final

import click

from tinker_sync.cli.failures import CliError
from tinker_sync.cli.formatting import MISSING, format_count, format_size
from tinker_sync.cli.framework import Cli, Group, command

if TYPE_CHECKING:
    from tinker_sync.cli.output import Sink
    from tinker_sync.cli.table import Table
    from tinker_sync.clients.rest import AdminClient
    from tinker_sync.types import BillingUsageEvent, BillingUsageResponse, CurrentCheckpointStorageUsageItem

_HERE: Final = "tinker_sync.cli.commands.billing:"
billing = Group(
    "billing",
    "See what was used, and what it costs.",
    {
        "usage": (f"{_HERE}usage", "Show what was used, hour by hour."),
        "checkpoint-storage": (f"{_HERE}checkpoint_storage", "Show the storage that checkpoints use now."),
    },
)
_CSV: Final = "Write the rows as CSV to PATH instead; - is stdout."


@command(
    "usage",
    example="tinker-sync billing usage\n"
    "tinker-sync billing usage 2026-07-13 2026-07-14T12:00:00Z --csv usage.csv",
)
@click.argument("starting_on", required=False)
@click.argument("ending_before", required=False)
@click.option("--csv", "csv_path", metavar="PATH", help=_CSV)
@click.option(
    "--sessions-csv",
    metavar="PATH",
    help="Write the sessions and their metadata as CSV to PATH; - is stdout.",
)
def usage(
    cli: Cli,
    starting_on: str | None,
    ending_before: str | None,
    csv_path: str | None,
    sessions_csv: str | None,
) -> None:
    """Show what was used, hour by hour; by default in this month.

    STARTING_ON and ENDING_BEFORE are dates or full hours in UTC, such as 2026-07-13 or 2026-07-13T05:00:00Z.
    There is a row for each hour, kind of use, model, session and user. Costs are estimates before credits;
    "null" is a cost that the service does not know yet. You need permission to see the bill.
    """
    now = cli.now()
    begin = _parse_hour("STARTING_ON", starting_on, now.replace(day=1, hour=0))
    end = _parse_hour("ENDING_BEFORE", ending_before, now + timedelta(hours=1))
    if begin >= end:
        window = f"{begin:%Y-%m-%d %H:%M} and {end:%Y-%m-%d %H:%M}"
        raise CliError(f"STARTING_ON must be before ENDING_BEFORE, got {window}")
    with cli.admin() as admin:
        bill = _fetch_usage(admin, begin, end)
    if sessions_csv is not None:
        import json

        sessions = [
            {
                "session_id": session_id,
                "user_metadata": None if each.user_metadata is None else json.dumps(each.user_metadata),
            }
            for session_id, each in bill.sessions.items()
        ]
        _write_csv(cli.sink, sessions, sessions_csv)
    if csv_path is not None:
        _write_csv(cli.sink, [_flatten(each.model_dump(mode="json")) for each in bill.data], csv_path)
    if csv_path is None and sessions_csv is None:
        cli.sink.show(bill.model_dump(mode="json"), _make_usage_table(bill.data), items="data")


def _parse_hour(name: str, text: str | None, default: datetime) -> datetime:
    """Return a full hour. A text without a zone is in UTC, and the default is rounded down."""
    from tinker_sync.types._moment import parse_moment

    if text is None:
        return default.replace(minute=0, second=0, microsecond=0)
    try:
        moment = parse_moment(text.strip())
    except (ValueError, OverflowError):
        moment = None
    if moment is None or moment.minute or moment.second or moment.microsecond:
        raise CliError(
            f"{name}: expected a date or a full hour, got {text!r}",
            "Write 2026-01-31 or 2026-01-31T12:00:00Z.",
        )
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


def _fetch_usage(admin: AdminClient, begin: datetime, end: datetime) -> BillingUsageResponse:
    """Return the usage of a window of any length. The service answers for 14 days at once."""
    first = begin
    bills = []
    while first < end:
        last = min(first + timedelta(days=14), end)
        bills.append(admin.get_billing_usage(first, last).result())
        first = last
    sessions = {name: each for bill in bills for name, each in bill.sessions.items()}
    data = [each for bill in bills for each in bill.data]
    return bills[-1].model_copy(update={"data": data, "sessions": sessions})


def _flatten(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**{name: value for name, value in row.items() if name != "event_info"}, **row["event_info"]}


def _make_usage_table(events: Sequence[BillingUsageEvent]) -> Table:
    from tinker_sync.cli.table import Column, Table

    columns = (
        Column("Hour (UTC)"),
        Column("What"),
        Column("Amount", right=True),
        Column("Model", below=True),
        Column("Rate", right=True),
        Column("Cost", right=True),
        Column("User", below=True),
        Column("Project", below=True),
        Column("Session", below=True),
    )
    rows = [
        (
            f"{each.bucket_start:%Y-%m-%d %H:%M}",
            *_format_amount(each.event_info.model_dump()),
            each.base_model or MISSING,
            *_format_cost(each),
            each.user_name or each.user_id or MISSING,
            each.project_id or MISSING,
            each.session_id or "",
        )
        for each in events
    ]
    return Table(columns, rows, format_count(len(rows), "row") if rows else "no usage in this period")


def _format_amount(info: Mapping[str, Any]) -> tuple[str, str]:
    kind = info["type"].replace("_", " ") + (" (cached)" if info.get("cached") else "")
    if "gigabyte_hours" in info:
        return kind, f"{info['gigabyte_hours']:,.2f} GB h"
    return kind, f"{info['token_count']:,}" if "token_count" in info else f"{info['count']:,}"


def _format_cost(event: BillingUsageEvent) -> tuple[str, str]:
    """Return the rate and the cost as text; a value that the service does not know yet becomes "null".

    An event of the kind "checkpoint" has neither; both texts are then "-".
    """
    kind = event.event_info.type
    if kind == "checkpoint":
        return MISSING, MISSING
    storage = kind == "storage"
    rate = (
        event.effective_rate_usd_per_gigabyte_month
        if storage
        else event.effective_rate_usd_per_million_tokens
    )
    unit = "GB mo" if storage else "M"
    return ("null" if rate is None else f"${rate:g}/{unit}"), _format_usd(event.estimated_cost_usd)


def _format_usd(amount: float | None) -> str:
    if amount is None:
        return "null"
    # Most amounts are small; with two digits they would look free.
    return f"${amount:,.2f}" if amount >= 1 or amount == 0 else f"${amount:.6f}"


@command(
    "checkpoint-storage",
    example="tinker-sync billing checkpoint-storage --project-id PROJECT --csv storage.csv",
)
@click.option("--project-id", metavar="PROJECT", help="Only checkpoints of this project.")
@click.option("--csv", "csv_path", metavar="PATH", help=_CSV)
def checkpoint_storage(cli: Cli, project_id: str | None, csv_path: str | None) -> None:
    """Show the storage that checkpoints use now, and its monthly cost.

    The table covers the whole organization, by project and user. Its figures are one or two hours old.
    """
    from tinker_sync.cli.table import Column, Table

    with cli.admin() as admin:
        stored = admin.get_current_checkpoint_storage_usage(project_id).result()
    rate = stored.effective_rate_usd_per_gigabyte_month
    data = stored.model_dump(mode="json")
    if csv_path is not None:
        rate_first = {"effective_rate_usd_per_gigabyte_month": rate}
        _write_csv(cli.sink, [{**rate_first, **each} for each in data["data"]], csv_path)
        return
    columns = (
        Column("Project"),
        Column("User"),
        Column("Checkpoints", right=True),
        Column("Size", right=True),
        Column("A month", right=True),
    )
    title = "checkpoints in storage" if stored.data else "no checkpoints in storage"
    note = "" if rate is None else f"at ${rate:g} for a gigabyte a month"
    cli.sink.show(
        data, Table(columns, [_make_storage_row(each) for each in stored.data], title, note), items="data"
    )


def _make_storage_row(item: CurrentCheckpointStorageUsageItem) -> tuple[str, ...]:
    return (
        item.project_id or MISSING,
        item.user_email or item.user_name or item.org_user_urn or MISSING,
        f"{item.checkpoint_count:,}",
        format_size(item.size_bytes),
        _format_usd(item.estimated_monthly_cost_usd),
    )


def _write_csv(sink: Sink, rows: Sequence[Mapping[str, Any]], path: str) -> None:
    import csv
    import io
    import sys
    from pathlib import Path

    from tinker_sync.cli.output import write_whole

    text = io.StringIO(newline="")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, fieldnames=columns, restval="")
    writer.writeheader()
    writer.writerows(rows)
    if path == "-":
        sys.stdout.write(text.getvalue())
        sys.stdout.flush()
        return
    with write_whole(Path(path)) as file:
        file.write(text.getvalue().encode())
    sink.say(f"wrote {format_count(len(rows), 'row')} to {path}")
