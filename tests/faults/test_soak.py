"""The seeded runner for a long time: threads and files stay as they were, memory stays flat.

`FAULT_SOAK_S=1800 pytest -s tests/faults/test_soak.py` runs for half an hour, from the seed `FAULT_FIRST` on,
and prints for each tenth of it the memory, threads, files, and requests per second of processor time. The
suite runs it for a moment, which is too short to judge the memory.

The server runs in this process. It keeps the models of a session that no client finishes until the session
is silent for `_ABANDONED_S`.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support import isolation
from support.crowd import until
from support.fault_runner import live, totals
from support.fault_world import ground

SECONDS = float(os.environ.get("FAULT_SOAK_S", "2"))
FIRST = int(os.environ.get("FAULT_FIRST", "0"))
# Until then memory grows: modules load, and the server keeps its first models and results.
_WARM_S = min(SECONDS / 3, 90.0)
_RELEASE_S = 1.0
_ABANDONED_S = 20.0
_SLACK = 0.02
# A shorter run does not judge the memory.
_JUDGED_S = 300.0
_FILES = Path("/proc/self/fd")


@pytest.fixture(autouse=True)
def quiet_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "tinker_sync")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Look(NamedTuple):
    """The state of this process after a seed."""

    at_s: float
    memory: int
    threads: int
    files: int
    requests: int
    cpu_s: float

    @classmethod
    def now(cls, began: float) -> Look:
        return cls(
            time.monotonic() - began,
            resident_bytes(),
            threading.active_count(),
            len(list(_FILES.iterdir())),
            totals["requests"],
            time.process_time(),
        )


def describe(looks: list[Look]) -> Iterator[str]:
    """Return a line for each tenth of the run."""
    size = max(len(looks) // 10, 1)
    for start in range(0, len(looks) - size, size):
        part, following = looks[start : start + size], looks[start + size]
        rate = (following.requests - part[0].requests) / (following.cpu_s - part[0].cpu_s)
        memory = statistics.median(look.memory for look in part) / 1e6
        threads, files = {look.threads for look in part}, {look.files for look in part}
        state = f"{memory:.1f} MB, threads {threads}, files {files}"
        yield f"{part[0].at_s:6.0f} s: {state}, {rate:.1f} requests a CPU second\n"


@pytest.mark.skipif(not _FILES.exists(), reason="reads what Linux shows of a process")
def test_threads_files_and_memory_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    # The server keeps the models of a session for a minute after its end, which is as long as a short run.
    monkeypatch.setattr("tinker_sync.local.server.sessions.RELEASE_S", _RELEASE_S)
    with ground(kept_results_bytes=1_000_000, abandoned_after_s=_ABANDONED_S) as land:
        threads, files = isolation.our_threads(), len(list(_FILES.iterdir()))
        began, looks = time.monotonic(), []
        for seed in itertools.count(FIRST):
            problems = live(land, seed).problems
            gc.collect()
            assert not problems, "\n".join([f"seed {seed}", *problems])
            land.ledger.forget()
            land.ledger.saved.clear()
            land.server.forget()
            until(lambda: isolation.our_threads() <= threads)
            until(lambda: len(list(_FILES.iterdir())) <= files)
            looks.append(Look.now(began))
            if looks[-1].at_s > SECONDS:
                break
    sys.stdout.write("".join(describe(looks)))
    sys.stdout.write(f"{len(looks)} seeds from {FIRST}: {json.dumps(dict(sorted(totals.items())))}\n")
    sizes = [look.memory for look in looks if look.at_s > _WARM_S]
    if SECONDS >= _JUDGED_S:
        quarter = len(sizes) // 4
        assert statistics.median(sizes[-quarter:]) <= statistics.median(sizes[:quarter]) * (1 + _SLACK)
    assert threading.active_count() < 50
