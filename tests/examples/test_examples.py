"""The examples run, are short, and learn."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.isolation import hold_embedded_server

from tinker_sync import examples
from tinker_sync.examples import evaluation, notebook

PLACE = Path(examples.__file__).parent
FILES = sorted(path for path in PLACE.glob("*.py") if not path.name.startswith("_"))
# Few steps, so that the suite stays quick. By default, the examples take enough steps to learn.
FEW_STEPS = {
    "chat_tuning": 2,
    "custom_loss": 4,
    "distillation": 3,
    "preferences": 2,
    "rewards": 1,
    "sweep": 2,
    "web_app": 3,
}
# Smaller batches than those of the examples, for the same reason.
SMALLER: dict[str, dict[str, int]] = {
    "chat_tuning": {"BATCH": 16, "HELD_OUT": 10},
    "custom_loss": {"BATCH": 8},
    "distillation": {"TEXTS": 8},
    "preferences": {"PAIRS": 4},
    "rewards": {"GROUP": 4},
    "sweep": {"BATCH": 8},
}
FALLING = ("chat_tuning", "custom_loss", "distillation", "sweep")


@pytest.fixture(scope="module", autouse=True)
def _one_server() -> Iterator[None]:
    let_go = hold_embedded_server()
    yield
    let_go()


def test_every_example_is_listed_and_short() -> None:
    names = {path.stem for path in FILES}
    assert names == {*FEW_STEPS, "evaluation", "notebook"}
    for path in FILES:
        assert len(path.read_text(encoding="utf-8").splitlines()) < 100, path
        assert f"python -m tinker_sync.examples.{path.stem}" in (examples.__doc__ or "")


@pytest.mark.parametrize("name", FEW_STEPS)
def test_an_example_runs(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = importlib.import_module(f"tinker_sync.examples.{name}")
    for size, value in SMALLER.get(name, {}).items():
        monkeypatch.setattr(example, size, value)
    values = example.main(["--steps", str(FEW_STEPS[name])])
    assert len(values) == FEW_STEPS[name]
    if name in FALLING:
        assert values[-1] < values[0]
    shown = capsys.readouterr().out
    assert f"{FEW_STEPS[name]}\n" in shown or "1\n" in shown  # the end of the axis of the curve


def test_an_evaluation_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shares = evaluation.main(["--steps", "60"], tmp_path / "answers.jsonl")
    assert shares[0] > 0.9
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("the first run: 20 samples asked for, 0 read")
    assert int(second.split()[3]) <= 40


def test_an_example_is_a_command() -> None:
    command = [sys.executable, "-W", "error", "-m", "tinker_sync.examples.web_app", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "--base-url" in done.stdout


# ---------------------------------------------------------------------------------- the notebook
def run_cells(cells: list[dict[str, Any]]) -> list[Any]:
    """Run cells of code as a kernel does, which allows `await` outside of functions.

    Return the values of the cells that end with an expression.
    """
    names: dict[str, Any] = {}
    values = []

    async def run_all() -> None:
        for cell in cells:
            tree = ast.parse("".join(cell["source"]))
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            for body, mode in ((tree, "exec"), (last and ast.Expression(last.value), "eval")):
                if body is None:
                    continue
                code = compile(body, "cell", mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                value = types.FunctionType(code, names)()
                if inspect.isawaitable(value) and code.co_flags & inspect.CO_COROUTINE:
                    value = await value
                if mode == "eval":
                    values.append(value)

    asyncio.run(run_all())
    return values


def test_the_notebook_runs_and_shows_values() -> None:
    made = notebook.make_notebook(steps=3)
    assert {cell["cell_type"] for cell in made["cells"]} == {"code", "markdown"}
    shown = [
        value._repr_html_()
        for value in run_cells([c for c in made["cells"] if c["cell_type"] == "code"])[:-1]
    ]
    assert len(shown) == 9
    assert all(isinstance(html, str) for html in shown), [html is None for html in shown]
    assert any("<polyline" in str(html) for html in shown)
    assert any("rgba(239,68,68" in str(html) for html in shown)


def test_the_notebook_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = notebook.main([str(tmp_path / "a.ipynb")])
    assert place.stat().st_size > 1000
    assert "jupyter lab" in capsys.readouterr().out


def test_the_package_lists_its_examples() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "tinker_sync.examples"], capture_output=True, text=True, check=True
    )
    assert (listed.stdout, listed.stderr) == (examples.__doc__, "")
