"""The examples run as they are printed, stand alone, and show that something was learned."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tinker_sync import examples
from tinker_sync.examples import demo, evaluation, notebook

pytestmark = pytest.mark.usefixtures("one_embedded_server")

PLACE = Path(examples.__file__).parent
FILES = sorted(path for path in PLACE.rglob("*.py") if not path.name.startswith("_"))
# Smaller sizes than those of the examples, so that the suite stays quick.
SMALLER: dict[str, dict[str, Any]] = {
    "chat_tuning": {"STEPS": 12, "BATCH": 8, "HELD_OUT": 10},
    "custom_loss": {"STEPS": 5, "BATCH": 8},
    "distillation": {"STEPS": 4, "TEXTS": 8},
    "preferences": {"STORIES": 4, "BATCHES": 1, "STEPS": 3, "RATE": 3e-2},
    "rewards": {"STEPS": 2, "GROUP": 4},
    "sweep": {"STEPS": 3, "BATCH": 8},
}
# The number that each prints for a step, which falls in those that minimise a loss.
FALLING = {
    "chat_tuning": r"loss +(\S+)",
    "custom_loss": r"focal loss +(\S+)",
    "distillation": r"teacher +(\S+)",
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_is_one_short_file_that_is_listed(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 150
    own = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert not [name for name in own if name.startswith("tinker_sync.examples")], (
        "pasted, it lacks this import"
    )
    name = ".".join(path.relative_to(PLACE).with_suffix("").parts)
    if name != "cluster.ray_rollouts":  # listed in its own package, because it needs an extra
        assert f"python -m tinker_sync.examples.{name} " in (examples.__doc__ or "")


@pytest.mark.parametrize("name", SMALLER)
def test_an_example_learns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = importlib.import_module(f"tinker_sync.examples.{name}")
    for size, value in SMALLER[name].items():
        monkeypatch.setattr(example, size, value)
    example.main()
    shown = capsys.readouterr().out
    if name in FALLING:
        losses = [float(each) for each in re.findall(FALLING[name], shown)]
        assert losses[-1] < losses[0]
    elif name == "sweep":
        assert shown.count("learning rate") == 4
        assert shown.count("the best") == 1
    else:
        assert "before: " in shown
        assert shown.count("step ") == SMALLER[name]["STEPS"]


@pytest.mark.parametrize(
    ("story", "ended", "reward"),
    [
        ("The owl sang. The end.", True, 1.0), ('"Where is my Owl?" asked Tom.', True, 1.0),
        ("The owl sang. The owl sang.", True, 0.0), ("The owl sang", False, 0.0),
        ("The cow sang.", True, 0.0), ("The owlet sang.", True, 0.0), ("", True, 0.0),
    ],
)  # fmt: skip
def test_the_reward_of_a_story(story: str, ended: bool, reward: float) -> None:
    rewards = importlib.import_module("tinker_sync.examples.rewards")
    assert rewards.reward("owl", story, ended=ended) == reward


def test_an_evaluation_goes_on_where_it_stopped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "PROMPTS", 60)
    evaluation.main()
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("20 answers, 0 of them from the file: ")
    found = re.match(r"60 answers, (\d+) of them from the file: (\S+)%", second)
    assert found
    assert int(found[1]) >= 20
    assert float(found[2]) > 90


def test_a_web_app_answers_and_refuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    web_app = importlib.import_module("tinker_sync.examples.web_app")
    monkeypatch.setattr(web_app, "REQUESTS", 3)
    web_app.main()
    *answers, refused = capsys.readouterr().out.splitlines()
    assert answers == [f'Q: {n}+{n}=     200 OK  {{"text": "{2 * n}"}}' for n in (1, 2, 3)]
    assert refused.endswith('400 Bad Request  {"error": "prompt is missing"}')


def test_a_loop_that_loses_its_model_ends_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    recovery = importlib.import_module("tinker_sync.examples.recovery")
    recovery.main()
    shown = capsys.readouterr().out
    steps = [int(each) for each in re.findall(r"step +(\d+) +loss", shown)]
    assert steps == [*range(10), *range(8, 19), *range(16, 24)]
    losses = [float(each) for each in re.findall(r"loss +(\S+)", shown)]
    assert losses[-1] < losses[0] / 2
    assert losses[10:12] == losses[8:10]  # a repeated step has the same data and weights
    assert "kept: " in shown


# ------------------------------------------------------------------------------------------ the demo
def test_the_demo_kills_its_training_and_loses_nothing() -> None:
    """As a program of its own, with its own sizes: the process that it kills imports the module again."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tinker_sync.examples.demo"],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    shown = done.stdout
    assert done.stderr == ""
    if sys.platform != "win32":
        assert "This demo has killed the process after 43 steps (exit code -9)." in shown
    lost, again = re.findall(r"((?:\d\.\d{4}(?:, )?){3})", shown)
    assert lost == again
    right = re.search(r"(\d+) of 40 new problems are right. Before the training, (\d+) were.", shown)
    assert right
    assert int(right[1]) > 20 + int(right[2])
    assert "def learn_to_sort(" in shown
    commands = re.findall(
        r"^  (python -m \S+|tinker-sync \w+ \w+) ", shown.partition("Next:")[2], re.MULTILINE
    )
    assert len(commands) == 3


