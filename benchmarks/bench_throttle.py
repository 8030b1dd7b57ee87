"""Print how long samples take at servers that limit them, beside the reference client and the ideal.

A server limits the requests by a token bucket, by windows of a fixed length, or by the samples under way. It
answers 429 to the others, with a `Retry-After` header ("named") or without one. All samples are asked for at
once, by 1 or 8 service clients in one process, or by 4 processes. The ideal is the time that the limit takes.
Refusals are counted at the server, for each sample.

    python benchmarks/bench_throttle.py --reference-python VENV/bin/python [--only bucket] [--together 3]

A cell takes as long as the limit makes it take: some 10 minutes in all, with three cells at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

OURS, THEIRS = "tinker_sync", "tinker"
LIMIT_S = 400.0
SECONDS_OF_WORK = (0.1, 5.0)
# Clients in each process, processes.
LAYOUTS = {"1 client": (1, 1), "8 clients": (8, 1), "4 processes": (1, 4)}


# ------------------------------------------------------------------------------------------- the limits


class Bucket:
    """A limit of `rate` requests a second, and of `burst` at once."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._at_s = burst, time.monotonic()

    def wait_s(self) -> float | None:
        """Take one request, and return None; or return the seconds until the limit allows one."""
        now_s = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._rate)
        self._at_s = now_s
        if self._tokens >= 1:
            self._tokens -= 1
            return None
        return (1 - self._tokens) / self._rate

    def end(self) -> None:
        """Note that the server has finished a sample."""

    def ideal_s(self, count: int, work_s: float) -> float:
        return max(count - self._burst, 0) / self._rate + work_s


class Windows(Bucket):
    """A limit of `most` requests in each window of `length_s`."""

    def __init__(self, most: float, length_s: float) -> None:
        self._most, self._length_s = most, length_s
        self._ends_s, self._taken = -math.inf, 0

    def wait_s(self) -> float | None:
        now_s = time.monotonic()
        if now_s >= self._ends_s:
            self._ends_s, self._taken = now_s + self._length_s, 0
        if self._taken < self._most:
            self._taken += 1
            return None
        return self._ends_s - now_s

    def ideal_s(self, count: int, work_s: float) -> float:
        return (count - 1) // self._most * self._length_s + work_s


class Work(Bucket):
    """A limit of `most` samples that the server works on at a time."""

    def __init__(self, most: float, _: float = 0) -> None:
        self._most, self._taken = most, 0

    def wait_s(self) -> float | None:
        if self._taken < self._most:
            self._taken += 1
            return None
        return 1.0

    def end(self) -> None:
        self._taken -= 1

    def ideal_s(self, count: int, work_s: float) -> float:
        return math.ceil(count / self._most) * work_s


class Server(NamedTuple):
    """A kind of server, and the number of samples for each number of seconds that one takes."""

    kind: type[Bucket]
    limits: tuple[float, float]
    counts: tuple[int, int]


SERVERS = {
    "bucket, 50 a second, burst 10": Server(Bucket, (50, 10), (1000, 1000)),
    "windows, 300 in 10 s": Server(Windows, (300, 10), (1500, 1500)),
    "windows, 50 in 1 s": Server(Windows, (50, 1), (1000, 1000)),
    "20 at work": Server(Work, (20, 0), (2000, 160)),
    "100 at work": Server(Work, (100, 0), (5000, 800)),
}


@contextmanager
def throttling_server(server: Server, work_s: float, *, named: bool) -> Iterator[Any]:
    """Run a stub with a limit, in a thread of this process. `stub.refused` counts its refusals."""
    from support import tinker_stub

    class Throttling(tinker_stub.Stub):
        refused = 0
        limit: Any = None

        def on_asample(self, asked: tinker_stub.Asked) -> Any:
            if self.limit is None:  # made with the first sample, so that the limit is whole then
                self.limit = server.kind(*server.limits)
            wait_s = self.limit.wait_s()
            if wait_s is not None:
                self.refused += 1
                headers = {"retry-after": str(max(1, math.ceil(wait_s)))} if named else {}
                return tinker_stub.Answer(429, {"detail": "too many samples"}, headers)
            asyncio.get_running_loop().call_later(work_s, self.limit.end)
            return super().on_asample(asked)

    config = {"sample_max_concurrent_requests": 40_000}
    stub = Throttling(tinker_stub.Behaviour(config=config, latency_s=work_s))
    stub.keep_log = False
    with tinker_stub.StubServer(stub) as started:
        yield started


