"""Processes of a benchmark: the stub server, a client in a fresh interpreter, what they cost, medians."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
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
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        pass


def use_two_cores() -> None:
    """Keep this process, and those it starts, to two cores, where the system lets us choose."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])


class Server(NamedTuple):
    """A stub server in a process of its own."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        """Return the CPU that it has used so far; 0 where the system does not show it."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def stub_server(
    latency_s: float, config: Mapping[str, Any], options: tuple[str, ...] = ()
) -> Iterator[Server]:
    """Run a stub server that ends with the block."""
    command = [sys.executable, str(HERE / "_quick_stub.py")]
    command += ["--latency", str(latency_s), "--config", json.dumps(dict(config)), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Server(f"http://127.0.0.1:{int(process.stdout.readline())}", process.pid)
        finally:
            process.kill()


def run_in_fresh_process(command: list[str], limit_s: float = 300.0) -> Figures:
    """Return what a script prints as JSON in its last line. Telemetry is off, byte code is kept."""
    environment = {**os.environ, "TINKER_TELEMETRY": "0", "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(f"{' '.join(command[1:4])} ended with {done.returncode}: {done.stderr[-2000:]}")
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def run_command(command: list[str], limit_s: float = 120.0) -> Figures:
    """Return wall time and CPU of a command, from its start to its end."""
    environment = {**os.environ, "TINKER_API_KEY": "tml-benchmark", "TINKER_TELEMETRY": "0"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=environment, capture_output=True, timeout=limit_s, check=True)
    wall_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_ms": wall_s * 1e3, "cpu_ms": cpu_s * 1e3}


def medians(runs: list[Figures]) -> Figures:
    """Return the median of each figure."""
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
