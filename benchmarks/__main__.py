"""Measure this client beside the reference client and beside floors; README.md explains the figures.

    python -m benchmarks --reference-python VENV/bin/python     all of it, some 40 minutes on two cores
    python -m benchmarks --quick                                smaller sizes, some 8 minutes
    python -m benchmarks --minutes 12                           full sizes, as many runs as fit
    python -m benchmarks --only start one                       some scenarios

Every run is a fresh process, with a stub server in another process; the subjects take turns. The command
prints the median of each figure, its range and its ratio to the reference. --json writes all figures to a
file, and --charts redraws the SVGs.
"""

from __future__ import annotations

import argparse
import atexit
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _charts import draw_curves, draw_shares
from _model import check_model
from _processes import (
    Figures,
    allow_many_files,
    make_certificate,
    network,
    run_command,
    run_in_fresh_process,
    stub_server,
    use_two_cores,
)

HERE = Path(__file__).resolve().parent
REFERENCE = "tinker==0.38.0"
# More samples than any scenario keeps in flight, so that this setting limits neither client.
CONFIG = {"sample_max_concurrent_requests": 40_000}
OURS, THEIRS = "tinker_sync", "tinker"
PYTEST = "pytest, one empty test"
NOISY_SPREAD = 1.25


class Bound(NamedTuple):
    """A figure of the table. Ours may be at most `share` of the reference's; None sets no bound."""

    figure: str
    label: str
    share: float | None = None
    chart: bool = False
    """True if the figure has a bar in the chart of shares."""


class Network(NamedTuple):
    """A network between client and server."""

    one_way_ms: float
    tls: bool = False
    bytes_per_s: float | None = None


class Scenario(NamedTuple):
    """One block of the table: a script to run, its sizes, its server and the bounds of its figures."""

    title: str
    script: str
    case: str
    bounds: tuple[Bound, ...]
    size: int = 0
    quick: int = 0
    latency_s: float = 0.0
    config: dict[str, Any] = {}  # noqa: RUF012  # never changed
    floors: tuple[str, ...] = ()
    server: tuple[str, ...] = ()
    """Options of the stub server."""
    network: Network | None = None
    in_flight: int = 0
    """How many samples are in flight, if the table compares the wall time with that of the round trips."""
    of_round_trips: float | None = None
    """The bound of this ratio."""


