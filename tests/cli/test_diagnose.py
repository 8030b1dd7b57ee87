"""`probe` and `doctor` as commands: output and exit codes."""

from __future__ import annotations

import re

import pytest
from support.cli_runs import Run
from support.cli_world import World
from support.tinker_stub import Answer

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
