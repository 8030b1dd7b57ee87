"""The programs of the guides run, their tables name what the package has, and their links lead somewhere."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

import tinker_sync
from tinker_sync import errors
from tinker_sync.types.scalars import LossFnType
from tinker_sync.wire.dialect import FEATURES, Dialect
from tinker_sync.wire.endpoints import ENDPOINTS

PACKAGE = Path(tinker_sync.__file__).parent
GUIDES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((PACKAGE / "docs").glob("*.md"))}


def blocks(guide: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDES[guide], flags=re.DOTALL | re.MULTILINE)


def rows(guide: str) -> set[str]:
    """Return the names in the first column of the tables of a guide."""
    return set(re.findall(r"^\| `([^`]+)` \|.*(?<!---\|)$(?!\n\|---)", GUIDES[guide], flags=re.MULTILINE))


@pytest.mark.parametrize("guide", [guide for guide in GUIDES if blocks(guide, "python")])
def test_the_programs_of_a_guide_run_one_after_the_other(
    guide: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "local")
    names: dict[str, Any] = {"__name__": "__guide__"}
    for code in blocks(guide, "python"):
        exec(compile(code, f"{guide}.md", "exec"), names)
    if guide == "quickstart":
        assert "CABA" in capsys.readouterr().out


def test_the_tests_of_a_guide_pass(tmp_path: Path) -> None:
    [code] = blocks("testing", "python pytest")
    (tmp_path / "test_mine.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tinker_sync.testing.pytest_plugin", "-q", "-W", "error"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.parametrize("guide", GUIDES)
def test_links_lead_somewhere(guide: str) -> None:
    for place in re.findall(r"\]\(([\w./-]+)\)", GUIDES[guide]):
        assert (PACKAGE / "docs" / place).exists(), place
    for module in re.findall(r"python -m (tinker_sync(?:\.\w+)+)", GUIDES[guide]):
        assert (PACKAGE.parent / module.replace(".", "/")).with_suffix(".py").exists() or (
            PACKAGE.parent / module.replace(".", "/") / "__main__.py"
        ).exists(), module


def test_every_guide_can_be_found() -> None:
    readme = (PACKAGE.parent / "README.md").read_text(encoding="utf-8")
    found, unread = set(), set(re.findall(r"tinker_sync/docs/([\w-]+)\.md", readme))
    while unread:
        guide = unread.pop()
        found.add(guide)
        unread |= set(re.findall(r"\]\(([\w-]+)\.md\)", GUIDES[guide])) - found
    assert found == set(GUIDES)


def test_every_loss_has_a_row() -> None:
    assert rows("losses") == set(get_args(LossFnType))


def test_every_error_has_a_row() -> None:
    kinds = {
        name
        for name in errors.__all__
        if inspect.isclass(getattr(errors, name))
        and issubclass(getattr(errors, name), errors.TinkerError)
        and name != "TinkerError"
    }
    assert rows("errors") == kinds


def test_every_environment_variable_has_a_row() -> None:
    used: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        used |= set(re.findall(r"[\"']((?:TINKER|CLOUDFLARE)_[A-Z_]+[A-Z0-9])[\"']", text))
    known = {name for name in rows("configuration") if name.startswith(("TINKER_", "CLOUDFLARE_"))}
    assert known == used


def test_the_table_of_servers_is_what_the_client_takes_them_for() -> None:
    dialects = {
        "hosted, 0.38": Dialect.of_vendor(),
        "hosted, 0.36": Dialect(version=(0, 36), protobuf=True),
        "open, 0.25": Dialect(version=(0, 25), protobuf=True),
        "open, JSON only": Dialect.forced("json"),
    }
    expected = {name: [dialect.knows(name) for dialect in dialects.values()] for name in FEATURES} | {
        name: [dialect.offers(name) for dialect in dialects.values()] for name in ENDPOINTS
    }
    lines = [line.strip("| ").split(" | ") for line in GUIDES["configuration"].splitlines()]
    [at] = [index for index, cells in enumerate(lines) if cells[1:] == [*dialects]]
    table = {name.strip("`"): [cell == "yes" for cell in cells] for name, *cells in lines[at + 4 :] if cells}
    assert table == {name: row for name, row in expected.items() if name in FEATURES or not all(row)}