CPU_A_SAMPLE = Bound("cpu_ms", "CPU a sample, ms", 1 / 8, chart=True)
SCENARIOS = {
    "start": Scenario(
        "fresh interpreter to the first sample", "_start.py", "sample",
        (Bound("wall_ms", "wall, ms", 1 / 4, chart=True), Bound("cpu_ms", "CPU, ms", 1 / 4),
         Bound("peak_mb", "memory, MB", 1 / 2, chart=True), Bound("modules", "modules loaded")),
        floors=("nothing",),
    ),
    "first": Scenario(
        "fresh interpreter to the end of a 50 MB forward_backward", "_start.py", "pass",
        (Bound("wall_ms", "wall, ms", 1 / 2), Bound("cpu_ms", "CPU, ms", 1 / 2)),
    ),
    "one": Scenario(
        "one sample at a time", "_clients.py", "one",
        (CPU_A_SAMPLE, Bound("wall_ms", "wall a sample, ms")),
        400, 100, floors=("urllib3", "http.client", "sockets"),
    ),
    "crowd": Scenario(
        "samples with 400 in flight", "_clients.py", "crowd",
        (CPU_A_SAMPLE, Bound("wall_ms", "wall a sample, ms", 1 / 8)), 4000, 1000,
        floors=("urllib3-400",),
    ),
    "steps": Scenario(
        "forward_backward and optim_step, pipelined", "_clients.py", "steps",
        (Bound("cpu_ms", "CPU a step, ms", 1 / 6, chart=True), Bound("wall_ms", "wall a step, ms")), 200, 50,
    ),
    "pass": Scenario(
        "forward_backward of 1024 x 2048, 50 MB of numpy", "_clients.py", "pass",
        (Bound("cpu_s", "CPU, s", 1 / 2, chart=True), Bound("wall_s", "wall, s"),
         Bound("growth_mb", "growth of memory, MB", 1 / 5)),
        1024, 1024, floors=("memcpy", "loopback"),
    ),
    "lists": Scenario(
        "the same from lists, conversion included", "_clients.py", "lists",
        (Bound("cpu_s", "CPU, s", 1 / 2), Bound("wall_s", "wall, s")), 1024, 128,
    ),
    "answer": Scenario(
        "the 8 MB answer of a short pass", "_clients.py", "answer",
        (Bound("cpu_s", "CPU, s", 1 / 3), Bound("wall_s", "wall, s")), 64, 64,
        server=("--answer-tokens", "32768"),
    ),
    "prompts": Scenario(
        "samples with prompts of 32,768 tokens, extra `speed`", "_clients.py", "prompts",
        (Bound("cpu_ms", "CPU a sample, ms", 1 / 6), Bound("wall_ms", "wall a sample, ms")), 50, 20,
    ),
    "plain-prompts": Scenario(
        "the same without extras", "_clients.py", "plain-prompts",
        (Bound("cpu_ms", "CPU a sample, ms", 1 / 2), Bound("wall_ms", "wall a sample, ms")), 50, 20,
    ),
    "storm": Scenario(
        "samples at once, from a server that works on 200 and refuses others", "_clients.py", "many",
        (Bound("wall_s", "wall, s", 1 / 2), Bound("cpu_s", "CPU, s")), 2000, 1000, 0.5,
        server=("--room", "200"),
    ),
    "many": Scenario(
        "10,000 samples in flight, 2 s each", "_clients.py", "many",
        (Bound("wall_s", "wall, s", 1 / 4, chart=True), Bound("cpu_s", "CPU, s", 1 / 8),
         Bound("threads", "threads"), Bound("growth_mb", "growth of memory, MB", 1 / 4, chart=True)),
        10_000, 1000, 2.0,
    ),
    "together": Scenario(
        "the same, with one poll for the session", "_clients.py", "many",
        (Bound("wall_s", "wall, s", 1 / 4), Bound("cpu_s", "CPU, s", 1 / 8),
         Bound("growth_mb", "growth of memory, MB", 1 / 4)),
        10_000, 1000, 2.0, {"sample_use_retrieve_futures": True},
    ),
}  # fmt: skip

WALL = Bound("wall_s", "wall, s", 0.55)
CONNECTIONS = Bound("connections", "connections held")
CPU = Bound("cpu_s", "CPU, s", 1 / 4)
# They share two cores with the client.
OTHERS = (Bound("stub_cpu_s", "CPU of the stub server, s"), Bound("network_cpu_s", "CPU of the network, s"))
TOKENS = {"pjwt_auth_enabled": True}
OVER_A_NETWORK = {
    "first": Scenario(
        "fresh interpreter to the first sample", "_start.py", "sample",
        (Bound("wall_ms", "wall, ms", 1 / 2), Bound("round_trips", "round trips in line"), CONNECTIONS),
    ),
    "hundred": Scenario(
        "samples with 100 in flight", "_clients.py", "hundred",
        (WALL, CONNECTIONS, CPU, *OTHERS), 500, 200, in_flight=100, of_round_trips=1.15,
    ),
    "crowd": Scenario(
        "samples with 400 in flight", "_clients.py", "ramp",
        (WALL, CONNECTIONS, CPU, *OTHERS), 1200, 800, in_flight=400, of_round_trips=1.25,
    ),
    "waiting": Scenario(
        "samples at once, 2 s each", "_clients.py", "many",
        (Bound("wall_s", "wall, s"), CONNECTIONS, CPU, *OTHERS), 2000, 500, 2.0, in_flight=2000,
    ),
    "steps": Scenario(
        "forward_backward and optim_step, pipelined", "_clients.py", "steps",
        (Bound("wall_s", "wall, s"), CONNECTIONS, CPU), 30, 10,
    ),
    "20mb": Scenario(
        "forward_backward of 20 MB over 20 MB/s, data", "_clients.py", "pass",
        (Bound("wall_s", "wall, s"), Bound("cpu_s", "CPU, s", 1 / 2)), 410, 410,
        network=Network(0, bytes_per_s=20e6),
    ),
    "50mb": Scenario(
        "forward_backward of 50 MB over 20 MB/s, data", "_clients.py", "pass",
        (Bound("wall_s", "wall, s"), Bound("cpu_s", "CPU, s", 1 / 2)), 1024, 1024,
        network=Network(0, bytes_per_s=20e6),
    ),
    "zstd": Scenario(
        "the same, from a server that takes compressed passes", "_clients.py", "pass",
        (Bound("wall_s", "wall, s"), Bound("cpu_s", "CPU, s")), 1024, 1024,
        config={"proto_compress_fwdbwd": True}, network=Network(0, bytes_per_s=20e6),
    ),
}  # fmt: skip

