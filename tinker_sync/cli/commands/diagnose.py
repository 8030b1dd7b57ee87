"""`tinker-sync probe` and `tinker-sync doctor`: the reports of `tinker_sync.insight` as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click
from attrs import asdict

from tinker_sync.cli.failures import CliError
from tinker_sync.cli.framework import Cli, command

if TYPE_CHECKING:
    from tinker_sync.cli.table import Table
    from tinker_sync.insight import CallFound, ProbeReport

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