# ------------------------------------------------------------------------------------------ the clients


def be_client(package: str, url: str, count: int, clients: int) -> None:
    """Take samples with one of the packages; tell the parent when it is ready, and when all have ended."""
    tinker: Any = importlib.import_module(package)
    samplers = []
    for _ in range(clients):
        service = tinker.ServiceClient(base_url=url, api_key="tml-benchmark")
        samplers.append(service.create_sampling_client(base_model="stub/model").result(60))
    prompt = tinker.types.ModelInput.from_ints(list(range(20)))
    params = tinker.types.SamplingParams(max_tokens=8)
    print("ready", flush=True)
    sys.stdin.readline()
    futures = [samplers[number % clients].sample(prompt, 1, params) for number in range(count)]
    for future in futures:
        assert len(future.result().sequences[0].tokens) == 8
    print("done", flush=True)
    os._exit(0)  # without the pause of either package at its end


def run(
    server: Server, number: int, layout: tuple[int, int], package: str, python: str, named: bool
) -> tuple[float, float]:
    """Run one cell, and return the seconds that it took and the refusals for each sample."""
    clients, processes = layout
    count = server.counts[number] // processes
    with ExitStack() as stack:
        stub = stack.enter_context(throttling_server(server, SECONDS_OF_WORK[number], named=named))
        command = [python, str(HERE / "bench_throttle.py"), "--be-client"]
        command += [package, stub.url, str(count), str(clients)]
        environment = {**os.environ, "TINKER_TELEMETRY": "0", "PYTHONPATH": str(HERE.parent)}
        started = []
        for _ in range(processes):
            process = subprocess.Popen(
                command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        began_s = time.monotonic()
        for process in started:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n"
        return time.monotonic() - began_s, stub.refused / (count * processes)


class Cell(NamedTuple):
    name: str
    number: int
    layout: str
    package: str
    named: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--reference-python", help="an interpreter with the reference client")
    parser.add_argument("--only", default="", help="the servers whose names contain this")
    parser.add_argument("--together", type=int, default=3, help="cells that run at a time")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--be-client", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be_client:
        package, url, count, clients = options.be_client
        be_client(package, url, int(count), int(clients))
    rows = [
        (name, number, layout)
        for name in SERVERS
        if options.only in name
        for number in range(len(SECONDS_OF_WORK))
        for layout in LAYOUTS
    ]
    cells = [Cell(*row, OURS, named) for row in rows for named in (False, True)]
    if options.reference_python:
        cells += [Cell(*row, THEIRS, False) for row in rows]  # it does not read the header
    found: dict[Cell, tuple[float, float]] = {}

    def measure(cell: Cell) -> None:
        python = sys.executable if cell.package == OURS else options.reference_python
        layout = LAYOUTS[cell.layout]
        found[cell] = run(SERVERS[cell.name], cell.number, layout, cell.package, python, cell.named)

    with ThreadPoolExecutor(options.together) as pool:
        list(pool.map(measure, cells))
    print("| Server | A sample | Asked by | Samples | Ideal, s | Ours, s | Ours, named | Reference, s |")
    print("|---|---|---|---|---|---|---|---|")
    for name, number, layout in rows:
        server, work_s = SERVERS[name], SECONDS_OF_WORK[number]
        ideal_s = server.kind(*server.limits).ideal_s(server.counts[number], work_s)
        figures = []
        for package, named in ((OURS, False), (OURS, True), (THEIRS, False)):
            took = found.get(Cell(name, number, layout, package, named))
            figures.append("" if took is None else f"{took[0]:.1f} ({took[1]:.2f})")
        facts = [name, f"{work_s} s", layout, str(server.counts[number]), f"{ideal_s:.1f}"]
        print(f"| {' | '.join(facts + figures)} |")
    if options.json:
        options.json.write_text(json.dumps([[*cell, *took] for cell, took in found.items()]))


if __name__ == "__main__":
    main()
