"""Processes: samples from four processes of this machine, each with a copy of the client."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import tinker_sync as tinker
from tinker_sync.examples._shared import connect, draw, parse, write

LOT = 32


def make_sums(seed: int, lots: int) -> list[list[tuple[int, int]]]:
    """Return groups of sums, called lots. A sum is a pair of numbers to add."""
    rng = random.Random(seed)
    return [[(rng.randint(1, 49), rng.randint(1, 49)) for _ in range(LOT)] for _ in range(lots)]


def score(sampling: tinker.SamplingClient, sums: Sequence[tuple[int, int]]) -> float:
    """Sample the answers to a lot of sums, and return the share of right ones. Runs in any process."""
    questions = [f"Q: {one}+{other}=" for one, other in sums]
    params = tinker.SamplingParams(max_tokens=4, temperature=0, stop=["\n"])
    items = sampling.map(questions, params, progress=False)
    answers = [item.texts[0].strip() if item.ok else "" for item in items]
    right = [answer == str(one + other) for answer, (one, other) in zip(answers, sums, strict=True)]
    return sum(right) / len(right)


def main(argv: Sequence[str] | None = None, *, start_method: str = "spawn", workers: int = 4) -> list[float]:
    """Score lots, groups of sums, in worker processes. Return the share of right answers of each lot."""
    options = parse(argv, __doc__, steps=8)
    context = multiprocessing.get_context(start_method)
    with connect(options) as service, ProcessPoolExecutor(workers, mp_context=context) as pool:
        sampling = service.create_sampling_client(base_model=options.model).result()
        # The client is pickled without a key; the copies in a process share one session and its sockets.
        lots = make_sums(options.seed, options.steps)
        shares = [future.result() for future in [pool.submit(score, sampling, lot) for lot in lots]]
    write(f"{sum(shares) / len(shares):.0%} of {LOT * len(lots)} sums were right")
    draw("share of right answers", shares)
    return shares


if __name__ == "__main__":
    main()
