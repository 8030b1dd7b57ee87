"""What benchmarks share that run two clients in turn: server and client processes, medians, the table."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MEGABYTE = 1e6

Figures = dict[str, float]


# ------------------------------------------------------------------------------------------ processes


def allow_many_files() -> None:
    """Raise this process's limit of open files as far as it may."""
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ImportError, OSError, ValueError):
        pass


def use_two_cores() -> None:
    """Keep this process, and those it starts, to two cores, where the system lets us choose."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])


@contextmanager
def stub_server(latency_s: float, config: Mapping[str, Any]) -> Iterator[str]:
    """The URL of a server in a process of its own, which ends with the block."""
    command = [sys.executable, str(HERE / "_quick_stub.py")]
    command += ["--latency", str(latency_s), "--config", json.dumps(dict(config))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def run_in_fresh_process(python: str, script: str, arguments: list[str], limit_s: float) -> Figures:
    """What a script prints as JSON in its last line; telemetry is off."""
    environment = {**os.environ, "TINKER_TELEMETRY": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [python, script, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=limit_s,
        check=True,
    )
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def medians(runs: list[Figures]) -> Figures:
    """Of each figure the median."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


# ------------------------------------------------------------------------------------------ memory


def resident_mb(name: str) -> float:
    """`VmRSS`, the resident set, `RssAnon`, its part in no file, `VmHWM`, its peak. Only on Linux; else 0."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0.0
    return int(status.split(f"{name}:")[1].split()[0]) * 1024 / MEGABYTE


def reset_peak() -> float:
    """Let the peak of the resident set start again from here; gives what is resident now."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return resident_mb("VmRSS")


# ------------------------------------------------------------------------------------------ the table


class Floor(NamedTuple):
    """One line of the table: a figure, and what ours may be at most, as a share of the reference's."""

    figure: str
    label: str
    unit: str
    share: float | None = None
    most: float | None = None
    """An absolute bound in place of a share."""
    least: float | None = None
    """For figures of which more is better: at least so many times the reference's."""

    def holds(self, ours: float, theirs: float) -> bool | None:
        """None where there is nothing to hold."""
        if self.share is not None:
            return ours <= self.share * theirs
        if self.most is not None:
            return ours <= self.most
        return ours >= self.least * theirs if self.least is not None else None

    @property
    def words(self) -> str:
        if self.share is not None:
            return f"<= {self.share:.2f}x"
        if self.most is not None:
            return f"<= {self.most:g}"
        return f">= {self.least:.1f}x" if self.least is not None else "-"


def print_head() -> None:
    print(f"{'figure':58}{'ours':>10}{'reference':>11}{'ratio':>8}{'floor':>11}  ok", flush=True)


def print_rows(title: str, floors: list[Floor], ours: Figures, theirs: Figures) -> bool:
    """Print a block of the table; whether every floor in it holds."""
    print(title)
    held = True
    for floor in floors:
        mine, other = ours[floor.figure], theirs[floor.figure]
        holds = floor.holds(mine, other)
        held &= holds is not False
        ratio = f"{mine / other:8.3f}" if other else f"{'':8}"
        verdict = {None: "", True: "ok", False: "MISSED"}[holds]
        label = f"  {floor.label}, {floor.unit}"
        print(f"{label:58}{mine:10.2f}{other:11.2f}{ratio}{floor.words:>11}  {verdict}", flush=True)
    return held


Case = Callable[..., Figures]
