"""The seeded runner for a long time: threads and files stay as they were, memory stays flat.

`FAULT_SOAK_S=1800 pytest -s tests/faults/test_soak.py` runs for half an hour, from the seed `FAULT_FIRST` on.
It prints the memory, threads, files, and requests per second of processor time for each tenth of the run. By
default it runs for a moment, which is too short to judge the memory.

The server runs in another process, so that the memory is that of the clients and the proxy. Free memory must
not count as used. So all threads share one heap, because each heap keeps free pieces of its own, and the heap
returns its free pages before each look. Otherwise one program that needs much memory for a moment raises all
later looks, for example when the machine has just become less busy.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import statistics
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from support import isolation
from support.crowd import until
from support.fault_runner import live, totals
from support.fault_world import ground_apart

pytestmark = pytest.mark.usefixtures("quiet_logs")

SECONDS = float(os.environ.get("FAULT_SOAK_S", "2"))
FIRST = int(os.environ.get("FAULT_FIRST", "0"))
# Before this time memory grows, because modules load and each pool makes its connections.
_WARM_S = min(SECONDS / 3, 90.0)
# The server drops models soon, because otherwise a long run would need too much memory.
_RELEASE_S = 1.0
_ABANDONED_S = 20.0
_SLACK = 0.02
# The smallest allowed rate, as a share of the first. Other processes of the machine change how many requests
# fit into a second of processor time.
_SLOWEST = 0.75
# A shorter run judges neither the memory nor the rate.
_JUDGED_S = 300.0
_ARENA_MAX = -8  # M_ARENA_MAX, see mallopt(3)
_FILES = Path("/proc/self/fd")


@pytest.fixture(autouse=True)
def one_heap() -> None:
    with suppress(AttributeError):  # a C library without `mallopt`
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def resident_bytes() -> int:
    """Return the memory that this process uses, after the C library has returned free pages to the system."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Look(NamedTuple):
    """Figures of this process after the program of a seed, all of them floats, to be kept in an array."""

    at_s: float
    memory: float
    threads: float
    files: float
    requests: float
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


def memory_in(part: list[Look]) -> float:
    return statistics.median(look.memory for look in part)


def rate_in(part: list[Look]) -> float:
    """Return the requests per second of processor time in a part of the run."""
    return (part[-1].requests - part[0].requests) / (part[-1].cpu_s - part[0].cpu_s)


def describe(looks: list[Look]) -> Iterator[str]:
    """Yield a line of figures for each tenth of the run."""
    size = max(len(looks) // 10, 1)
    for start in range(0, len(looks) - size, size):
        part = looks[start : start + size + 1]
        threads, files = {int(look.threads) for look in part}, {int(look.files) for look in part}
        state = f"{memory_in(part) / 1e6:.1f} MB, threads {threads}, files {files}"
        yield f"{part[0].at_s:6.0f} s: {state}, {rate_in(part):.1f} requests a CPU second\n"


@pytest.mark.skipif(not _FILES.exists(), reason="reads what Linux shows of a process")
def test_threads_files_and_memory_stay_as_they_were() -> None:
    settings = {"kept_results_bytes": 1_000_000, "abandoned_after_s": _ABANDONED_S}
    with ground_apart(release_s=_RELEASE_S, **settings) as land:
        threads, files = isolation.our_threads(), len(list(_FILES.iterdir()))
        # Objects would take half a megabyte in half an hour, which would count as growth.
        began, figures = time.monotonic(), array("d")
        for seed in itertools.count(FIRST):
            problems = live(land, seed).problems
            gc.collect()
            assert not problems, "\n".join([f"seed {seed}", *problems])
            land.forget()
            until(lambda: isolation.our_threads() <= threads)
            until(lambda: len(list(_FILES.iterdir())) <= files)
            look = Look.now(began)
            figures.extend(look)
            if look.at_s > SECONDS:
                break
    looks = [Look(*figures[at : at + len(look)]) for at in range(0, len(figures), len(look))]
    sys.stdout.write("".join(describe(looks)))
    sys.stdout.write(f"{len(looks)} seeds from {FIRST}: {json.dumps(dict(sorted(totals.items())))}\n")
    assert threading.active_count() < 50
    if SECONDS >= _JUDGED_S:
        warm = [look for look in looks if look.at_s > _WARM_S]
        first, last = warm[: len(warm) // 4], warm[-(len(warm) // 4) :]
        assert memory_in(last) <= memory_in(first) * (1 + _SLACK)
        assert rate_in(last) >= rate_in(first) * _SLOWEST
