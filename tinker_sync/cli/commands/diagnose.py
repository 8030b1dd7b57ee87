"""`tinker-sync probe`, `doctor` and `check`: reports on a server as tables."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from attrs import asdict

from tinker_sync.cli.failures import CliError
from tinker_sync.cli.framework import Cli, command

if TYPE_CHECKING:
    from tinker_sync.cli.table import Table
    from tinker_sync.insight import CallFound, ProbeReport
    from tinker_sync.testing import CheckReport

_MARKS: Final = {"ok": "ok", "warning": "!", "failure": "FAIL", "skipped": "-"}


@command("probe", example="tinker-sync probe http://localhost:8000")
@click.argument("url", required=False)
def probe(cli: Cli, url: str | None) -> None:
    """Print the calls and features that a server has.

    URL is the server; default: the one in use. This is harmless: it creates, changes and bills nothing.
    """
    from tinker_sync.insight import probe as run_probe

    report = run_probe(url or cli.base_url)
    if not cli.sink.for_people:
        cli.sink.show_data(asdict(report))
        return
    for table in (_make_facts(report), _make_calls(report), _make_features(report)):
        cli.sink.show({}, table)
        cli.sink.raw("")


def _make_facts(report: ProbeReport) -> Table:
    from tinker_sync.cli.table import record

    flags = [f"{name}={value}" for name, value in report.flags.items()]
    pairs = [
        ("Server", report.base_url),
        ("Protocol", f"{report.version} or {'newer' if report.client_config else 'older'}"),
        ("Bodies", report.bodies),
        ("Tokens", "keys are exchanged for tokens" if report.tokens else "keys are used as they are"),
        ("Settings", ", ".join(flags) or "as usual"),
    ]
    return record("", pairs)


def _make_calls(report: ProbeReport) -> Table:
    from tinker_sync.cli.table import Column, Table

    rows = [(call.name, call.method, call.there, _explain_call(call)) for call in report.calls]
    found = sum(1 for call in report.calls if call.there == "yes")
    title = f"{found} of {len(report.calls)} calls"
    return Table((Column("Call"), Column("Method"), Column("There"), Column("Note")), rows, title)


def _explain_call(call: CallFound) -> str:
    if call.there == "unknown":
        return (
            f"its answer ({call.status}) is not conclusive"
            if call.status
            else "cannot be tried without doing it"
        )
    if call.there == "no":
        return "of older servers" if call.legacy else "" if not call.expected else "expected of this version"
    return "of older servers" if call.legacy else "" if call.expected else "newer than its version"


def _make_features(report: ProbeReport) -> Table:
    from tinker_sync.cli.formatting import format_flag
    from tinker_sync.cli.table import Column, Table

    rows = [(each.name, each.since, format_flag(each.known)) for each in report.features]
    return Table(
        (Column("Feature"), Column("Since"), Column("Known")),
        rows,
        "Features of requests",
        note="The client refuses the other features, because servers ignore them silently.",
    )


@command("doctor", example="tinker-sync doctor")
def doctor(cli: Cli) -> None:
    """Check the key, the address, the proxy, the clocks, the versions and the connection to the server.

    For each problem the command prints what to do. It fails if a check fails; a warning is not a failure.
    """
    from tinker_sync.cli.table import Column, Table
    from tinker_sync.insight import examine

    findings = examine(cli.base_url)
    rows = []
    for each in findings:
        rows.append((_MARKS[each.state], each.name, each.what))
        if each.advice:
            rows.append(("", "", f"-> {each.advice}"))
    data = {"findings": [asdict(each) for each in findings]}
    cli.sink.show(data, Table((Column("State"), Column("Check"), Column("Finding")), rows), items="findings")
    failed = [each.name for each in findings if each.state == "failure"]
    if failed:
        raise CliError(f"something is wrong: {', '.join(failed)}")


@command("check", example="tinker-sync check --spend 0.05")
@click.option(
    "--spend",
    type=click.FloatRange(min=0, min_open=True),
    default=0.05,
    show_default=True,
    metavar="USD",
    help="The most dollars to use at the hosted service.",
)
@click.option("--model", metavar="NAME", help="The base model; default: the cheapest.")
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all requests and answers to this file, with keys masked. Default: only if something fails.",
)
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="The most time for each call.",
)
@click.option("--leave", is_flag=True, help="Save also at a server that cannot delete checkpoints.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before the hosted service is used.")
def check(
    cli: Cli, spend: float, model: str | None, report: Path | None, deadline: float, leave: bool, yes: bool
) -> None:
    """Try everything once: create a small model, train, save, sample, resume, download, delete.

    The command begins with the checks of `doctor`, and takes about a minute. It asks before it uses the
    hosted service, which bills. It deletes what it has made, and fails if a step fails.
    """
    from tinker_sync.testing import check as run_check

    def ask(question: str) -> bool:
        if yes:
            cli.sink.say(question.removesuffix(" Go ahead?"))
        return yes or cli.sink.confirm(question)

    with tempfile.TemporaryDirectory(prefix="tinker-sync-") as place:
        tape = Path(place) / _CASSETTE
        found = run_check(
            cli.base_url, spend=spend, ask=ask, model=model, deadline=deadline, to=tape, leave=leave
        )
        if found is None:
            return
        written = report or (Path(_CASSETTE) if found.failed else None)
        if written is not None and tape.exists():
            written.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(tape, written)
    _show_check(cli, found, written)
    if found.failed:
        raise CliError(f"something is wrong: {', '.join(found.failed)}")


_CASSETTE: Final = "tinker-sync-check.cassette"


def _show_check(cli: Cli, found: CheckReport, written: Path | None) -> None:
    from tinker_sync.cli.table import Column, Table

    rows = []
    for each in found.rows:
        rows.append((_MARKS[each.state], each.name, each.expected, each.seen))
        if each.advice:
            rows.append(("", "", "", f"-> {each.advice}"))
    note = f"{found.tokens.total} tokens were used."
    if written is not None:
        note += f" {written} has all requests and answers, with keys masked: attach it to a report."
    columns = (Column("State"), Column("Step"), Column("Expected"), Column("Seen"))
    data = {
        "base_url": found.base_url,
        "model": found.model,
        "tokens": asdict(found.tokens),
        "report": None if written is None else str(written),
        "rows": [asdict(each) for each in found.rows],
    }
    cli.sink.show(data, Table(columns, rows, note=note), items="rows")
