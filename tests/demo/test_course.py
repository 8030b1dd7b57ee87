"""The demo itself, shortened, on a server of its own; and the code it prints."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest

from tinker_sync.clients.service import ServiceClient
from tinker_sync.demo import RECIPE, DemoResult, Steps, crash, main, run
from tinker_sync.demo.command import run as commanded
from tinker_sync.demo.course import _Course
from tinker_sync.demo.screen import Screen
from tinker_sync.errors import InvalidInputError, TinkerError
from tinker_sync.testing import LocalServer

SHORT = Steps(supervised=8, reinforced=2)


def shortened(png: Path | None = None) -> tuple[DemoResult, str]:
    out = io.StringIO()
    return run(seed=3, steps=SHORT, png=png, out=out), out.getvalue()


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    path = tmp_path_factory.mktemp("demo") / "curves.png"
    # Over one server: what it did before must not matter either.
    with ServiceClient(base_url="local") as service:
        service.get_server_capabilities()
        return shortened(path), shortened(), path


def test_equal_seeds_give_equal_curves(twice: tuple[Any, Any, Path]) -> None:
    (one, _), (two, _), _ = twice
    assert len(one.losses) == 8
    assert len(one.rewards) == 2
    assert (one.losses, one.rewards, one.lost) == (two.losses, two.rewards, two.lost)
    assert (one.stories_before, one.stories_after) == (two.stories_before, two.stories_after)
    assert one.checkpoint != two.checkpoint


def test_training_goes_on_where_the_killed_process_had_saved(twice: tuple[Any, Any, Path]) -> None:
    (result, text), _, _ = twice
    assert result.resumed_at == 4
    assert result.lost_exactly
    assert len(result.lost) == crash.STEPS_LOST
    assert result.lost == result.repeated
    assert "exit code -9" in text
    assert f"saved after step 4: {result.checkpoint}\n" in text
    assert "repeated, gave the same losses as before" in text


def test_it_learns_even_in_a_few_steps_and_says_what_is_missing(twice: tuple[Any, Any, Path]) -> None:
    (result, text), _, _ = twice
    assert result.losses[-1] < result.losses[0] * 0.6
    assert result.exit_code == 1
    for problem in result.problems:
        assert f"NOT AS IT SHOULD BE: {problem}\n" in text


def test_everything_is_shown(twice: tuple[Any, Any, Path]) -> None:
    (result, text), _, path = twice
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert str(path) in text
    assert RECIPE in text
    assert "TINKER_API_KEY" in text
    assert "\r" not in text  # nobody watches: no progress
    for word in ("loss per token", "mean reward", "sort: ", "a story about: dog"):
        assert word in text
    for telling in result.stories_before:
        assert telling.text.split()[0] in text


def test_another_server_does_too(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    with LocalServer(json_only=True) as server:
        monkeypatch.setenv("TINKER_API_KEY", server.key)  # the process that is killed finds it there
        result = run(server.url, steps=Steps(supervised=8, reinforced=1), out=out)
        assert server.calls_to("load_weights")
        assert f"tinker-sync/tiny on {server.url} (as you asked), seed 0\n" in out.getvalue()
    assert not result.lost_exactly
    assert len(result.losses) == 8
    assert server.key not in out.getvalue()


def test_the_printed_code_runs_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert len([line for line in RECIPE.splitlines() if line.strip()]) <= 26
    assert max(map(len, RECIPE.splitlines())) <= 110
    code, changes = re.subn(r"range\(\d+\):  #", "range(2):  #", RECIPE)
    assert changes == 2
    exec(compile(code, "recipe", "exec"), {})
    steps = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [number for number, _ in steps] == ["0", "1"]
    assert all(0 <= float(reward) <= 1 for _, reward in steps)


def test_a_process_that_ends_by_itself_is_explained() -> None:
    told = {"base_url": "http://127.0.0.1:9", "model": "no/model"}
    with pytest.raises(TinkerError, match=r"(?s)ended by itself \(1\): .*Error"):
        crash.train_and_kill(told, lambda _: None)


def test_a_model_that_is_not_there_is_refused() -> None:
    class Offers:
        class holder:  # noqa: N801
            class settings:  # noqa: N801
                base_url, local = "http://127.0.0.1:9", None

        def get_server_capabilities(self) -> Any:
            return type("", (), {"supported_models": [type("", (), {"model_name": "org/large"})]})

    course = _Course(Offers(), Screen(io.StringIO()), 0, SHORT, "org/small")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"does not have org/small; it has org/large"):
        course.introduce()


def test_too_few_steps_are_refused_before_anything_is_started() -> None:
    with pytest.raises(InvalidInputError, match="at least 8 supervised and 1 reinforced"):
        run(steps=Steps(supervised=7), out=io.StringIO())


def test_a_place_for_curves_that_is_not_there_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    out = io.StringIO()
    with pytest.raises(InvalidInputError, match=r"png: there is no directory .*nowhere to draw"):
        run(steps=SHORT, png=tmp_path / "nowhere" / "curves.png", out=out)
    assert out.getvalue() == ""


def test_arguments_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Done:
        exit_code = 1

    def note(*args: Any, **options: Any) -> Done:
        asked.append((args, options))
        return Done()

    monkeypatch.setattr(f"{commanded.__module__.rsplit('.', 1)[0]}.command.run", note)
    assert main(["--base-url", "http://x", "--seed", "4", "--png", "a.png", "--supervised", "9"]) == 1
    [(args, options)] = asked
    assert args == ("http://x",)
    assert options["seed"] == 4
    assert options["png"] == "a.png"
    assert options["model"] is None
    assert options["steps"] == Steps(supervised=9, reinforced=30)
