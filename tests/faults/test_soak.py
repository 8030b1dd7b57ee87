"""The seeded runner for a long time: threads and files stay as they were, memory stays flat.

`FAULT_SOAK_S=1800 pytest -s tests/faults/test_soak.py` runs for half an hour; the suite runs it for a moment,
which is too short to judge the memory.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import statistics
import sys
import threading
import time
from pathlib import Path

import pytest
from support import isolation
from support.crowd import until
from support.fault_runner import live
from support.fault_world import ground

SECONDS = float(os.environ.get("FAULT_SOAK_S", "2"))
# The server keeps the models of a session for a minute after its end.
_WARM_S = 90.0
_SLACK = 0.02
_FILES = Path("/proc/self/fd")


@pytest.fixture(autouse=True)
def quiet_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "tinker_sync")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not _FILES.exists(), reason="reads what Linux shows of a process")
def test_threads_files_and_memory_stay_as_they_were() -> None:
    with ground(kept_results_bytes=1_000_000) as land:
        threads, files = isolation.our_threads(), len(list(_FILES.iterdir()))
        began, sizes = time.monotonic(), []
        for seed in itertools.count():
            world = live(land, seed)
            assert not world.problems, "\n".join([f"seed {seed}", *world.problems])
            land.ledger.forget()
            land.ledger.saved.clear()
            land.server.forget()
            del world
            gc.collect()
            until(lambda: isolation.our_threads() <= threads)
            until(lambda: len(list(_FILES.iterdir())) <= files)
            passed = time.monotonic() - began
            if passed > _WARM_S:
                sizes.append(resident_bytes())
            if passed > SECONDS:
                break
    if len(sizes) >= 40:
        quarter = len(sizes) // 4
        first, last = statistics.median(sizes[:quarter]), statistics.median(sizes[-quarter:])
        sys.stdout.write(f"memory {first / 1e6:.1f} to {last / 1e6:.1f} MB, {seed + 1} seeds\n")
        assert last <= first * (1 + _SLACK)
    assert threading.active_count() < 50
