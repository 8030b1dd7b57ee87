"""Curves of recorded runs."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from tinker_sync import InvalidInputError
from tinker_sync.errors import ConfigurationError
from tinker_sync.loop.plot import draw, page, read_run

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


def test_names_cannot_break_the_page() -> None:
    text = page({"loss": {"<script>": [(0, 1.0)]}})
    assert "<script>" not in text


def test_a_picture_without_a_path_goes_beside_the_run(tmp_path: Path) -> None:
    path = draw([run(tmp_path / "x", {"step": 0, "loss": 1})])
    assert path == tmp_path / "x" / ("plot.png" if HAS_MATPLOTLIB else "plot.html")
    assert path.stat().st_size > 500


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


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plot.png").write_bytes(b"\x89PNG\r\n\x1a\n\xff")
    with pytest.raises(InvalidInputError, match=r"plot\.png: it has no step yet"):
        read_run(tmp_path / "plot.png")


def test_a_value_that_is_not_finite_is_no_point_of_a_curve(tmp_path: Path) -> None:
    values = [1.0, float("nan"), float("inf"), 0.5]
    path = draw(
        [run(tmp_path / "x", *({"step": n, "loss": values[n]} for n in range(4)))], tmp_path / "a.html"
    )
    (curve,) = re.findall(r'<polyline points="([^"]+)"', path.read_text())
    assert len(curve.split()) == 2
    assert "nan" not in path.read_text()


def test_a_picture_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="runs: it is empty; name the directory"):
        draw([], tmp_path / "a.html")


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
