"""One run of one client: a script in a fresh process that prints its figures as JSON.

    python _clients.py CASE tinker_sync|tinker URL SIZE

Both clients run the same lines. The stub server computes nothing, so the client takes most of the time. CPU
is that of the client's process, including the threads of native libraries. The growth of memory is the
difference between the resident set of the idle client, with its connections open, and its peak.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from _processes import Figures, allow_many_files, medians, reset_peak, resident_mb

if TYPE_CHECKING:
    import numpy as np

KEY = "tml-benchmark"
WARM_UP = 20
IN_FLIGHT = 400
MANY_ROUNDS = 3
STEP_DATA, STEP_TOKENS = 8, 64
TOKENS = 2048
LONG_TOKENS = 32_768
BUSY_SAMPLES = 40
IDLE_CPU_S = 0.002
SPEED = ("orjson", "zstandard")
FLOAT_INPUTS = ("weights", "logprobs", "advantages")


# --------------------------------------------------------------------------------------- on the client's side


def settle() -> None:
    """Wait until this process uses no CPU: the threads of numpy's library spin for a while once they exist.

    The client that imports numpy last would otherwise pay for this within its figures.
    """
    used_s = -1.0
    while time.process_time() - used_s > IDLE_CPU_S:
        used_s = time.process_time()
        time.sleep(0.05)


@contextmanager
def measured(figures: Figures) -> Iterator[None]:
    """Measure the wall time and the CPU of the block."""
    settle()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    yield
    figures["wall_s"] = time.perf_counter() - began_s
    figures["cpu_s"] = time.process_time() - began_cpu_s


def a_piece(figures: Figures, count: int) -> Figures:
    """Return the CPU and the wall time of each of `count` pieces of work, in milliseconds."""
    return {"cpu_ms": figures["cpu_s"] / count * 1e3, "wall_ms": figures["wall_s"] / count * 1e3}


@contextmanager
def growth(figures: Figures) -> Iterator[None]:
    """Measure the growth of memory during the block."""
    before_mb = reset_peak()
    yield
    figures["growth_mb"] = resident_mb("VmHWM") - before_mb


@contextmanager
def threads(figures: Figures) -> Iterator[None]:
    """Measure the largest number of threads during the block, without the thread that counts them."""
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
    """Return the number of threads of the process; outside of Linux, of those that Python started."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


class Sampler:
    """A sampling client of either package, and the request that it sends."""

    def __init__(self, tinker: Any, service: Any) -> None:
        self.client = service.create_sampling_client(base_model="stub/model")
        self._prompt = tinker.types.ModelInput.from_ints(list(range(20)))
        self._params = tinker.types.SamplingParams(max_tokens=8)

    def ask(self) -> Future[Any]:
        future: Future[Any] = self.client.sample(self._prompt, 1, self._params)
        return future

    def warm_up(self, count: int = WARM_UP) -> None:
        for future in [self.ask() for _ in range(count)]:
            future.result()


def one_at_a_time(tinker: Any, service: Any, size: int) -> Figures:
    sampler, figures = Sampler(tinker, service), Figures()
    sampler.warm_up()
    with measured(figures):
        for _ in range(size):
            sampler.ask().result()
    return a_piece(figures, size)


def long_prompts(tinker: Any, service: Any, size: int) -> Figures:
    """Sample with prompts of 32,768 tokens. Each is a different list, which the client checks and encodes."""
    sampler, figures = Sampler(tinker, service), Figures()
    sampler.warm_up()
    params = tinker.types.SamplingParams(max_tokens=8)
    prompts = [list(range(number, number + LONG_TOKENS)) for number in range(size)]
    with measured(figures):
        for prompt in prompts:
            sampler.client.sample(tinker.types.ModelInput.from_ints(prompt), 1, params).result()
    return a_piece(figures, size)


