"""The examples of the README run, and its commands exist word for word."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
PYTHON = [code for language, code in BLOCKS if language == "python"]


def test_there_are_examples() -> None:
    assert len(PYTHON) >= 2
    assert {language for language, _ in BLOCKS} == {"python", "console", "text"}


def test_the_examples_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "__readme__"}
    for code in PYTHON:
        exec(compile(code, "README.md", "exec"), names)
    assert "CABA" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    ["pip install '.[all]' && tinker-sync demo", "pip install -e '.[test]' && pytest -n 4 --dist loadfile"],
)
def test_a_promised_command_is_one_line(command: str) -> None:
    assert f"`{command}`" in README or f"\n{command}\n" in README


def test_it_is_short() -> None:
    assert len([line for line in PYTHON[0].splitlines() if line.strip()]) <= 20
    assert len(README.splitlines()) <= 200


def test_named_examples_and_links_exist() -> None:
    programs = README.partition("- Programs:")[2].partition("\n- ")[0]
    first, *others = re.findall(r"`([^`]+)`", programs)
    names = {first.rpartition(".")[2], *others}
    package = ROOT / "tinker_sync" / "examples"
    assert names == {path.stem for path in package.glob("*.py") if not path.name.startswith("_")}
    for place in re.findall(r"\]\(([\w./-]+)\)", README):
        assert (ROOT / place).exists(), place


def test_the_files_of_the_map_exist() -> None:
    notes = (ROOT / "tinker_sync" / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:/|\.py))`", notes)
    assert len(named) > 12
    for place in named:
        assert (ROOT / "tinker_sync" / place).exists() or (ROOT / place).exists(), place