# From a server that offers HTTP/2: the reference speaks it, and this client with the extra `http2`.
OVER_HTTP2 = ("first", "hundred", "crowd", "waiting", "steps", "50mb")
STREAMS = 128  # requests that the stub server takes at once on a connection of HTTP/2


def _over_networks() -> dict[str, Scenario]:
    """Return the scenarios over a distant server and a near one, in cleartext and over TLS."""
    found = {}
    for where, one_way_ms in (("wan", 40.0), ("near", 5.0)):
        for name, scenario in OVER_A_NETWORK.items():
            for tls in (False, True):
                bytes_per_s = None if scenario.network is None else scenario.network.bytes_per_s
                over = Network(one_way_ms, tls, bytes_per_s)
                title = f"{scenario.title}, {one_way_ms:.0f} ms each way{', TLS' if tls else ''}"
                found[f"{where}-{name}{'-tls' if tls else ''}"] = scenario._replace(title=title, network=over)
        first = found[f"{where}-first-tls"]
        title = f"{first.title}, token exchange"
        found[f"{where}-first-token"] = first._replace(title=title, config=TOKENS)
        for name in OVER_HTTP2:
            over_tls = found[f"{where}-{name}-tls"]
            title, options = f"{over_tls.title}, HTTP/2", (*over_tls.server, "--http2")
            found[f"{where}-{name}-h2"] = over_tls._replace(title=title, server=options)
    return found


SCENARIOS.update(_over_networks())


class Growth(NamedTuple):
    """A curve: the cost of one piece of work, such as a chunk or a sample, over the number of pieces."""

    title: str
    case: str
    sizes: tuple[int, ...]
    across: str
    latency_s: float = 0.0
    config: dict[str, Any] = {}  # noqa: RUF012  # never changed
    most_of_reference: int = 10_000
    figure: str = "cpu_ms"


GROWTHS = {
    "busy": Growth("wall time of a sample while the main thread computes, by samples in flight", "busy",
                   (1, 10, 100, 400), "samples in flight", figure="wall_ms"),
    "datums": Growth("CPU a datum, by datums of a pass", "pass", (1, 8, 64, 512, 4096, 16_384), "datums",
                     most_of_reference=4096),
    "chunks": Growth("CPU a chunk, by chunks of a pass", "chunks", (1, 5, 20, 80, 200), "chunks",
                     config={"fwdbwd_max_chunk_len": 8}),
    "clients": Growth("CPU a client, by clients of a process", "clients", (1, 5, 20, 80, 200), "clients"),
    "inflight": Growth("CPU a sample, by samples in flight", "many", (10, 100, 1000, 10_000, 30_000),
                       "samples in flight", 0.5),
}  # fmt: skip


# ---------------------------------------------------------------------------------------- the machine


def spin_s() -> float:
    """Return the time of a fixed loop, which hardly varies on a quiet machine."""
    began_s = time.perf_counter()
    total = 0
    for number in range(400_000):
        total += number
    return time.perf_counter() - began_s


