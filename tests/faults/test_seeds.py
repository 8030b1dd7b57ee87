"""Random programs on several threads, while the network fails at random.

A handful of seeds run with the suite; `FAULT_SEEDS=2000 pytest tests/faults/test_seeds.py` runs as many, from
`FAULT_FIRST` on. A failure names its seed.
"""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Iterator

import pytest
from support import isolation
from support.crowd import until
from support.fault_runner import live, totals
from support.fault_world import Ground, ground

pytestmark = pytest.mark.usefixtures("quiet_logs")

SEEDS = int(os.environ.get("FAULT_SEEDS", "6"))
FIRST = int(os.environ.get("FAULT_FIRST", "0"))


@pytest.fixture(scope="module")
def land() -> Iterator[Ground]:
    with ground() as made:
        yield made
    report = os.environ.get("FAULT_REPORT")
    if report:
        with open(report, "a") as file:
            file.write(json.dumps(dict(sorted(totals.items()))) + "\n")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_nothing_is_lost_doubled_or_mixed_up(land: Ground, seed: int) -> None:
    before = isolation.our_threads() | {one for one in threading.enumerate() if one.name == "aside"}
    # Keep only the problems: a failed assertion would keep the world with its clients and their threads.
    problems = live(land, seed).problems
    gc.collect()
    assert not problems, "\n".join([f"seed {seed}", *problems])
    totals["seeds"] += 1
    land.forget()
    until(lambda: isolation.our_threads() <= before)
