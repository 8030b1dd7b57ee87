"""What the README shows runs, and the commands it promises are there word for word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.tinker_stub import StubServer

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
PYTHON = [code for language, code in BLOCKS if language == "python"]


def test_there_are_examples() -> None:
    assert len(PYTHON) >= 2
    assert {language for language, _ in BLOCKS} == {"python", "console"}


@pytest.mark.parametrize("code", PYTHON, ids=[f"block{number}" for number in range(1, len(PYTHON) + 1)])
def test_an_example_runs(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with StubServer(config={"custom_loss_server_side": False}) as stub:
        monkeypatch.setenv("TINKER_BASE_URL", stub.url)  # type: ignore[attr-defined]
        monkeypatch.setenv("TINKER_API_KEY", "tml-readme")
        exec(compile(code, "README.md", "exec"), {"__name__": "__readme__"})


@pytest.mark.parametrize(
    "command", ["pip install '.[all]' && tinker-sync demo", "pip install -e '.[test]' && pytest"]
)
def test_a_promised_command_is_one_line(command: str) -> None:
    assert [code for language, code in BLOCKS if language == "console"].count(f"{command}\n") == 1
