"""`StepRecorder`: the content of a line, and the continuation of a run."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.clock import FakeClock

from tinker_sync import APIFuture, InvalidInputError
from tinker_sync.insight.meter import TokenCounts
from tinker_sync.loop.plot import read_run
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
        made.log(1, {"loss": float("nan")})
        first, second = lines(made.path)  # both are there before it is closed
    assert {name: first[name] for name in ("step", "loss:sum", "reward", "step_s", "call_s", "tokens")} == {
        "step": 0, "loss:sum": 3.0, "reward": 0.5, "step_s": 2.5, "call_s": 2.0,
        "tokens": {"trained": 4, "sampled": 2},
    }  # fmt: skip
    assert (second["loss"], second["step_s"], second["tokens"]) == (None, 1.0, {"sampled": 1})
    assert "call_s" not in second


@pytest.mark.parametrize("step", [3, np.int64(3), np.uint8(3)])
def test_a_step_is_a_whole_number_of_any_library(tmp_path: Path, step: Any) -> None:
    with recorder(tmp_path) as made:
        assert made.log(step)["step"] == 3
    assert lines(made.path)[0]["step"] == 3


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


def test_a_closed_recorder_refuses_a_line(tmp_path: Path) -> None:
    with recorder(tmp_path) as made:
        made.log(0)
    with pytest.raises(InvalidInputError, match="log: the recorder is closed"):
        made.log(1)
    assert len(lines(made.path)) == 1
