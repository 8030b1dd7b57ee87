"""Both clients run the same programs behind the same faults; the engine's ledger judges them.

`FAULT_RUNS=40 pytest -s tests/interop/test_faults_oracle.py` prints a line for each client. The runs of a
seed meet the same damages as long as they send the same requests.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.engine_ledger import Applied
from support.fault_proxy import PASSING, FaultProxy
from support.fault_world import Ground, ground

RUNS = int(os.environ.get("FAULT_RUNS", "1"))
LIMIT_S = 150.0
SCRIPT = Path(__file__).parent / "faults_script.py"
_QUICK = tuple(kind for kind in PASSING if kind != "silent")

Said = tuple[str, list[Any], str, Any]


def run(land: Ground, package: str, seed: int) -> Counter[str]:
    """Run the program of a seed, and return what went wrong in it."""
    chance = random.Random(seed)
    kinds = tuple(chance.sample(_QUICK, 7))
    with FaultProxy(land.port, seed=seed, rate=chance.choice((0.05, 0.15, 0.3)), kinds=kinds) as proxy:
        command = [sys.executable, str(SCRIPT), package, proxy.url, land.server.key, str(seed)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | _path()
        )
        try:
            out, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
        struck = sum(proxy.struck.values())
    said: list[Said] = [tuple(json.loads(line)) for line in out.splitlines()]  # type: ignore[misc]
    found = judge(said, ledger_of(land, said), land)
    found["struck"] = struck
    return found


def _path() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(__file__).parents[2])}


def ledger_of(land: Ground, said: list[Said]) -> list[Applied]:
    """Return what was done to the model of a run: the runs go one after the other, each with one model."""
    marks = {mark for kind, marks, _, _ in said if kind != "sample" for mark in marks}
    runs = land.ledger.with_marks(marks)
    return [applied for each in runs for applied in each]


def judge(said: list[Said], ledger: list[Applied], land: Ground) -> Counter[str]:
    found: Counter[str] = Counter()
    if not said or said[-1][0] != "end":
        found["hung"] += 1
    applied = [mark for each in ledger for mark in each.marks]
    found["doubled"] += sum(count > 1 for count in Counter(applied).values())
    training = [mark for kind, marks, _, _ in said if kind in ("pass", "step", "save") for mark in marks]
    asked_in_order = sorted(training, key=lambda mark: int(str(mark).lstrip("s")))
    once = list(dict.fromkeys(applied))
    found["out of order"] += once != [mark for mark in asked_in_order if mark in set(once)]
    logprobs = {
        mark: list(row) for each in ledger for mark, row in zip(each.marks, each.logprobs, strict=False)
    }
    for kind, marks, state, value in said:
        if kind == "end":
            continue
        found["calls"] += 1
        if state == "hung":
            found["calls without an end"] += 1
        elif state != "ok":
            found["failed"] += 1
        elif kind == "sample":
            found["foreign answers"] += value != [list(one) for one in land.tokens[marks[0]]]
        elif not set(marks) <= set(applied):
            found["lost"] += 1
        elif kind == "pass":
            found["foreign answers"] += value != [logprobs[mark] for mark in marks]
    return found


@pytest.mark.parametrize("package", ["tinker_sync", "tinker"])
def test_the_same_programs_under_the_same_faults(package: str) -> None:
    runs: list[Counter[str]] = []
    with ground() as land:
        for seed in range(RUNS):
            runs.append(run(land, package, seed))
            land.ledger.forget()
            land.server.forget()
    wrong = ("hung", "calls without an end", "failed", "lost", "doubled", "out of order", "foreign answers")
    shares = ", ".join(
        f"{name}: {sum(each[name] for each in runs)} in {sum(bool(each[name]) for each in runs)} runs"
        for name in wrong
    )
    calls, struck = (sum(each[name] for each in runs) for name in ("calls", "struck"))
    sys.stdout.write(f"\n{package}: {RUNS} runs, {calls} calls, {struck} damages; {shares}\n")
    if package == "tinker_sync":
        assert not any(each[name] for each in runs for name in wrong)
