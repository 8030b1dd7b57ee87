"""Processes of a benchmark, the stub server and clients in fresh interpreters, and their CPU and memory."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
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
    """Raise the limit of open files of this process as far as the system allows."""
    try:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        pass


def use_two_cores() -> None:
    """Limit this process, and those that it starts, to two cores. On some systems this does nothing."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])


class Server(NamedTuple):
    """A stub server in a process of its own."""

    url: str
    pid: int
    port: int

    def cpu_s(self) -> float:
        """Return the seconds of CPU that the server has used so far; outside of Linux, 0."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def stub_server(
    latency_s: float, config: Mapping[str, Any], options: tuple[str, ...] = ()
) -> Iterator[Server]:
    """Run a stub server until the end of the block."""
    command = [sys.executable, str(HERE / "_quick_stub.py")]
    command += ["--latency", str(latency_s), "--config", json.dumps(dict(config)), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            scheme = "https" if "--tls" in options else "http"
            yield Server(f"{scheme}://127.0.0.1:{port}", process.pid, port)
        finally:
            process.kill()


class Relayed(NamedTuple):
    """A server behind a network."""

    url: str
    figures: Callable[[], Figures]
    """Returns what the network has counted so far."""


@contextmanager
def network(server: Server, one_way_ms: float, bytes_per_s: float | None) -> Iterator[Relayed]:
    """Run a relay in front of a server until the end of the block."""
    command = [sys.executable, str(HERE / "_wan.py"), "--to", str(server.port)]
    command += ["--one-way-ms", str(one_way_ms), "--bytes-per-s", str(bytes_per_s or "inf")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            asks, answers = process.stdin, process.stdout
            assert asks is not None
            assert answers is not None
            url = server.url.replace(str(server.port), str(int(answers.readline())))

            def figures() -> Figures:
                print(file=asks, flush=True)
                counted: Figures = json.loads(answers.readline())
                return counted

            yield Relayed(url, figures)
        finally:
            process.kill()


def make_certificate(folder: str) -> tuple[str, str]:
    """Make a certificate for a server on loopback.

    Return the file with the certificate and its key, and the file with the certificates that clients trust.
    """
    import trustme

    authority = trustme.CA()
    server, trusted = Path(folder, "server.pem"), Path(folder, "trusted.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(server))
    authority.cert_pem.write_to_path(str(trusted))
    return str(server), str(trusted)


def run_in_fresh_process(command: list[str], limit_s: float = 300.0, *, trusted: str = "") -> Figures:
    """Run a script without telemetry, and return the figures that its last line has as JSON.

    The process may write byte code, so that later runs load it like an installed package. `trusted` is a file
    of certificates that both clients trust.
    """
    environment = {**os.environ, "TINKER_TELEMETRY": "0", "PYTHONPATH": str(ROOT)}
    if trusted:
        environment.update(dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), trusted))
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(f"{' '.join(command[1:4])} ended with {done.returncode}: {done.stderr[-2000:]}")
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def run_command(command: list[str], limit_s: float = 120.0) -> Figures:
    """Run a command, and return its wall time and its CPU in milliseconds."""
    environment = {**os.environ, "TINKER_API_KEY": "tml-benchmark", "TINKER_TELEMETRY": "0"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=environment, capture_output=True, timeout=limit_s, check=True)
    wall_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_ms": wall_s * 1e3, "cpu_ms": cpu_s * 1e3}


def medians(runs: list[Figures]) -> Figures:
    """Return the median of each figure over the runs."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


# ------------------------------------------------------------------------------------------ memory


def resident_mb(name: str) -> float:
    """Return a size of this process from `/proc/self/status`, in MB; outside of Linux, 0.

    `VmRSS` is the resident set, `RssAnon` its part that no file backs, and `VmHWM` its peak.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0.0
    return int(status.split(f"{name}:")[1].split()[0]) * 1024 / MEGABYTE


def reset_peak() -> float:
    """Reset the peak of the resident set, and return the present size of the set in MB."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return resident_mb("VmRSS")
