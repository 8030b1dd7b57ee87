"""The clients beside the reference's in the same run: CPU, wall time, threads and memory.

    python benchmarks/bench_clients.py --reference-python /path/to/venv/with/reference/bin/python

Every figure is the median of three runs (`--rounds`), ours and the reference's in turn. Each run is a client
in a fresh interpreter and a stub server in another, on two cores, over loopback, without telemetry, with the
same script for both. The server computes nothing, so the clients are what takes the time. All of it takes
about five minutes; on a busy machine there are fewer rounds.

  one at a time     `sample(...).result()`, 400 times, prompts of 20 tokens, 8 tokens sampled
  400 in flight     4,000 samples, the next as soon as one is done; the server answers at once
  10,000 in flight  asked for in one go, each takes the server 2 s; polled one by one, and then with the poll
                    for a whole sampling session where the server offers it
  a large pass      forward_backward of 1024 data of 2048 tokens (int32), targets (int64) and three inputs
                    more (float32): 50 MB of numpy arrays, made before the clock starts
  small steps       forward_backward of 8 x 64 tokens and optim_step, 200 times, results asked for at the end
  start             in a fresh process, from ServiceClient() to the result of the first sample

CPU is the client process's, threads of native libraries included; so is the count of threads. Memory is the
growth of the resident set from the idle client, its connections made, to its peak. The reference takes
tokens as lists only: its data are made without validation, so that both send the same arrays.

Exits with 1 when a floor is missed. Files may limit what can be in flight: the limit of open files is raised
as far as the system lets us, and has to be above 10,000.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from _side_by_side import (
    Case,
    Figures,
    Floor,
    allow_many_files,
    medians,
    print_head,
    print_rows,
    reset_peak,
    resident_mb,
    run_in_fresh_process,
    stub_server,
    use_two_cores,
)

if TYPE_CHECKING:
    import numpy as np

KEY = "tml-benchmark"
# More than are in flight here, for both clients.
CONFIG = {"sample_max_concurrent_requests": 20_000}
LONGEST_RUN_S = 120.0
# No round begins that would end later than this.
LONGEST_S = 345.0
WARM_UP = 20

ONE_AT_A_TIME = 400
CROWD, CROWD_IN_FLIGHT = 4_000, 400
MANY, MANY_TAKE_S = 10_000, 2.0
DATA, TOKENS, PASSES = 1024, 2048, 3
STEPS, STEP_DATA, STEP_TOKENS = 200, 8, 64
FLOAT_INPUTS = ("weights", "logprobs", "advantages")


# --------------------------------------------------------------------------------------- on the client's side


@contextmanager
def measured(figures: Figures) -> Iterator[None]:
    """Wall time and CPU of the block."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    yield
    figures["wall_s"] = time.perf_counter() - began_s
    figures["cpu_s"] = time.process_time() - began_cpu_s


def a_piece(figures: Figures, count: int) -> Figures:
    """Of each piece of work, in milliseconds."""
    return {"cpu_ms": figures["cpu_s"] / count * 1e3, "wall_ms": figures["wall_s"] / count * 1e3}


@contextmanager
def growth(figures: Figures) -> Iterator[None]:
    """How far memory grows during the block."""
    before_mb = reset_peak()
    yield
    figures["growth_mb"] = resident_mb("VmHWM") - before_mb


@contextmanager
def threads(figures: Figures) -> Iterator[None]:
    """The most threads during the block, without the one that counts them."""
    most, over = 0, threading.Event()

    def look() -> None:
        nonlocal most
        while True:
            most = max(most, thread_count() - 1)
            if over.wait(0.2):
                return

    watcher = threading.Thread(target=look)
    watcher.start()
    yield
    over.set()
    watcher.join()
    figures["threads"] = float(most)