@cache
def certificate() -> tuple[str, str]:
    """Return the file of the stub server's certificate, and the file of those that clients trust."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    return make_certificate(folder)


class Quiet:
    """The times of a fixed loop between runs, which vary on a busy machine, and the CPU of the servers."""

    def __init__(self) -> None:
        self.spins: list[float] = []
        self.server_cpu_s = 0.0

    def look(self) -> None:
        self.spins.append(min(spin_s() for _ in range(3)))

    def report(self) -> dict[str, Any]:
        spread = max(self.spins) / min(self.spins)
        return {
            "loop_ms": round(statistics.median(self.spins) * 1e3, 1),
            "spread": round(spread, 2),
            "noisy": spread > NOISY_SPREAD,
            "stub_server_cpu_s": round(self.server_cpu_s, 1),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "python": platform.python_version(),
        }


class Allotment:
    """The time of the whole command. A part may take an equal share of the time that is left at its start."""

    def __init__(self, minutes: float, parts: int) -> None:
        self._ends_s = time.monotonic() + minutes * 60
        self._parts = parts
        self._over_s = 0.0

    def begin_part(self) -> None:
        now_s = time.monotonic()
        self._over_s = now_s + (self._ends_s - now_s) / max(self._parts, 1)
        self._parts -= 1

    def is_over(self) -> bool:
        """Return True if the time of the present part is over."""
        return time.monotonic() > self._over_s


# ---------------------------------------------------------------------------------------- running


def run_once(scenario: Scenario, subject: str, python: str, size: int, quiet: Quiet) -> Figures:
    """Run one subject once, against a new server. A subject is a client or a floor."""
    over, options, trusted = scenario.network, scenario.server, ""
    if over is not None and over.tls:
        own, trusted = certificate()
        options += ("--tls", own)
    with ExitStack() as stack:
        config = {**CONFIG, **scenario.config}
        server = stack.enter_context(stub_server(scenario.latency_s, config, options))
        before_s, relayed = server.cpu_s(), None
        if over is not None:
            relayed = stack.enter_context(network(server, over.one_way_ms, over.bytes_per_s))
        url = server.url if relayed is None else relayed.url
        script = str(HERE / scenario.script)
        if subject in (OURS, THEIRS):
            command = [python, script, scenario.case, subject, url]
            command += [] if scenario.script == "_start.py" else [str(size)]
        elif subject == "nothing":
            command = [sys.executable, script, "nothing", "", ""]
        else:
            count = 50_000_000 if subject in ("memcpy", "loopback") else size
            command = [sys.executable, str(HERE / "_floors.py"), subject, url, str(count)]
        figures = run_in_fresh_process(command, trusted=trusted)
        if relayed is not None:
            figures.update(relayed.figures(), stub_cpu_s=server.cpu_s() - before_s)
        quiet.server_cpu_s += server.cpu_s()
    return figures


def measure(
    scenario: Scenario, pythons: dict[str, str], rounds: int, size: int, quiet: Quiet, time_left: Allotment
) -> Any:
    """Run all subjects in turn, at least once each. Return the figures of every run, by subject."""
    subjects = {**pythons, **dict.fromkeys(scenario.floors, sys.executable)}
    runs: dict[str, list[Figures]] = {subject: [] for subject in subjects}
    for number in range(rounds):
        if number and time_left.is_over():
            break
        quiet.look()
        for subject, python in subjects.items():
            runs[subject].append(run_once(scenario, subject, python, size, quiet))
    return runs


def measure_commands(
    pythons: dict[str, str], rounds: int, quiet: Quiet
) -> dict[str, dict[str, list[Figures]]]:
    """Run the command lines of both clients, then pytest with and without this package's plugin.

    Return the figures by title and subject.
    """
    names = {OURS: "tinker-sync", THEIRS: "tinker"}
    found: dict[str, dict[str, list[Figures]]] = {}
    for title, words in (("--help", ["--help"]), ("version", ["version"])):
        runs: dict[str, list[Figures]] = {subject: [] for subject in pythons}
        for _ in range(rounds):
            quiet.look()
            for subject, python in pythons.items():
                command = str(Path(python).with_name(names[subject]))
                runs[subject].append(run_command([command, *words]))
        found[f"command line, {title}"] = runs
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_nothing.py").write_text("def test_nothing(): pass\n")
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder]
        runs = {"with the plugin": [], "without": []}
        commands = [("with the plugin", pytest), ("without", [*pytest, "-p", "no:tinker_sync"])]
        for _ in range(rounds):
            quiet.look()
            for subject, command in commands:
                runs[subject].append(run_command(command))
            commands.reverse()  # the first one after the loop of `quiet` costs some milliseconds more
    found[PYTEST] = runs
    return found


def measure_growth(
    growth: Growth, pythons: dict[str, str], quick: bool, quiet: Quiet, time_left: Allotment
) -> dict[str, Any]:
    """Run each size of a curve once, and return the points by subject.

    The reference is left out at sizes above `most_of_reference`. When no time is left, it gets only its first
    point.
    """
    curves: dict[str, list[tuple[int, float]]] = {}
    sizes = growth.sizes[:-1] if quick else growth.sizes
    scenario = Scenario(growth.title, "_clients.py", growth.case, (), 0, 0, growth.latency_s, growth.config)
    for size in sizes:
        quiet.look()
        for subject, python in pythons.items():
            few = size > growth.most_of_reference or (subject in curves and time_left.is_over())
            if subject == OURS or not few:
                figures = run_once(scenario, subject, python, size, quiet)
                curves.setdefault(subject, []).append((size, figures[growth.figure]))
    return curves


# ---------------------------------------------------------------------------------------- the table


def print_block(title: str, runs: dict[str, list[Figures]], bounds: tuple[Bound, ...]) -> dict[str, float]:
    """Print one block of the table. Return our shares of the reference's figures for the chart, by label."""
    counts = sorted({len(taken) for taken in runs.values()})
    print(f"{title}; runs: {', '.join(map(str, counts))}")
    shares = {}
    for bound in bounds:
        for subject, taken in runs.items():
            values = [float(run[bound.figure]) for run in taken if bound.figure in run]
            if not values:
                continue
            line = f"  {bound.label:26}{subject:18}{statistics.median(values):11.2f}"
            line += f"  {min(values):10.2f} - {max(values):.2f}"
            if subject == OURS and THEIRS in runs:
                ratio = statistics.median(values) / max(median_of(runs[THEIRS], bound.figure), 1e-9)
                line += f"   {ratio:6.3f} of the reference"
                if bound.share is not None:
                    line += f", at most {bound.share:.3f}: {'ok' if ratio <= bound.share else 'MISSED'}"
                if bound.chart:
                    shares[f"{title}: {bound.label.rpartition(',')[0]}"] = ratio
            print(line, flush=True)
    return shares


