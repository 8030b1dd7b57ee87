"""Both clients run the same programs behind the same faults. The engine's ledger shows their mistakes.

`FAULT_RUNS=40 pytest -s tests/interop/test_faults_oracle.py` prints a line for each client and each set of
damages. The first set has damages of `PASSING`, in spite of which all calls must succeed. The second set also
has `LYING`, after which a call may fail. The two clients meet the same damages in the program of a seed, as
long as they send the same requests.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from interop.programs import Programs
from support.engine_ledger import Applied
from support.fault_proxy import LYING, PASSING, FaultProxy
from support.fault_world import Ground, ground

RUNS = int(os.environ.get("FAULT_RUNS", "1"))
LIMIT_S = 150
SCRIPT = Path(__file__).parent / "faults_script.py"
_QUICK = tuple(kind for kind in PASSING if kind != "silent")

Said = tuple[str, list[Any], str, Any]


def run(programs: Programs, land: Ground, package: str, seed: int, *, lies: bool) -> Counter[str]:
    """Run the program of a seed with a client. Return counts by name: calls, mistakes, and damages."""
    chance = random.Random(seed)
    kinds = tuple(chance.sample(_QUICK, 7))
    if lies:
        kinds = (*kinds[:4], *LYING)
    with FaultProxy(land.port, seed=seed, rate=chance.choice((0.05, 0.15, 0.3)), kinds=kinds) as proxy:
        command = [package, proxy.url, land.server.key, str(seed)]
        out = programs.run(package, SCRIPT, *command, patience_s=LIMIT_S).out
        struck = sum(proxy.struck.values())
    said: list[Said] = [tuple(json.loads(line)) for line in out.splitlines()]  # type: ignore[misc]
    found = judge(said, ledger_of(land, said), land)
    found["struck"] = struck
    return found


def ledger_of(land: Ground, said: list[Said]) -> list[Applied]:
    """Return the engine's work on the model of a run, which is found by the unique marks in its calls."""
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
            found[f"{kind} failed with {state}"] += 1
        elif kind == "sample":
            found["foreign answers"] += value != [list(one) for one in land.tokens[marks[0]]]
        elif not set(marks) <= set(applied):
            found["lost"] += 1
        elif kind == "pass":
            found["foreign answers"] += value != [logprobs[mark] for mark in marks]
    return found


@pytest.mark.parametrize("lies", [False, True], ids=["passing", "lying"])
@pytest.mark.parametrize("package", ["tinker_sync", "tinker"])
def test_the_same_programs_under_the_same_faults(programs: Programs, package: str, lies: bool) -> None:
    runs: list[Counter[str]] = []
    with ground() as land:
        for seed in range(RUNS * lies, RUNS * (lies + 1)):
            runs.append(run(programs, land, package, seed, lies=lies))
            land.forget()
    wrong = ("hung", "calls without an end", "failed", "lost", "doubled", "out of order", "foreign answers")
    shares = ", ".join(
        f"{name}: {sum(each[name] for each in runs)} in {sum(bool(each[name]) for each in runs)} runs"
        for name in wrong
    )
    calls, struck = (sum(each[name] for each in runs) for name in ("calls", "struck"))
    failures = dict(sorted((name, count) for name, count in sum(runs, Counter()).items() if " with " in name))
    kind = "with lies" if lies else "without lies"
    counts = f"{RUNS} runs, {calls} calls, {struck} damages"
    sys.stdout.write(f"\n{package} {kind}: {counts}; {shares} {failures}\n")
    if package == "tinker_sync":
        allowed = {"failed"} if lies else set()
        assert not any(each[name] for each in runs for name in set(wrong) - allowed)