def test_the_demo_fails_if_the_model_learns_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"STEPS": 1, "BATCH": 1, "SAVE_EVERY": 1, "KILLED_AFTER": 1}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(demo, "train_and_kill", lambda directory: [1.0])
    assert demo.main() is False
    assert "0 of 40 new problems are right" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------ the notebook
def run_cells(cells: list[dict[str, Any]]) -> list[Any]:
    """Run cells of code as a kernel does. Return the values of the cells that end with an expression."""
    names: dict[str, Any] = {"__name__": "__main__"}
    values = []
    for cell in cells:
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            values.append(eval(compile(ast.Expression(last.value), "cell", "eval"), names))
    return values


def test_the_notebook_runs_and_shows_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    display = type(sys)("IPython.display")
    monkeypatch.setattr(display, "Markdown", str, raising=False)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    made = json.loads(notebook.NOTEBOOK.read_text(encoding="utf-8"))
    assert {cell["cell_type"] for cell in made["cells"]} == {"code", "markdown"}
    code = [cell for cell in made["cells"] if cell["cell_type"] == "code"]
    assert not [cell for cell in code if "await " in "".join(cell["source"])]
    assert not [cell for cell in code if cell["outputs"]], "an output of the last run is in the file"
    for cell in code:
        cell["source"] = [line.replace("range(30)", "range(3)") for line in cell["source"]]
    values = run_cells(code)
    shown = [value._repr_html_() for value in values if hasattr(value, "_repr_html_")]
    assert len(shown) == 9
    assert all(isinstance(html, str) for html in shown)
    assert any("<polyline" in html for html in shown)
    assert any("rgba(239,68,68" in html for html in shown)
    assert [
        value for value in values if isinstance(value, str) and value.startswith("| word | answer | right |")
    ]
    assert "of 100000 prompts" in capsys.readouterr().out


def test_the_package_lists_its_examples() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "tinker_sync.examples"], capture_output=True, text=True, check=True
    )
    assert (listed.stdout, listed.stderr) == (examples.__doc__, "")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["demo", "--seed", "3"], 1, "--seed: an example has no options; copy its file"),
        (["cluster.processes", "4"], 1, "4: an example has no options; copy its file"),
        (["rewards", "--help"], 0, "python -m tinker_sync.examples.rewards "),
    ],
)
def test_an_example_refuses_arguments(arguments: list[str], code: int, words: str) -> None:
    name, *given = arguments
    command = [sys.executable, "-m", f"tinker_sync.examples.{name}", *given]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == code
    assert words in ended.stdout + ended.stderr