def beside_a_busy_thread(tinker: Any, service: Any, size: int) -> Figures:
    """Keep `size` samples in flight while the main thread computes without a pause."""
    sampler, figures = Sampler(tinker, service), Figures()
    sampler.warm_up()
    count, ended = max(4 * size, BUSY_SAMPLES), threading.Event()
    began_s = time.perf_counter()

    def ask_all() -> None:
        room = threading.Semaphore(size)
        futures = []
        for _ in range(count):
            room.acquire()
            future = sampler.ask()
            future.add_done_callback(lambda _: room.release())
            futures.append(future)
        check([future.result() for future in futures])
        figures["wall_ms"] = (time.perf_counter() - began_s) / count * 1e3
        ended.set()

    threading.Thread(target=ask_all, daemon=True).start()
    total = 0
    while not ended.is_set():
        for number in range(10_000):
            total += number
    return figures


def check(results: list[Any]) -> None:
    """Check that the samples are right, because the figures of wrong answers mean nothing."""
    assert all(result.sequences[0].tokens == results[0].sequences[0].tokens for result in results)
    assert len(results[0].sequences[0].tokens) == 8


def crowd(
    tinker: Any, service: Any, size: int, in_flight: int = IN_FLIGHT, warm_up: int = WARM_UP
) -> Figures:
    """Keep samples in flight: submit the next one as soon as one is done."""
    sampler, figures = Sampler(tinker, service), Figures()
    sampler.warm_up(warm_up)
    room = threading.Semaphore(in_flight)
    futures = []
    with measured(figures):
        for _ in range(size):
            room.acquire()
            future = sampler.ask()
            future.add_done_callback(lambda _: room.release())
            futures.append(future)
        results = [future.result() for future in futures]
    check(results)
    return {**figures, **a_piece(figures, size), "rate": size / figures["wall_s"]}


def many(tinker: Any, service: Any, size: int) -> Figures:
    """Submit all samples at once, and wait for all."""
    sampler, figures = Sampler(tinker, service), Figures()
    sampler.warm_up()
    with threads(figures), growth(figures), measured(figures):
        futures = [sampler.ask() for _ in range(size)]
        results = [future.result() for future in futures]
    check(results)
    return {**figures, **a_piece(figures, size)}


def one_pass(tinker: Any, service: Any, size: int) -> Figures:
    """Run forward_backward three times over `size` data of 2048 tokens, made before the clock starts.

    Return the medians, and the growth of memory in the first run.
    """
    trainer = service.create_lora_training_client(base_model="stub/model", rank=8)
    data, figures, runs = made_data(tinker, size, TOKENS), Figures(), []
    trainer.forward_backward(data[:1], "cross_entropy").result()
    for _ in range(MANY_ROUNDS):
        with growth(figures), measured(figures):
            result = trainer.forward_backward(data, "cross_entropy").result()
        assert len(result.loss_fn_outputs) == size
        del result
        runs.append(dict(figures))
    # The first run grows most, because later runs use the memory again that it returned to the allocator.
    return {**medians(runs), "growth_mb": runs[0]["growth_mb"], **a_piece(medians(runs), size)}


def large_answer(tinker: Any, service: Any, size: int) -> Figures:
    """Run five passes over `size` short data, and return the medians. Each answer has 8 MB."""
    trainer = service.create_lora_training_client(base_model="stub/model", rank=8)
    data, runs = [_short_datum(tinker) for _ in range(size)], []
    trainer.forward_backward(data, "cross_entropy").result()
    for _ in range(5):
        figures = Figures()
        with measured(figures):
            outputs = trainer.forward_backward(data, "cross_entropy").result().loss_fn_outputs
        assert len(outputs) == size
        assert float(outputs[-1]["logprobs"].to_numpy()[-1]) == -0.25
        runs.append(figures)
        del outputs
    return medians(runs)


def _short_datum(tinker: Any) -> Any:
    # Sparse, because dense targets would have to be as many as the log-probabilities of the answer.
    targets = tinker.types.TensorData(
        data=[7, 8], dtype="int64", shape=[2, 9], sparse_crow_indices=[0, 1, 2], sparse_col_indices=[0, 3]
    )
    prompt = tinker.types.ModelInput.from_ints([1, 2])
    return tinker.types.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": targets})


