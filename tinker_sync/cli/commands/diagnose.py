"""`tinker-sync probe` and `tinker-sync doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click
from attrs import asdict

from tinker_sync.cli.failures import CliError
from tinker_sync.cli.lazy import Cli, command

if TYPE_CHECKING:
    from tinker_sync.cli.table import Table
    from tinker_sync.diagnose import CallFound, ProbeReport

_MARKS: Final = {"ok": "ok", "warning": "!", "failure": "FAIL", "skipped": "-"}


@command("probe", example="tinker-sync probe http://localhost:8000")
@click.argument("url", required=False)
def probe(cli: Cli, url: str | None) -> None:
    """Ask a server what it speaks, and print which calls and features it has.

    URL is the server; without it, the one in use. It is harmless: nothing is made, changed or billed.
    """
    from tinker_sync.diagnose import probe as ask

    report = ask(url or cli.base_url)
    if not cli.sink.for_people:
        cli.sink.show_data(asdict(report))
        return
    for table in (_facts(report), _calls(report), _features(report)):
        cli.sink.show({}, table)
        cli.sink.raw("")


def _facts(report: ProbeReport) -> Table:
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


def _calls(report: ProbeReport) -> Table:
    from tinker_sync.cli.table import Column, Table

    rows = [(call.name, call.method, call.there, _remark(call)) for call in report.calls]
    found = sum(1 for call in report.calls if call.there == "yes")
    title = f"{found} of {len(report.calls)} calls"
    return Table((Column("Call"), Column("Method"), Column("There"), Column("")), rows, title)


def _remark(call: CallFound) -> str:
    if call.there == "unknown":
        return (
            f"its answer ({call.status}) does not tell" if call.status else "cannot be asked without doing it"
        )
    if call.there == "no":
        return "of older servers" if call.legacy else "" if not call.expected else "expected of this version"
    return "of older servers" if call.legacy else "" if call.expected else "newer than its version"


def _features(report: ProbeReport) -> Table:
    from tinker_sync.cli.table import Column, Table
    from tinker_sync.cli.words import yes_no

    rows = [(each.name, each.since, yes_no(each.known)) for each in report.features]
    return Table(
        (Column("Feature"), Column("Since"), Column("Known")),
        rows,
        "Features of requests",
        note="The others are refused before they are sent: servers skip them silently.",
    )


@command("doctor", example="tinker-sync doctor")
def doctor(cli: Cli) -> None:
    """Look at the key, the address, the proxy, the clocks, the versions and the way to the server.

    Says of each what is wrong and what to do. Fails if anything is.
    """
    from tinker_sync.cli.table import Column, Table
    from tinker_sync.diagnose import examine

    findings = examine(cli.base_url)
    rows = []
    for each in findings:
        rows.append((_MARKS[each.state], each.name, each.what))
        if each.advice:
            rows.append(("", "", f"-> {each.advice}"))
    data = {"findings": [asdict(each) for each in findings]}
    cli.sink.show(data, Table((Column(""), Column(""), Column("")), rows), items="findings")
    failed = [each.name for each in findings if each.state == "failure"]
    if failed:
        raise CliError(f"something is wrong: {', '.join(failed)}")
