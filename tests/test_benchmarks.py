"""The command that measures: it runs, its table has every subject, and its files can be read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parents[1]


def test_one_scenario_and_one_curve_from_end_to_end(tmp_path: Path) -> None:
    figures, charts = tmp_path / "figures.json", tmp_path / "charts"
    command = [sys.executable, "-m", "benchmarks", "--without-reference", "--quick", "--rounds", "1"]
    command += ["--only", "start", "chunks", "--json", str(figures), "--charts", str(charts)]
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "fresh interpreter to the first sample" in done.stdout
    found = json.loads(figures.read_text(encoding="utf-8"))
    [started] = found["scenarios"]["start"]["tinker_sync"]
    assert not started["numpy"]
    assert started["modules"] > found["scenarios"]["start"]["nothing"][0]["modules"]
    assert [size for size, _ in found["curves"]["chunks"]["tinker_sync"]] == [1, 5, 20, 80]
    drawn = ET.parse(charts / "chunks.svg").getroot()  # our own file
    assert len(drawn.findall(".//{http://www.w3.org/2000/svg}circle")) == 4