def round_trips_s(scenario: Scenario, over: Network, size: int) -> float:
    """Return what the round trips of a scenario take alone, with the server's own time."""
    in_turn = math.ceil(size / min(scenario.in_flight, size))  # samples, one after the other
    is_open = "--http2" in scenario.server and scenario.in_flight <= STREAMS  # since the first sample
    opening = 0 if is_open else 1 + over.tls
    return (opening + 2 * in_turn) * 2 * over.one_way_ms / 1e3 + in_turn * scenario.latency_s


def print_round_trips(scenario: Scenario, size: int, runs: dict[str, list[Figures]]) -> None:
    if scenario.network is None or not scenario.in_flight:
        return
    alone_s, bound = round_trips_s(scenario, scenario.network, size), scenario.of_round_trips
    line = f"  {'round trips alone, s':26}{'':18}{alone_s:11.2f}"
    for subject, taken in runs.items():
        ratio = median_of(taken, "wall_s") / alone_s
        line += f"   {subject} {ratio:.2f} of it"
        if subject == OURS and bound is not None:
            line += f", at most {bound:.2f}: {'ok' if ratio <= bound else 'MISSED'}"
    print(line, flush=True)


def print_commands(found: dict[str, dict[str, list[Figures]]]) -> None:
    bounds = (Bound("wall_ms", "wall, ms", 1 / 3), Bound("cpu_ms", "CPU, ms", 1 / 3))
    for title, runs in found.items():
        print_block(title, runs, bounds)
    with_plugin, without = found[PYTEST].values()
    more_ms = median_of(with_plugin, "cpu_ms") - median_of(without, "cpu_ms")
    print(f"  the plugin takes {more_ms:.1f} ms of CPU, at most 5: {'ok' if more_ms <= 5 else 'MISSED'}")


