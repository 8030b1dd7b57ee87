"""Measure sampling in worker processes of Ray: the added CPU, and the gain from more processes.

    python benchmarks/bench_cluster.py cost      CPU of a sample in a worker, beside the plain client
    python benchmarks/bench_cluster.py scale     samples a second of 1 to 8 workers

It needs `pip install -e '.[ray]'`; --json FILE keeps the figures. The stub server of `cost` and `scale` runs
in a process of its own and computes nothing.

`cost` runs the same prompts through two actors in turn: one that calls `SamplingClient.map` for all of them
at once, and the map stage of Ray Data. CPU is that of the actor's process,
including Ray's own threads, from the first prompt to the last. A round runs both, so the ratios within
a round mean more than the figures.

`scale` gives each worker the same number of prompts. A sample takes a second at the server (--latency), so
the window of samples in flight limits one process, and the CPU of a sample limits the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from _processes import Figures, allow_many_files, stub_server

import tinker_sync
from tinker_sync.ray import Sampler, share_limits
from tinker_sync.types import SamplingParams

HERE = Path(__file__).resolve().parent
MODEL = "stub/model"
KEY = "tml-benchmark"
PARAMS = SamplingParams(max_tokens=8)
WINDOW = 256
BATCH = 1024
WARM_UP = BATCH
CONFIG = {"sample_max_concurrent_requests": 40_000}


def make_prompts(count: int, first: int = 0) -> list[list[int]]:
    """Return `count` different prompts of 20 tokens; another `first` gives other prompts."""
    return [[number % 30_000, number // 30_000, *range(18)] for number in range(first, first + count)]


class Plain:
    """A worker that samples all prompts with one call of the plain client."""

    def __init__(self, sampling: tinker_sync.SamplingClient, shared: bool) -> None:
        self._sampling = sampling
        self._shared = share_limits(sampling) if shared else None

    def run(self, count: int, window: int) -> Figures:
        """Sample `count` prompts, with `window` in flight. Return the CPU and wall time of this process."""
        prompts = make_prompts(count)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        good = sum(
            item.ok for item in self._sampling.map(prompts, PARAMS, max_in_flight=window, progress=False)
        )
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        assert good == count
        return {"cpu_s": cpu_s, "wall_s": wall_s}


class Probe(Sampler):
    """The map stage, with an added column: the CPU that its process has used so far."""

    def __call__(self, batch: Any) -> dict[str, Any]:
        found = super().__call__(batch)
        return {**found, "cpu_s": [time.process_time()] * len(found["error"])}


# ------------------------------------------------------------------------------------------ cost


def plain(ray: Any, sampling: Any, count: int) -> Figures:
    """Return the milliseconds of CPU that a sample of the plain client takes."""
    worker = ray.remote(num_cpus=0)(Plain).remote(sampling, False)
    ray.get(worker.run.remote(WARM_UP, WINDOW))
    found = ray.get(worker.run.remote(count, WINDOW))
    ray.kill(worker)
    return {"worker": found["cpu_s"] / count * 1e3}


def stage(ray: Any, sampling: Any, count: int) -> Figures:
    """Return the milliseconds of CPU that a sample takes in a map stage of Ray Data, and in the driver.

    The first batch warms the stage up. The figure of the stage leaves it out.
    """
    rows = [{"prompt": prompt} for prompt in make_prompts(count + WARM_UP)]
    own_s = time.process_time()
    data = ray.data.from_items(rows, override_num_blocks=len(rows) // BATCH).map_batches(
        Probe,
        fn_constructor_kwargs={"sampling": sampling, "params": PARAMS, "max_in_flight": WINDOW},
        concurrency=1,
        batch_size=BATCH,
        num_cpus=0.5,
    )
    seen = sorted(row["cpu_s"] for row in data.iter_rows() if row["error"] is None)
    own_s = time.process_time() - own_s
    assert len(seen) == len(rows)
    after_warm_up = [cpu_s for cpu_s in seen if cpu_s > seen[WARM_UP - 1]]
    return {
        "worker": (seen[-1] - seen[WARM_UP - 1]) / len(after_warm_up) * 1e3,
        "driver": own_s / len(rows) * 1e3,
    }


SUBJECTS = {"plain": plain, "ray.data": stage}


def measure_cost(ray: Any, sampling: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Run the subjects in turn. Print the CPU of each, and its ratio to that of the plain client."""
    ray.data.DataContext.get_current().enable_progress_bars = False
    runs: dict[str, list[Figures]] = {name: [] for name in SUBJECTS}
    for number in range(options.rounds):
        for name in list(SUBJECTS)[:: 1 if number % 2 else -1]:
            runs[name].append(SUBJECTS[name](ray, sampling, options.prompts))
    print(
        f"CPU a sample, ms: median of {options.rounds} runs of {options.prompts:,} samples, lowest - highest"
    )
    base = [run["worker"] for run in runs["plain"]]
    for name, taken in runs.items():
        cost = [run["worker"] for run in taken]
        ratio = statistics.median(own / other for own, other in zip(cost, base, strict=True))
        line = (
            f"  {name:10}{statistics.median(cost):8.3f}  {min(cost):.3f} - {max(cost):.3f}  ratio {ratio:.3f}"
        )
        driver = [run["driver"] for run in taken if "driver" in run]
        print(line + (f"  driver {statistics.median(driver):.3f}" if driver else ""), flush=True)
    return runs


