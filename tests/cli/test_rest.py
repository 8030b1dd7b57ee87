"""Runs, checkpoints, models and sessions in each form; `billing`, `checkpoint`, `probe` and `doctor`."""

from __future__ import annotations

import csv
import gc
import io
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.cli_runs import Run
from support.cli_world import BILL, EXPORT, OTHER_RUN, PATH, RUN, SESSION, World
from support.tinker_stub import Answer


def test_a_list_in_each_form(run: Run, world: World) -> None:
    table = run("run", "list")
    assert (table.code, table.err) == (0, "")
    assert table.out.splitlines()[0] == "2 training runs"
    assert f"{RUN}  Qwen/Qwen3-30B-A3B-Instruct-2507  rank 32  3 minutes ago  ok" in table.out
    whole = run("run", "list", "--format", "json").json
    assert [each["training_run_id"] for each in whole["runs"]] == [RUN, OTHER_RUN]
    assert whole["runs"][0]["last_request_time"] == "2026-03-01 11:57:00+00:00"
    assert run("run", "list", "-f", "jsonl").lines == whole["runs"]


def test_columns(run: Run, world: World) -> None:
    shown = run("run", "list", "-c", "id, checkpoint,checkpoint_time,owner")
    assert shown.out.splitlines()[2].split("  ")[0] == "Run"
    assert f"{RUN}  weights/step-0100  2 hours ago  tml:user:ada" in shown.out
    wrong = run("run", "list", "--columns", "id,colour")
    assert (wrong.code, wrong.out) == (2, "")
    assert "no such column: colour" in wrong.err
    assert world.asked("/training_runs") != []


def test_a_long_list_comes_in_pages(run: Run, world: World) -> None:
    world.runs = [{**world.runs[0], "training_run_id": f"run-{number}"} for number in range(1250)]
    ids = [each["training_run_id"] for each in run("run", "list", "--limit", "0", "-f", "json").json["runs"]]
    assert ids == [f"run-{number}" for number in range(1250)]
    assert len(world.asked("/training_runs")) == 2
    world.log.clear()
    some = run("run", "list", "--limit", "105")
    assert some.out.startswith("105 training runs\n")
    assert some.out.endswith("1,145 more are not shown; --limit 0 shows all.\n")
    assert len(world.asked("/training_runs")) == 1


def test_the_checkpoints_of_an_empty_run_id_are_not_those_of_all_runs(run: Run, world: World) -> None:
    done = run("checkpoint", "list", "--run-id", "", "--format", "jsonl")
    assert (done.code, done.out) == (1, "")
    assert "expected an id, got ''" in done.err


def test_checkpoint_info(run: Run, world: World) -> None:
    shown = run("checkpoint", "info", PATH).out
    for words in ("training", "1.2 GB", "2 hours ago", "never", "rank 32", RUN):
        assert words in shown
    data = run("checkpoint", "info", PATH, "-f", "json").json
    assert (data["is_lora"], data["lora_rank"], data["size_bytes"]) == (True, 32, 1_288_490_188)
    missing = run("checkpoint", "info", f"tinker://{RUN}/weights/none")
    assert (missing.code, missing.out) == (1, "")
    assert f"tinker-sync checkpoint list --run-id {RUN}" in missing.err


