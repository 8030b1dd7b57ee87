"""`StepRecorder`: the lines of a run and their curves."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.clock import FakeClock

from tinker_sync import APIFuture, InvalidInputError
from tinker_sync.errors import ConfigurationError
from tinker_sync.insight.meter import TokenCounts
from tinker_sync.loop.plot import draw, read_run
from tinker_sync.loop.recorder import StepRecorder
from tinker_sync.types import ForwardBackwardOutput, OptimStepResponse


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def recorder(directory: Path, clock: FakeClock | None = None, counts: Any = None) -> StepRecorder:
    counted = iter(counts or [TokenCounts()] * 9)
    return StepRecorder(directory, lambda: next(counted), clock=clock or FakeClock())


def test_a_line_has_metrics_timings_and_usage_of_its_step(tmp_path: Path) -> None:
    clock = FakeClock()
    counts = [TokenCounts(trained=5), TokenCounts(trained=9, sampled=2), TokenCounts(trained=9, sampled=3)]
    passed: APIFuture[ForwardBackwardOutput] = APIFuture(clock=clock)
    with recorder(tmp_path / "runs" / "x", clock, counts) as made:
        clock.advance(2.0)
        passed.resolve(ForwardBackwardOutput("x", [], {"loss:sum": 3.0}))
        clock.advance(0.5)
        made.log(0, passed, OptimStepResponse(metrics=None), reward=np.float32(0.5), note=None)
        clock.advance(1.0)
        made.log(np.int64(1), {"loss": float("nan")})  # type: ignore[arg-type]
        first, second = lines(made.path)  # both are there before it is closed
    assert {name: first[name] for name in ("step", "loss:sum", "reward", "step_s", "call_s", "tokens")} == {
        "step": 0, "loss:sum": 3.0, "reward": 0.5, "step_s": 2.5, "call_s": 2.0,
        "tokens": {"trained": 4, "sampled": 2},
    }  # fmt: skip
    assert (second["step"], second["loss"], second["step_s"]) == (1, None, 1.0)
    assert second["tokens"] == {"sampled": 1}
    assert "call_s" not in second


def test_a_run_goes_on_after_a_line_that_was_cut_short(tmp_path: Path) -> None:
    with recorder(tmp_path) as made:
        made.log(0, {"loss": 1.0})
    made.path.write_bytes(made.path.read_bytes() + b'{"step": 1, "lo')
    with recorder(tmp_path) as again:
        again.log(1, {"loss": 0.5})
    assert json.loads(made.path.read_text().splitlines()[-1])["loss"] == 0.5


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of a file")
def test_a_line_that_a_full_disk_cut_short_is_an_error_and_damages_no_other(tmp_path: Path) -> None:
    resource = importlib.import_module("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with recorder(tmp_path) as made:
        made.log(0, {"loss": 2.0})
        resource.setrlimit(resource.RLIMIT_FSIZE, (made.path.stat().st_size + 10, before[1]))
        try:
            with pytest.raises(OSError, match="the disk may be full"):
                made.log(1, {"loss": 1.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        made.log(2, {"loss": 0.5})
    assert [line["step"] for line in read_run(tmp_path)] == [0, 2]


@pytest.mark.parametrize(
    ("step", "results", "values", "complaint"),
    [
        (-1, (), {}, "step: expected a whole number from 0 on, got -1"),
        ("3", (), {}, "step: expected a whole number from 0 on, got '3'"),
        (0, (7.5,), {}, r"results\[0\]: expected a future.* got float; give other values by name"),
        (0, (), {"x": np.ones(3)}, "x: expected a single value"),
        (0, ({"y": np.ones(3)},), {}, "y: expected a single value"),
        (0, (), {"tokens": 3}, "'tokens' is written by the recorder; use another name"),
    ],
)
def test_odd_values_are_refused(tmp_path: Path, step: Any, results: Any, values: Any, complaint: str) -> None:
    with recorder(tmp_path) as made, pytest.raises(InvalidInputError, match=complaint):
        made.log(step, *results, **values)
    assert made.path.read_bytes() == b""


HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def run(path: Path, *lines: Any) -> Path:
    path.mkdir(parents=True)
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    (path / "metrics.jsonl").write_text(text)
    return path


def test_the_last_line_of_a_step_counts(tmp_path: Path) -> None:
    directory = run(
        tmp_path / "x", {"step": 1, "loss": 5}, {"step": 0, "loss": 9}, {"step": 1, "loss": 4}, '{"st'
    )
    assert [(line["step"], line["loss"]) for line in read_run(directory)] == [(0, 9), (1, 4)]


def test_foreign_lines_and_values_draw_nothing(tmp_path: Path) -> None:
    foreign: list[Any] = [
        [1], 7, "null", "[" * 100_000, {"step": "x"}, {"step": 1, "tokens": 7},
        {"step": 2, "tokens": {"a": "b", "c": [1]}}, {"step": 3, "loss": 10**400}, {"step": 4, "loss": [1]},
    ]  # fmt: skip
    directory = run(tmp_path / "x", *foreign, {"step": 5, "loss": 1.0, "tokens": {"trained": 3, "x": None}})
    text = draw([directory], tmp_path / "curves.html").read_text()
    assert re.findall(r"<h2>(\w+)</h2>", text) == ["loss", "tokens"]


def test_a_page_has_a_panel_for_what_was_recorded_and_refers_to_nothing(tmp_path: Path) -> None:
    lines = [
        {"step": n, "loss:mean": 2.0 / (n + 1), "tokens": {"trained": n}, "step_s": 0.5} for n in range(5)
    ]
    one = run(tmp_path / "a" / "x", *lines)
    two = run(tmp_path / "b" / "x", {"step": 0, "loss:mean": 1.0, "reward": 0.1})
    path = draw([one, two], tmp_path / "curves.html")
    text = path.read_text()
    assert re.findall(r"<h2>(\w+)</h2>", text) == ["loss", "reward", "tokens", "seconds"]
    assert "http" not in text
    assert text.count(str(two)) >= 1  # paths distinguish runs with the same name
    for drawn in re.findall(r"<svg.*?</svg>", text):
        for number in re.findall(r' [xyc]+[12]?="([^"]+)"', ET.tostring(ET.fromstring(drawn)).decode()):
            assert 0 <= float(number) <= 560


def test_the_users_own_values_and_metrics_have_panels(tmp_path: Path) -> None:
    lines = [
        {
            "step": n, "time": 1.0, "loss:mean": 1.0, "loss:sum": 2.0, "accuracy": n / 5, "kl:mean": 0.1,
            "note": "text", "clock:unique": 7, "weights:hash2": 8, "done": True, "bad": None,
        }
        for n in range(3)
    ]  # fmt: skip
    path = draw([run(tmp_path / "x", *lines), run(tmp_path / "y", {"step": 0, "k": 1})], tmp_path / "a.html")
    assert re.findall(r"<h2>(.*?)</h2>", path.read_text()) == ["loss", "accuracy", "kl:mean", "k"]


@pytest.mark.parametrize(
    ("lines", "to", "complaint"),
    [
        (None, "a.html", "there is no metrics.jsonl"),
        ([], "a.html", "no step"),
        ([{"step": 0, "loss": 1}], "a.gif", "ends with"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path: Path, lines: Any, to: str, complaint: str) -> None:
    directory = tmp_path / "x" if lines is None else run(tmp_path / "x", *lines)
    with pytest.raises(InvalidInputError, match=complaint):
        draw([directory], tmp_path / to)


@pytest.mark.skipif(HAS_MATPLOTLIB, reason="matplotlib is installed")
def test_a_png_needs_matplotlib(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"pip install matplotlib, or name an \.html file"):
        draw([run(tmp_path / "x", {"step": 0, "loss": 1})], tmp_path / "a.png")


def test_the_command_draws_and_prints_the_path(tmp_path: Path) -> None:
    directory = run(tmp_path / "x", {"step": 0, "loss": 1}, {"step": 1, "loss": 0.5})
    to = tmp_path / "out.html"
    command = [sys.executable, "-m", "tinker_sync", "plot", str(directory), "--to", str(to)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert str(to) in done.stdout.replace("\n", "")
    assert "polyline" in to.read_text()


def test_a_picture_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="runs: it is empty; name the directory"):
        draw([], tmp_path / "a.html")


def test_a_closed_recorder_refuses_a_line(tmp_path: Path) -> None:
    with recorder(tmp_path) as made:
        made.log(0)
    with pytest.raises(InvalidInputError, match="log: the recorder is closed"):
        made.log(1)
    assert len(lines(made.path)) == 1
