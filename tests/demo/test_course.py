"""The demo with fewer steps, on the embedded server and another, and its printed program."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tinker_sync.clients.service import ServiceClient
from tinker_sync.demo import RECIPE, DemoResult, Steps, course, crash, main, run, student
from tinker_sync.demo.lessons import make_exam
from tinker_sync.errors import ConfigurationError, InvalidInputError, TinkerError
from tinker_sync.testing import LocalServer

SHORT = Steps(supervised=8, reinforced=1)


@pytest.fixture(scope="module", autouse=True)
def _small_lessons() -> Iterator[None]:
    """Make the lessons small: 8 problems instead of 64, 3 stories instead of 24, 8 exam questions, not 40."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(course, "EXAMPLES", 8)
        patch.setattr(course, "make_exam", lambda: make_exam(8))
        patch.setattr(student, "STORIES_PER_ANIMAL", 3)
        yield


def run_short(**options: Any) -> tuple[DemoResult, str]:
    out = io.StringIO()
    return run(seed=3, steps=SHORT, out=out, **options), out.getvalue()


@pytest.fixture(scope="module")
def drawn() -> Iterator[dict[str, Any]]:
    """Install a double of matplotlib. Yield the lines that it draws, by the titles of their axes."""
    lines: dict[str, Any] = {}

    class Axes:
        def plot(self, steps: range, values: Any) -> None:
            self.line = (list(steps), values)

        def set_title(self, title: str) -> None:
            lines[title] = self.line

        def set_xlabel(self, label: str) -> None:
            assert label == "step"

    class Figure:
        def __init__(self, **options: Any) -> None:
            pass

        def subplots(self, rows: int, columns: int) -> list[Axes]:
            assert columns == 1
            return [Axes() for _ in range(rows)]

        def savefig(self, path: str, **options: str) -> None:
            assert (path, options) == ("curves.png", {"format": "png"})

    module = ModuleType("matplotlib.figure")
    module.Figure = Figure  # type: ignore[attr-defined]
    package = ModuleType("matplotlib")
    package.__spec__ = ModuleSpec("matplotlib", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", package)
        patch.setitem(sys.modules, "matplotlib.figure", module)
        yield lines


@pytest.fixture(scope="module")
def twice(drawn: dict[str, Any]) -> tuple[Any, Any]:
    # Both runs use one server, whose earlier work must not change the numbers.
    with ServiceClient(base_url="local") as service:
        service.get_server_capabilities()
        return run_short(png="curves.png"), run_short()


def test_equal_seeds_give_equal_curves(twice: tuple[Any, Any]) -> None:
    (one, _), (two, _) = twice
    assert len(one.losses) == 8
    assert len(one.rewards) == 1
    assert (one.losses, one.rewards, one.lost) == (two.losses, two.rewards, two.lost)
    assert (one.stories_before, one.stories_after) == (two.stories_before, two.stories_after)
    assert one.checkpoint != two.checkpoint


def test_training_resumes_from_the_checkpoint_of_the_killed_process(twice: tuple[Any, Any]) -> None:
    (result, text), _ = twice
    assert result.resumed_at == 4
    assert result.lost_exactly
    assert len(result.lost) == crash.STEPS_LOST
    assert result.lost == result.repeated
    assert "exit code -9" in text
    assert f"saved after step 4: {result.checkpoint}\n" in text
    assert "repeated, gave the same losses as before" in text


def test_a_short_demo_learns_and_lists_failed_checks(twice: tuple[Any, Any]) -> None:
    (result, text), _ = twice
    assert result.losses[-1] < result.losses[0] * 0.6
    assert result.exit_code == 1
    for problem in result.problems:
        assert f"FAILED: {problem}\n" in text


def test_the_output_has_curves_stories_and_the_program(twice: tuple[Any, Any]) -> None:
    (result, text), _ = twice
    assert RECIPE in text
    assert "TINKER_API_KEY" in text
    assert "\r" not in text  # no progress into a stream that is not a terminal
    for word in ("loss per token", "mean reward", "sort: ", "a story about: dog"):
        assert word in text
    for story in result.stories_before:
        assert story.text.split()[0] in text


def test_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    with LocalServer(json_only=True) as server:
        monkeypatch.setenv("TINKER_API_KEY", server.key)  # for the child process
        result = run(server.url, steps=Steps(supervised=8, reinforced=1), out=out)
        assert server.calls_to("load_weights")
        assert f"tinker-sync/tiny on {server.url} (as you asked), seed 0\n" in out.getvalue()
    assert not result.lost_exactly
    assert len(result.losses) == 8
    assert server.key not in out.getvalue()


def test_png_draws_both_curves(twice: tuple[Any, Any], drawn: dict[str, Any]) -> None:
    (result, text), (_, without) = twice
    assert "the curves are drawn in curves.png\n" in text
    assert "curves.png" not in without
    assert list(drawn.values()) == [(list(range(1, 9)), result.losses), ([1], result.rewards)]


def test_the_printed_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert len([line for line in RECIPE.splitlines() if line.strip()]) <= 32
    assert max(map(len, RECIPE.splitlines())) < 80  # it fits into a usual terminal
    code = RECIPE
    for pattern, fewer, places in (
        (r"range\(\d+\):  #", "range(2):  #", 2),
        (r"range\(64\)", "range(4)", 1),
        (r"\(prompt, 32,", "(prompt, 4,", 1),
    ):
        code, changes = re.subn(pattern, fewer, code)
        assert changes == places
    exec(compile(code, "recipe", "exec"), {})
    steps = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [number for number, _ in steps] == ["0", "1"]
    assert all(0 <= float(reward) <= 1 for _, reward in steps)


def test_a_process_that_ends_by_itself_is_an_error() -> None:
    orders = {"base_url": "http://127.0.0.1:9", "model": "no/model"}
    with pytest.raises(TinkerError, match=r"(?s)ended by itself \(1\): .*Error"):
        crash.train_and_kill(orders, lambda _: None)


def test_an_unknown_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalServer(model="tinker-sync/random") as server:
        monkeypatch.setenv("TINKER_API_KEY", server.key)
        with pytest.raises(InvalidInputError, match="does not have org/small; it has tinker-sync/random"):
            run(server.url, model="org/small", out=io.StringIO())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": Steps(supervised=7)}, "at least 8 supervised and 1 reinforced"),
        ({"png": "nowhere/curves.png"}, "png: there is no directory nowhere to draw"),
        ({"png": "curves.png"}, "png: matplotlib is not installed"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    out = io.StringIO()
    with pytest.raises((InvalidInputError, ConfigurationError), match=words):
        run(out=out, **options)
    assert out.getvalue() == ""


def test_arguments_of_main(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def record(*args: Any, **options: Any) -> Any:
        calls.append((args, options))
        return SimpleNamespace(exit_code=1)

    monkeypatch.setattr(course, "run", record)
    assert main(["--base-url", "http://x", "--seed", "4", "--png", "a.png", "--supervised", "9"]) == 1
    steps = Steps(supervised=9, reinforced=30)
    assert calls == [(("http://x",), {"seed": 4, "png": "a.png", "model": None, "steps": steps})]