def test_info_of_an_unknown_run_prints_one_message(
    run: Run, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Both requests fail, the second one first, and a failure that nobody has looked at would be logged."""
    first = "/training_runs/no-such-run"
    released = world.hold(f"{first}/checkpoints")
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(lambda: (world.await_asked(first), released.set()))
        done = run("checkpoint", "info", "tinker://no-such-run/weights/a")
        ended.result()
    gc.collect()
    assert (done.code, done.out) == (1, "")
    assert "no training run" in done.err
    assert caplog.records == []


@pytest.mark.parametrize("verb", ["info", "publish", "unpublish"])
def test_an_invalid_path_is_refused_before_any_request(run: Run, world: World, verb: str) -> None:
    wrong = run("checkpoint", verb, "run-1/weights/a")
    assert wrong.code == 1
    assert "not the path of a checkpoint" in wrong.err
    assert world.log == []


def test_sessions_have_their_times_where_the_server_has_a_search(run: Run, world: World) -> None:
    known = {
        "session_id": SESSION, "created_at": "2026-03-01T10:00:00Z", "owner": "u", "project_id": "p",
        "status": {"type": "active"}, "checkpoints_count": 0, "display_name": "night run",
    }  # fmt: skip
    world.script("/sessions/search", *[Answer(body={"sessions": [known]})] * 2)
    done = run("session", "list")
    assert (done.code, done.err) == (0, "")
    other = OTHER_RUN.partition(":")[0]
    shown = [re.split(r" {2,}", line) for line in done.out.splitlines()[2:]]
    assert shown[0] == ["Session", "Started", "State", "Name"]
    assert shown[1:] == [[SESSION, "2 hours ago", "active", "night run"], [other, "-", "-", "-"]]
    assert run("session", "list", "-f", "json").json["sessions"][0] == {"session_id": SESSION}


COMMANDS = ("run list", "auth status", "doctor")


def test_probe(run: Run, world: World) -> None:
    shown = run("probe")
    assert shown.code == 0
    assert "Protocol  0.25 or newer" in shown.out
    assert re.search(r"^asample +POST +no +expected of this version$", shown.out, flags=re.MULTILINE)
    assert re.search(r"^get_checkpoint_archive +GET +yes +of older servers$", shown.out, flags=re.MULTILINE)
    assert "Settings  pjwt_auth_enabled=True" in shown.out
    data = run("probe", world.url, "-f", "json").json  # type: ignore[attr-defined]
    assert data["base_url"] == world.url  # type: ignore[attr-defined]
    assert {"calls", "features", "flags"} <= set(data)


def test_doctor(run: Run, world: World) -> None:
    well = run("doctor")
    assert (well.code, well.err) == (0, "")
    assert "ok     key         from TINKER_API_KEY" in well.out
    world.script("/get_server_capabilities", Answer(402, {"detail": "no money"}))
    ill = run("doctor", "--format", "jsonl")
    assert ill.code == 1
    assert [each["name"] for each in ill.lines if each["state"] == "failure"] == ["access"]
    assert ill.err == "Error: something is wrong: access\n"


@pytest.mark.parametrize(
    "line",
    [("--base-url", "URL", "run", "list"), *((*name.split(), "--base-url", "URL") for name in COMMANDS)],
    ids=" ".join,
)
def test_base_url_is_an_option_of_groups_and_commands(
    run: Run, world: World, monkeypatch: pytest.MonkeyPatch, line: tuple[str, ...]
) -> None:
    monkeypatch.delenv("TINKER_BASE_URL")
    url = world.url  # type: ignore[attr-defined]
    assert run(*(url if word == "URL" else word for word in line)).code == 0


def test_model_list(run: Run, world: World) -> None:
    assert "131,072  yes    yes" in run("model", "list").out
    assert [each["model_name"] for each in run("model", "list", "QWEN", "-f", "json").json["models"]] == [
        "Qwen/Qwen3-30B-A3B-Instruct-2507"
    ]
    none = run("model", "list", "nothing")
    assert none.code == 1
    assert "no model's name contains 'nothing'" in none.err


# ----- Usage and storage as tables, JSON, and CSV to a file or a pipe.
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


# ----- Publish, keep and delete; deletion asks first.
def left(world: World) -> list[str]:
    return [each["tinker_path"] for each in world.checkpoints]


@pytest.mark.parametrize(
    ("line", "method", "end", "body"),
    [
        (("publish", PATH), "POST", "publish", None),
        (("unpublish", PATH), "DELETE", "publish", None),
        (("set-ttl", PATH, "--ttl", "86400"), "PUT", "ttl", {"ttl_seconds": 86400}),
        (("set-ttl", PATH, "--remove"), "PUT", "ttl", {"ttl_seconds": None}),
    ],
)
def test_changes_print_a_message_on_stderr_only(
    run: Run, world: World, line: tuple[str, ...], method: str, end: str, body: object
) -> None:
    done = run("checkpoint", *line)
    assert (done.code, done.out) == (0, "")
    assert PATH in done.err
    asked = world.log[-1]
    assert (asked.method, asked.path.rpartition("/")[2]) == (method, end)
    assert body is None or asked.json() == body
    assert run("checkpoint", *line, "--quiet").err == ""


def test_delete_lists_the_checkpoints_and_asks(run: Run, world: World) -> None:
    before = left(world)
    for answer in ("n\n", "\n", "maybe\n"):
        done = run("checkpoint", "delete", PATH, EXPORT, stdin=answer)
        assert (done.code, done.out) == (0, "")
        assert f"To be deleted permanently: 2 checkpoints\n  {PATH}\n  {EXPORT}\n" in done.err
        assert "Nothing was deleted." in done.err
    unanswered = run("checkpoint", "delete", PATH, stdin="")
    assert unanswered.code == 1
    assert "Give --yes" in unanswered.err
    assert left(world) == before
    done = run("checkpoint", "delete", PATH, EXPORT, stdin="y\n")
    assert done.code == 0
    assert "2 checkpoints deleted" in done.err
    assert set(before) - set(left(world)) == {PATH, EXPORT}


def test_delete_lists_each_failure(run: Run, world: World) -> None:
    world.undeletable = {PATH: 409}
    missing = f"tinker://{RUN}/weights/none"
    done = run("checkpoint", "delete", "-y", PATH, missing, EXPORT)
    assert done.code == 3
    assert "1 checkpoint deleted" in done.err
    assert f"not deleted: {PATH}: 409" in done.err
    assert f"not deleted: {missing}: 404" in done.err
    assert "2 checkpoints of 3 could not be deleted" in done.err
    again = run("checkpoint", "delete", "-y", PATH, "--format", "json")
    assert again.code == 3
    assert again.json["deleted_count"] == 0
    assert [each["tinker_path"] for each in again.json["failed"]] == [PATH]


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        ((), ["weights/step-0100", "sampler_weights/step-0100", "external_weights/export"]),
        (("--type", "sampler"), ["sampler_weights/step-0100"]),
        (("--type", "weights"), ["weights/step-0100"]),
        (("--before", "2026-03-01"), ["sampler_weights/step-0100"]),
        (("--after", "2026-03-01T10:00:00Z"), ["external_weights/export"]),
        (("--after", "2026-02-27", "--before", "2026-03-01T12:00:00+02:00"), ["sampler_weights/step-0100"]),
    ],
)
def test_delete_of_matching_ones(run: Run, world: World, options: tuple[str, ...], gone: list[str]) -> None:
    done = run("checkpoint", "delete", "--run-id", RUN, *options, stdin="yes\n")
    assert done.code == 0
    assert [path for path in left(world) if path.startswith(f"tinker://{RUN}/")] == [
        f"tinker://{RUN}/{name}"
        for name in ("weights/step-0100", "sampler_weights/step-0100", "external_weights/export")
        if name not in gone
    ]
    assert len(left(world)) == 4 - len(gone)


def test_delete_without_a_match(run: Run, world: World) -> None:
    done = run("checkpoint", "delete", "--run-id", OTHER_RUN, "--type", "sampler", "-f", "json")
    assert (done.code, done.json) == (0, {"deleted_count": 0, "failed": []})
    for more in ((), ("--yes",)):
        done = run("checkpoint", "delete", "--run-id", OTHER_RUN, "--type", "sampler", *more)
        words = f"No checkpoint of run {OTHER_RUN} matches; nothing was deleted."
        assert (done.code, done.out, done.err.splitlines()) == (0, "", [words])


@pytest.mark.parametrize("line", [(), ("--ttl", "60", "--remove"), ("--ttl", "0")])
def test_set_ttl_needs_one_option(run: Run, world: World, line: tuple[str, ...]) -> None:
    assert run("checkpoint", "set-ttl", PATH, *line).code == 2
    assert world.log == []


@pytest.mark.parametrize(
    "line",
    [
        (),
        (PATH, "--run-id", RUN),
        (PATH, "--type", "weights"),
        ("--run-id", RUN, "--type", "heavy"),
        ("--run-id", RUN, "--before", "tomorrow"),
    ],
)
def test_contradictory_options_of_delete(run: Run, world: World, line: tuple[str, ...]) -> None:
    assert run("checkpoint", "delete", *line).code == 2
    assert world.log == []