def thread_count() -> int:
    """All threads of the process; where the system does not say, those Python knows."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


class Sampler:
    """A sampling client of either package, and what it is asked."""

    def __init__(self, tinker: Any, service: Any) -> None:
        self._client = service.create_sampling_client(base_model="stub/model")
        self._prompt = tinker.types.ModelInput.from_ints(list(range(20)))
        self._params = tinker.types.SamplingParams(max_tokens=8)

    def ask(self) -> Future[Any]:
        future: Future[Any] = self._client.sample(self._prompt, 1, self._params)
        return future

    def warm_up(self) -> None:
        for future in [self.ask() for _ in range(WARM_UP)]:
            future.result()


def one_at_a_time(tinker: Any, service: Any) -> Figures:
    sampler, figures = Sampler(tinker, service), Figures()
    sampler.warm_up()
    with measured(figures):
        for _ in range(ONE_AT_A_TIME):
            sampler.ask().result()
    return a_piece(figures, ONE_AT_A_TIME)


def check(results: list[Any]) -> None:
    """No figure is worth anything if the answers are wrong."""
    assert all(result.sequences[0].tokens == results[0].sequences[0].tokens for result in results)
    assert len(results[0].sequences[0].tokens) == 8


def crowd(tinker: Any, service: Any) -> Figures:
    sampler, figures = Sampler(tinker, service), Figures()
    sampler.warm_up()
    room = threading.Semaphore(CROWD_IN_FLIGHT)
    futures = []
    with measured(figures):
        for _ in range(CROWD):
            room.acquire()
            future = sampler.ask()
            future.add_done_callback(lambda _: room.release())
            futures.append(future)
        results = [future.result() for future in futures]
    check(results)
    return {"rate": CROWD / figures["wall_s"], "cpu_ms": figures["cpu_s"] / CROWD * 1e3}


def many(tinker: Any, service: Any) -> Figures:
    sampler, figures = Sampler(tinker, service), Figures()
    sampler.warm_up()
    with threads(figures), growth(figures), measured(figures):
        futures = [sampler.ask() for _ in range(MANY)]
        results = [future.result() for future in futures]
    check(results)
    return figures


def large_pass(tinker: Any, service: Any) -> Figures:
    trainer = service.create_lora_training_client(base_model="stub/model", rank=8)
    data, figures, runs = made_data(tinker, DATA, TOKENS), Figures(), []
    trainer.forward_backward(data[:1], "cross_entropy").result()
    for _ in range(PASSES):
        with growth(figures), measured(figures):
            result = trainer.forward_backward(data, "cross_entropy").result()
        assert len(result.loss_fn_outputs) == DATA
        del result
        runs.append(dict(figures))
    # The first grows most: what it has returned to the allocator the next ones use again.
    return {**medians(runs), "growth_mb": runs[0]["growth_mb"]}


def small_steps(tinker: Any, service: Any) -> Figures:
    trainer = service.create_lora_training_client(base_model="stub/model", rank=8)
    data, figures = made_data(tinker, STEP_DATA, STEP_TOKENS), Figures()
    adam = tinker.types.AdamParams(learning_rate=1e-4)
    for _ in range(5):
        trainer.forward_backward(data, "cross_entropy").result()
        trainer.optim_step(adam).result()
    futures = []
    with measured(figures):
        for _ in range(STEPS):
            futures += [trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(adam)]
        for future in futures:
            future.result()
    return a_piece(figures, STEPS)


def made_data(tinker: Any, count: int, length: int) -> list[Any]:
    """Data of arrays, each in memory of its own."""
    import numpy as np  # here, so that it counts where imports are counted

    rng = np.random.default_rng(1)
    return [_datum(tinker, rng, length) for _ in range(count)]


def _datum(tinker: Any, rng: np.random.Generator, length: int) -> Any:
    tokens = rng.integers(0, 150_000, length, dtype="int32")
    types = tinker.types
    if tinker.__name__ == "tinker":
        chunk = types.EncodedTextChunk.model_construct(tokens=tokens, type="encoded_text")
    else:
        chunk = types.EncodedTextChunk(tokens=tokens)
    inputs: dict[str, Any] = {n: rng.standard_normal(length, dtype="float32") for n in FLOAT_INPUTS}
    inputs["target_tokens"] = rng.integers(0, 150_000, length)
    return types.Datum(model_input=types.ModelInput(chunks=[chunk]), loss_fn_inputs=inputs)


def start(package: str, url: str) -> Figures:
    """A first sample, the import included and not."""
    began_s = time.perf_counter()
    tinker = importlib.import_module(package)
    tinker.ServiceClient, tinker.types.SamplingParams  # noqa: B018  # imported when they are first used
    imported_s = time.perf_counter()
    sampler = Sampler(tinker, tinker.ServiceClient(base_url=url, api_key=KEY))
    sampler.ask().result()
    over_s = time.perf_counter()
    return {"start_ms": (over_s - imported_s) * 1e3, "with_import_ms": (over_s - began_s) * 1e3}


CASES: dict[str, Case] = {
    "one": one_at_a_time,
    "crowd": crowd,
    "many": many,
    "together": many,
    "pass": large_pass,
    "steps": small_steps,
}


def run_case(case: str, package: str, url: str) -> None:
    """One run of one client: prints its figures and ends the process, whatever is still open."""
    allow_many_files()
    if case == "start":
        figures = start(package, url)
    else:
        tinker = importlib.import_module(package)
        figures = CASES[case](tinker, tinker.ServiceClient(base_url=url, api_key=KEY))
    print(json.dumps(figures), flush=True)
    os._exit(0)


# --------------------------------------------------------------------------------------- on the table's side

BLOCKS: dict[str, tuple[str, float, dict[str, Any], list[Floor]]] = {
    "one": (
        "one sample at a time",
        0.0,
        {},
        [
            Floor("cpu_ms", "CPU a sample", "ms", share=1 / 3),
            Floor("wall_ms", "wall time a sample", "ms"),
        ],
    ),
    "crowd": (
        "4,000 samples, 400 in flight",
        0.0,
        {},
        [
            Floor("rate", "throughput", "samples/s", least=3.0),
            Floor("cpu_ms", "CPU a sample", "ms", share=1 / 3),
        ],
    ),
    "many": (
        "10,000 samples in flight, 2 s each",
        MANY_TAKE_S,
        {},
        [
            Floor("wall_s", "wall time", "s", share=1 / 2),
            Floor("cpu_s", "CPU", "s", share=1 / 4),
            Floor("threads", "threads", "at the most", most=40),
            Floor("growth_mb", "growth of memory", "MB", share=1 / 2),
        ],
    ),
    "together": (
        "10,000 samples in flight, 2 s each, retrieve_futures",
        MANY_TAKE_S,
        {"sample_use_retrieve_futures": True},
        [
            Floor("wall_s", "wall time", "s", share=1 / 3),
            Floor("cpu_s", "CPU", "s", share=1 / 4),
            Floor("threads", "threads", "at the most", most=40),
            Floor("growth_mb", "growth of memory", "MB", share=1 / 2),
        ],
    ),
    "pass": (
        "forward_backward of 1024 x 2048, 50 MB",
        0.0,
        {},
        [
            Floor("cpu_s", "CPU", "s", share=0.7),
            Floor("wall_s", "wall time", "s", share=1.0),
            Floor("growth_mb", "growth of memory", "MB", share=1 / 2),
        ],
    ),
    "steps": (
        "200 x (forward_backward + optim_step), pipelined",
        0.0,
        {},
        [Floor("cpu_ms", "CPU a step", "ms", share=1 / 3), Floor("wall_ms", "wall time a step", "ms")],
    ),
    "start": (
        "construction to first sample",
        0.0,
        {},
        [
            Floor("start_ms", "imports made before", "ms", share=1 / 4),
            Floor("with_import_ms", "import included", "ms"),
        ],
    ),
}


def run_once(case: str, pythons: dict[str, str]) -> dict[str, Figures]:
    """Each client once, with a server of its own."""
    _, latency_s, config, _ = BLOCKS[case]
    found = {}
    for package, python in pythons.items():
        with stub_server(latency_s, {**CONFIG, **config}) as url:
            arguments = ["--run", case, package, url]
            found[package] = run_in_fresh_process(python, __file__, arguments, LONGEST_RUN_S)
    return found


def all_rounds(cases: list[str], pythons: dict[str, str], rounds: int) -> list[dict[str, dict[str, Figures]]]:
    """As many rounds of all cases as there is time for, and one at least."""
    began_s = time.perf_counter()
    taken: list[dict[str, dict[str, Figures]]] = []
    while len(taken) < rounds:
        spent_s = time.perf_counter() - began_s
        if taken and spent_s * (len(taken) + 1) / len(taken) > LONGEST_S:
            break
        print(f"round {len(taken) + 1} of {rounds}", file=sys.stderr, flush=True)
        taken.append({case: run_once(case, pythons) for case in cases})
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--reference-python", help="interpreter with the reference client; or this one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=BLOCKS, nargs="+", default=list(BLOCKS), help="these blocks alone")
    parser.add_argument("--run", nargs=3, metavar=("CASE", "PACKAGE", "URL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run_case(*arguments.run)
    reference = arguments.reference_python or sys.executable
    if reference == sys.executable and importlib.util.find_spec("tinker") is None:
        parser.error("this interpreter has no reference client; give --reference-python")
    use_two_cores()
    allow_many_files()
    pythons = {"tinker_sync": sys.executable, "tinker": reference}
    began_s = time.perf_counter()
    taken = all_rounds(arguments.only, pythons, arguments.rounds)
    print(f"Python {sys.version.split()[0]}, medians of {len(taken)} runs each")
    print_head()
    held = [show(case, [found[case] for found in taken]) for case in arguments.only]
    print(f"{'all floors hold' if all(held) else 'A FLOOR IS MISSED'}; {time.perf_counter() - began_s:.0f} s")
    return 0 if all(held) else 1


def show(case: str, taken: list[dict[str, Figures]]) -> bool:
    title, _, _, floors = BLOCKS[case]
    ours, theirs = (medians([found[package] for found in taken]) for package in ("tinker_sync", "tinker"))
    return print_rows(title, floors, ours, theirs)


if __name__ == "__main__":
    sys.exit(main())