def listed_pass(tinker: Any, service: Any, size: int) -> Figures:
    """Make data from lists and run a pass over them. The figures include the conversion of the lists."""
    trainer = service.create_lora_training_client(base_model="stub/model", rank=8)
    trainer.forward_backward(made_data(tinker, 1, TOKENS), "cross_entropy").result()
    figures = Figures()
    row, floats = list(range(TOKENS)), [0.5] * TOKENS
    with growth(figures), measured(figures):
        data = [
            tinker.types.Datum(
                model_input=tinker.types.ModelInput.from_ints(row),
                loss_fn_inputs={"target_tokens": row, **dict.fromkeys(FLOAT_INPUTS, floats)},
            )
            for _ in range(size)
        ]
        result = trainer.forward_backward(data, "cross_entropy").result()
    assert len(result.loss_fn_outputs) == size
    return figures


def small_steps(tinker: Any, service: Any, size: int) -> Figures:
    """Submit all steps, then wait. A step is forward_backward of 8 data of 64 tokens, and optim_step."""
    trainer = service.create_lora_training_client(base_model="stub/model", rank=8)
    data, figures = made_data(tinker, STEP_DATA, STEP_TOKENS), Figures()
    adam = tinker.types.AdamParams(learning_rate=1e-4)
    for _ in range(5):
        trainer.forward_backward(data, "cross_entropy").result()
        trainer.optim_step(adam).result()
    gc.collect()  # the first full collection takes as long as 25 steps, and came in some versions meanwhile
    futures = []
    with measured(figures):
        for _ in range(size):
            futures += [trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(adam)]
        for future in futures:
            future.result()
    return {**figures, **a_piece(figures, size)}


def chunked_pass(tinker: Any, service: Any, size: int) -> Figures:
    """Run one pass in `size` chunks. A chunk has 8 data, the server's limit, of 64 tokens each."""
    trainer = service.create_lora_training_client(base_model="stub/model", rank=8)
    data, figures = made_data(tinker, 8 * size, 64), Figures()
    trainer.forward_backward(data[:1], "cross_entropy").result()
    with measured(figures):
        trainer.forward_backward(data, "cross_entropy").result()
    return a_piece(figures, size)


def many_clients(tinker: Any, service: Any, size: int) -> Figures:
    """Make `size` sampling clients, and take one sample with each."""
    figures = Figures()
    Sampler(tinker, service).warm_up()
    with growth(figures), measured(figures):
        samplers = [Sampler(tinker, service) for _ in range(size)]
        for future in [sampler.ask() for sampler in samplers]:
            future.result()
    return {**figures, **a_piece(figures, size)}


def made_data(tinker: Any, count: int, length: int) -> list[Any]:
    """Return data of arrays that share no memory."""
    import numpy as np  # imported here, so that cases without arrays do not load it

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


CASES = {
    "one": one_at_a_time,
    "prompts": long_prompts,
    "plain-prompts": long_prompts,
    "busy": beside_a_busy_thread,
    "answer": large_answer,
    "crowd": crowd,
    # Connections are opened within the measurement, because that takes long over a network.
    "hundred": partial(crowd, in_flight=100, warm_up=1),
    "ramp": partial(crowd, warm_up=1),
    "many": many,
    "pass": one_pass,
    "lists": listed_pass,
    "steps": small_steps,
    "chunks": chunked_pass,
    "clients": many_clients,
}


def main(case: str, package: str, url: str, size: str) -> None:
    """Run a case, print its figures, and end the process without closing the client."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # an extra of both clients
    if case == "plain-prompts" and package != "tinker":  # the reference requires these packages
        sys.modules.update(dict.fromkeys(SPEED))  # type: ignore[arg-type]
    allow_many_files()
    tinker = importlib.import_module(package)
    figures = CASES[case](tinker, tinker.ServiceClient(base_url=url, api_key=KEY), int(size))
    print(json.dumps(figures), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
