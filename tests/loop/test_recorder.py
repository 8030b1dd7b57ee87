"""`StepRecorder`: the content of a line, and the continuation of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.clock import FakeClock

from tinker_sync import APIFuture, InvalidInputError
from tinker_sync.loop.recorder import StepRecorder
from tinker_sync.types import ForwardBackwardOutput, OptimStepResponse
from tinker_sync.usage.meter import TokenCounts


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


def test_a_run_goes_on_after_a_line_that_was_cut_short(tmp_path: Path) -> None:
    with recorder(tmp_path) as made:
        made.log(0, {"loss": 1.0})
    made.path.write_bytes(made.path.read_bytes() + b'{"step": 1, "lo')
    with recorder(tmp_path) as again:
        again.log(1, {"loss": 0.5})
    assert json.loads(made.path.read_text().splitlines()[-1])["loss"] == 0.5


@pytest.mark.parametrize(
    ("step", "results", "values", "complaint"),
    [
        (-1, (), {}, "step: expected a whole number from 0 on, got -1"),
        ("3", (), {}, "step: expected a whole number from 0 on, got '3'"),
        (0, (7.5,), {}, r"results\[0\]: expected a future.* got float; give other values by name"),
        (0, (), {"tokens": 3}, "'tokens' is written by the recorder; use another name"),
    ],
)
def test_what_has_no_place_in_a_line_is_refused(
    tmp_path: Path, step: Any, results: Any, values: Any, complaint: str
) -> None:
    with recorder(tmp_path) as made, pytest.raises(InvalidInputError, match=complaint):
        made.log(step, *results, **values)
    assert made.path.read_bytes() == b""