def median_of(runs: list[Figures], figure: str) -> float:
    return statistics.median(float(run[figure]) for run in runs)


def print_curves(title: str, curves: dict[str, list[tuple[int, float]]]) -> None:
    print(title)
    for subject, points in curves.items():
        print(f"  {subject:14}" + "".join(f"  {size:,}: {cost:.3f} ms" for size, cost in points), flush=True)


# ---------------------------------------------------------------------------------------- the command


def reference_python(given: str | None, folder: str) -> str:
    """Return the given interpreter. Without one, install the reference client in `folder`."""
    if given:
        return given
    print(f"making an environment with {REFERENCE}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(Path(folder, "bin", "python"))
    subprocess.run([python, "-m", "pip", "install", "-q", REFERENCE], check=True)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("--reference-python", help="interpreter with the reference; else one is installed")
    parser.add_argument("--without-reference", action="store_true", help="measure ours and the floors alone")
    parser.add_argument("--rounds", type=int, help="runs of each subject; 5, with --quick 3")
    parser.add_argument(
        "--minutes", type=float, default=1e4, help="start no more runs than fit into this time"
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer points")
    known = [*SCENARIOS, "commands", *GROWTHS]
    groups = {where: [name for name in known if name.startswith(f"{where}-")] for where in ("wan", "near")}
    usual = [name for name in known if name not in groups["near"]]
    names = ", ".join([*groups, *known])
    parser.add_argument(
        "--only", choices=[*groups, *known], nargs="+", default=usual, metavar="NAME", help=names
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--charts", type=Path, help="draw the charts into this folder")
    options = parser.parse_args()
    options.only = [one for name in options.only for one in groups.get(name, [name])]
    rounds = options.rounds or (3 if options.quick else 5)
    use_two_cores()
    allow_many_files()
    with tempfile.TemporaryDirectory() as folder:
        pythons = {OURS: sys.executable}
        if not options.without_reference:
            pythons[THEIRS] = reference_python(options.reference_python, folder)
        return run_all(options, pythons, rounds)


def run_all(options: argparse.Namespace, pythons: dict[str, str], rounds: int) -> int:
    quiet, results, curves, shares = Quiet(), {}, {}, {}
    time_left = Allotment(options.minutes, len(options.only))
    for name in options.only:
        time_left.begin_part()
        if name in SCENARIOS:
            scenario = SCENARIOS[name]
            size = scenario.quick if options.quick else scenario.size
            results[name] = measure(scenario, pythons, rounds, size, quiet, time_left)
            title = f"{scenario.title}{f' ({size:,})' if size else ''}"
            shares.update(print_block(title, results[name], scenario.bounds))
            print_round_trips(scenario, size, results[name])
        elif name == "commands":
            results[name] = measure_commands(pythons, rounds, quiet)
            print_commands(results[name])
        else:
            curves[name] = measure_growth(GROWTHS[name], pythons, options.quick, quiet, time_left)
            print_curves(GROWTHS[name].title, curves[name])
    print("the model, from the figures above")
    sizes = {name: one.quick if options.quick else one.size for name, one in SCENARIOS.items()}
    for line in check_model(results, curves, OURS, sizes):
        print(f"  {line}")
    machine = quiet.report()
    print(f"medians, lowest - highest; {json.dumps(machine)}")
    if machine["noisy"]:
        print(f"THE MACHINE IS NOISY: one loop varied by a factor of {machine['spread']}; trust ratios alone")
    if options.json:
        everything = {"machine": machine, "scenarios": results, "curves": curves}
        options.json.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    if options.charts:
        options.charts.mkdir(parents=True, exist_ok=True)
        if shares:
            draw_shares(options.charts / "shares.svg", "cost, as a share of the reference's", shares)
        for name, found in curves.items():
            growth = GROWTHS[name]
            draw_curves(options.charts / f"{name}.svg", growth.title, growth.across, "ms", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
