"""`billing`: usage and storage as tables, JSON, and CSV to a file or a pipe."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from support.cli_runs import Run
from support.cli_world import BILL, SESSION, World
from support.tinker_stub import Answer

HOURS = ("2026-03-01T09:00:00Z", "2026-03-01T10:00:00Z")


def test_usage_as_a_table(run: Run, world: World) -> None:
    shown = run("billing", "usage", *HOURS).out
    assert shown.startswith("6 rows\n")
    for words in (
        "2,500,000",
        "$0.5/M",
        "$1.25",
        "sampling prefill (cached)",
        "null",
        "$0.000123",
        "2.88 GB h",
    ):
        assert words in shown
    [asked] = world.asked("/billing/usage/events")
    assert asked.query == {"starting_on": [HOURS[0]], "ending_before": [HOURS[1]]}


def test_usage_as_csv(run: Run, world: World, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "usage.csv"
    done = run("billing", "usage", *HOURS, "--csv", str(path), "--sessions-csv", "-")
    assert done.err == f"wrote 6 rows to {path}\n"
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    assert [row["type"] for row in rows][:2] == ["training", "sampling_prefill"]
    assert (rows[0]["token_count"], rows[1]["estimated_cost_usd"], rows[1]["cached"]) == (
        "2500000",
        "",
        "True",
    )
    columns = list(rows[0])
    assert columns.index("free") == columns.index("gigabyte_hours") - 1
    assert [row["free"] for row in rows if row["type"] == "storage"] == ["False"]
    sessions = list(csv.DictReader(io.StringIO(done.out)))
    assert json.loads(sessions[0]["user_metadata"]) == {"purpose": "spelling"}
    assert (sessions[0]["session_id"], sessions[1]["user_metadata"]) == (SESSION, "")
    assert [each.name for each in path.parent.iterdir()] == ["usage.csv"]


def test_usage_is_that_of_this_month_by_default(run: Run, world: World) -> None:
    assert run("billing", "usage").code == 0  # NOW is 12:00 on the first of March
    assert run("billing", "usage", "2026-02-28").code == 0
    asked = [each.query for each in world.asked("/billing/usage/events")]
    begins = ["2026-03-01T00:00:00Z", "2026-02-28T00:00:00Z"]
    assert asked == [{"starting_on": [each], "ending_before": ["2026-03-01T13:00:00Z"]} for each in begins]


def test_a_long_window_is_asked_for_in_parts(run: Run, world: World) -> None:
    data = run("billing", "usage", "2026-01-31", "2026-03-01", "-f", "json").json
    asked = [each.query for each in world.asked("/billing/usage/events")]
    days = ["2026-01-31", "2026-02-14", "2026-02-28", "2026-03-01"]
    assert [each["starting_on"][0][:10] for each in asked] == days[:-1]
    assert [each["ending_before"][0][:10] for each in asked] == days[1:]
    assert len(data["data"]) == 3 * len(BILL["data"])
    assert set(data["sessions"]) == set(BILL["sessions"])


@pytest.mark.parametrize(
    ("window", "words"),
    [
        (("yesterday", HOURS[1]), "STARTING_ON: expected a date or a full hour, got 'yesterday'"),
        ((HOURS[0], ""), "ENDING_BEFORE: expected a date or a full hour, got ''"),
        (("2026-02-01T10:30:00Z",), "STARTING_ON: expected a date or a full hour"),
        ((HOURS[1], HOURS[0]), "must be before ENDING_BEFORE"),
    ],
)
def test_invalid_hours_are_refused(run: Run, world: World, window: tuple[str, ...], words: str) -> None:
    done = run("billing", "usage", *window)
    assert done.code == 1
    assert words in done.err
    assert "Request" not in done.err
    assert world.asked("/billing/usage/events") == []


def test_storage(run: Run, world: World) -> None:
    shown = run("billing", "checkpoint-storage", "--project-id", "p-1").out
    assert "p-1      ada@example.com            4  1.2 GB  $0.132876" in shown
    assert shown.endswith("at $0.1 for a gigabyte a month\n")
    assert world.asked("/billing/usage/checkpoints/current")[0].query == {"project_id": ["p-1"]}
    rows = list(csv.DictReader(io.StringIO(run("billing", "checkpoint-storage", "--csv", "-").out)))
    assert next(iter(rows[0])) == "effective_rate_usd_per_gigabyte_month"
    assert rows[1]["project_id"] == ""
    world.script("/billing/usage/checkpoints/current", Answer(body={"data": []}))
    assert run("billing", "checkpoint-storage").out == "no checkpoints in storage\n"


def test_a_file_that_cannot_be_written(run: Run, world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("billing", "usage", *HOURS, "--csv", str(tmp_path / "file" / "usage.csv"))
    assert done.code == 1
    assert "cannot write" in done.err
