"""Lists of runs, checkpoints, models and sessions, in each form; `probe` and `doctor`."""

from __future__ import annotations

import re

import pytest
from support.cli_runs import Run
from support.cli_world import OTHER_RUN, PATH, RUN, SESSION, World
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