# ------------------------------------------------------------------------------------------ scale


def measure_scale(ray: Any, sampling: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Print the samples a second of 1, 2, 4 and 8 workers, up to `--most`, and the CPU of a sample."""
    found: dict[str, Any] = {}
    for count in [number for number in (1, 2, 4, 8) if number <= options.most]:
        workers = [ray.remote(num_cpus=0)(Plain).remote(sampling, True) for _ in range(count)]
        ray.get([worker.run.remote(WARM_UP, options.window) for worker in workers])
        began_s = time.perf_counter()
        runs = ray.get([worker.run.remote(options.prompts, options.window) for worker in workers])
        wall_s = time.perf_counter() - began_s
        for worker in workers:
            ray.kill(worker)
        samples = count * options.prompts
        rate, cpu_ms = samples / wall_s, sum(run["cpu_s"] for run in runs) / samples * 1e3
        found[str(count)] = {"rate": rate, "cpu_ms": cpu_ms}
        print(f"  {count} workers  {rate:8.0f} samples/s  CPU a sample {cpu_ms:.3f} ms", flush=True)
    return found


# ------------------------------------------------------------------------------------------ the command


@contextmanager
def started_ray(processors: int = 2, objects_mb: int = 200) -> Iterator[Any]:
    """Run Ray on loopback for the block. Its monitor of memory judges the whole machine, so it is off."""
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112  # Ray's own name
    import ray

    ray.init(
        num_cpus=processors,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=objects_mb * 2**20,
        _node_ip_address="127.0.0.1",
        runtime_env={
            "env_vars": {
                "TINKER_API_KEY": KEY,
                "TINKER_TELEMETRY": "0",
                "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}",
            }
        },
    )
    try:
        yield ray
    finally:
        ray.shutdown()


def measure_samples(options: argparse.Namespace) -> dict[str, Any]:
    """Run `cost` or `scale` against the stub server, and return the figures."""
    measure = measure_scale if options.what == "scale" else measure_cost
    with stub_server(options.latency, CONFIG) as server, started_ray() as ray:
        with tinker_sync.ServiceClient(base_url=server.url, api_key=KEY) as service:
            sampling = service.create_sampling_client(base_model=MODEL).result()
            figures: dict[str, Any] = measure(ray, sampling, options)
        print(f"  CPU of the server {server.cpu_s():.1f} s")
    return figures


def main() -> None:
    """Run the measurement that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["cost", "scale"])
    parser.add_argument(
        "--prompts", type=int, default=4000, help="samples of a run, in `scale` of each worker"
    )
    parser.add_argument("--rounds", type=int, default=5, help="runs of each subject of `cost`")
    parser.add_argument("--most", type=int, default=8, help="the most workers of `scale`")
    parser.add_argument(
        "--window", type=int, default=WINDOW, help="samples in flight of each worker of `scale`"
    )
    parser.add_argument("--latency", type=float, default=1.0, help="seconds that a sample takes")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    allow_many_files()
    os.environ["TINKER_TELEMETRY"] = "0"
    figures = measure_samples(options)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
