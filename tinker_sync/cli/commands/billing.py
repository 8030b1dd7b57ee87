"""`tinker-sync billing`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import click

from tinker_sync.cli import words
from tinker_sync.cli.lazy import Cli, Group, command

if TYPE_CHECKING:
    from tinker_sync.cli.output import Sink
    from tinker_sync.cli.table import Table
    from tinker_sync.types import BillingUsageEvent, CurrentCheckpointStorageUsageItem

_HERE: Final = "tinker_sync.cli.commands.billing:"
billing = Group(
    "billing",
    "See what was used, and what it costs.",
    {
        "usage": (f"{_HERE}usage", "Show what was used, hour by hour."),
        "checkpoint-storage": (f"{_HERE}checkpoint_storage", "Show what checkpoints take up now."),
    },
)
_CSV: Final = "Write the rows as CSV to PATH instead; - is stdout."


@command(
    "usage",
    example="tinker-sync billing usage 2026-07-13T00:00:00Z 2026-07-14T00:00:00Z\n"
    "tinker-sync billing usage 2026-07-13T00:00:00Z 2026-07-14T00:00:00Z --csv usage.csv",
)
@click.argument("starting_on")
@click.argument("ending_before")
@click.option("--csv", "csv_path", metavar="PATH", help=_CSV)
@click.option(
    "--sessions-csv",
    metavar="PATH",
    help="Write the sessions and their metadata as CSV to PATH; - is stdout.",
)
def usage(
    cli: Cli, starting_on: str, ending_before: str, csv_path: str | None, sessions_csv: str | None
) -> None:
    """Show what was used, hour by hour.

    STARTING_ON and ENDING_BEFORE are moments on the hour, at most 14 days apart, such as
    2026-07-13T00:00:00Z. There is a row for each hour, kind of use, model, session and user. Costs are
    estimates before credits; one that the service does not know yet is shown as "null". You need to be
    allowed to see the bill.
    """
    with cli.admin() as admin:
        bill = admin.get_billing_usage(starting_on, ending_before).result()
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
        _write_csv(cli.sink, [_flat(each.model_dump(mode="json")) for each in bill.data], csv_path)
    if csv_path is None and sessions_csv is None:
        cli.sink.show(bill.model_dump(mode="json"), _used(bill.data), items="data")


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**{name: value for name, value in row.items() if name != "event_info"}, **row["event_info"]}


def _used(events: Sequence[BillingUsageEvent]) -> Table:
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
            _hour(each.bucket_start),
            *_amount(each.event_info.model_dump()),
            each.base_model or words.MISSING,
            *_cost(each),
            each.user_name or each.user_id or words.MISSING,
            each.project_id or words.MISSING,
            each.session_id or "",
        )
        for each in events
    ]
    return Table(columns, rows, words.counted(len(rows), "row") if rows else "nothing was used")


def _hour(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M")


def _amount(info: Mapping[str, Any]) -> tuple[str, str]:
    kind = info["type"].replace("_", " ") + (" (cached)" if info.get("cached") else "")
    if "gigabyte_hours" in info:
        return kind, f"{info['gigabyte_hours']:,.2f} GB h"
    return kind, f"{info['token_count']:,}" if "token_count" in info else f"{info['count']:,}"


def _cost(event: BillingUsageEvent) -> tuple[str, str]:
    """Rate and cost; "null" is one that belongs here and is not known yet."""
    kind = event.event_info.type
    if kind == "checkpoint":
        return words.MISSING, words.MISSING
    storage = kind == "storage"
    rate = (
        event.effective_rate_usd_per_gigabyte_month
        if storage
        else event.effective_rate_usd_per_million_tokens
    )
    unit = "GB mo" if storage else "M"
    return ("null" if rate is None else f"${rate:g}/{unit}"), _usd(event.estimated_cost_usd)


def _usd(amount: float | None) -> str:
    if amount is None:
        return "null"
    # Small amounts are what most rows have; zero digits would say that they are free.
    return f"${amount:,.2f}" if amount >= 1 or amount == 0 else f"${amount:.6f}"


@command(
    "checkpoint-storage",
    example="tinker-sync billing checkpoint-storage --project-id PROJECT --csv storage.csv",
)
@click.option("--project-id", metavar="PROJECT", help="Only this project.")
@click.option("--csv", "csv_path", metavar="PATH", help=_CSV)
def checkpoint_storage(cli: Cli, project_id: str | None, csv_path: str | None) -> None:
    """Show what checkpoints take up now, and what that costs a month.

    Of the whole organization, by project and user. The figures are behind by an hour or two.
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
    cli.sink.show(data, Table(columns, [_stored(each) for each in stored.data], title, note), items="data")


def _stored(item: CurrentCheckpointStorageUsageItem) -> tuple[str, ...]:
    return (
        item.project_id or words.MISSING,
        item.user_email or item.user_name or item.org_user_urn or words.MISSING,
        f"{item.checkpoint_count:,}",
        words.size(item.size_bytes),
        _usd(item.estimated_monthly_cost_usd),
    )


def _write_csv(sink: Sink, rows: Sequence[Mapping[str, Any]], path: str) -> None:
    import csv
    import io
    import sys
    from pathlib import Path

    from tinker_sync.cli.output import whole_file

    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=_columns(rows), restval="")
    writer.writeheader()
    writer.writerows(rows)
    if path == "-":
        sys.stdout.write(text.getvalue())
        sys.stdout.flush()
        return
    with whole_file(Path(path)) as file:
        file.write(text.getvalue().encode())
    sink.say(f"wrote {words.counted(len(rows), 'row')} to {path}")


def _columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of all columns, in the order in which they first occur."""
    return list(dict.fromkeys(name for row in rows for name in row))
