"""The examples of the README run, and its commands exist word for word."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.tinker_stub import StubServer

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
PYTHON = [code for language, code in BLOCKS if language == "python"]
# Test files in the README. pytest runs them with the fixtures of the package, as for a user.
TEST_FILES = re.findall(r"^```python pytest\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def test_there_are_examples() -> None:
    assert len(PYTHON) >= 2
    assert {language for language, _ in BLOCKS} == {"python", "console", "text"}


@pytest.mark.parametrize("code", PYTHON, ids=[f"block{number}" for number in range(1, len(PYTHON) + 1)])
def test_an_example_runs(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with StubServer(config={"custom_loss_server_side": False}) as stub:
        monkeypatch.setenv("TINKER_BASE_URL", stub.url)  # type: ignore[attr-defined]
        monkeypatch.setenv("TINKER_API_KEY", "tml-readme")
        exec(compile(code, "README.md", "exec"), {"__name__": "__readme__"})


def test_a_file_of_tests_runs(tmp_path: Path) -> None:
    [code] = TEST_FILES
    assert len(code.splitlines()) <= 30
    (tmp_path / "test_mine.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tinker_sync.testing.pytest_plugin", "-q", "-W", "error"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.parametrize(
    "command",
    ["pip install '.[all]' && tinker-sync demo", "pip install -e '.[test]' && pytest -n 2 --dist loadfile"],
)
def test_a_promised_command_is_one_line(command: str) -> None:
    lines = [line for language, code in BLOCKS if language == "console" for line in code.splitlines()]
    assert lines.count(command) == 1


def test_the_first_example_is_short() -> None:
    assert len([line for line in PYTHON[0].splitlines() if line.strip()]) <= 20


def test_named_examples_and_links_exist() -> None:
    [row] = [line for line in README.splitlines() if line.startswith("| see programs |")]
    first, *others = re.findall(r"`([^`]+)`", row)
    names = {first.rpartition(".")[2], *others}
    package = ROOT / "tinker_sync" / "examples"
    assert names == {path.stem for path in package.glob("*.py") if not path.name.startswith("_")}
    for place in re.findall(r"\]\(([\w./-]+)\)", README):
        assert (ROOT / place).exists(), place


def test_the_files_of_the_map_exist() -> None:
    development = README.partition("## Development")[2]
    named = re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:/|\.py))`", development)
    assert len(named) > 12
    for place in named:
        assert (ROOT / "tinker_sync" / place).exists() or (ROOT / place).exists(), place
