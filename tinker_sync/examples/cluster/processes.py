"""Samples from four processes of this machine, each with a copy of the client.

The same function runs elsewhere, because a client can be pickled:

    joblib    Parallel(n_jobs=4)(delayed(score)(sampling, lot) for lot in lots)
    Dask      client.gather(client.map(partial(score, sampling), lots, pure=False))
    torch     a Dataset whose __getitem__ returns score(sampling, lots[index]), in the workers of a DataLoader
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import tinker_sync as tinker

MODEL = "tinker-sync/tiny"
LOTS, LOT, PROCESSES = 8, 32, 4
Sum = tuple[int, int]


def make_lots() -> list[list[Sum]]:
    """Return groups of sums, called lots. A sum is a pair of numbers to add."""
    rng = random.Random(1)
    return [[(rng.randint(1, 49), rng.randint(1, 49)) for _ in range(LOT)] for _ in range(LOTS)]


def score(sampling: tinker.SamplingClient, lot: Sequence[Sum]) -> float:
    """Sample the answers to a lot, and return the share of right ones. Runs in any process."""
    questions = [f"Q: {one}+{other}=" for one, other in lot]
    params = tinker.SamplingParams(max_tokens=4, temperature=0.0, stop=["\n"])
    items = sampling.map(questions, params, progress=False)
    right = [item.ok and item.texts[0].strip() == str(sum(lot[item.index])) for item in items]
    return sum(right) / len(right)


def main(start_method: str = "spawn") -> None:
    """Score each lot in a worker process."""
    context = multiprocessing.get_context(start_method)
    with tinker.ServiceClient(base_url="local") as service:
        # The client is pickled without a key; the copies in a process share one session and its connections.
        sampling = service.create_sampling_client(base_model=MODEL).result()
        with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
            scores = [pool.submit(score, sampling, lot) for lot in make_lots()]
            for number, share in enumerate(scores):
                print(f"lot {number}: {share.result():.0%} of {LOT} sums are right")


if __name__ == "__main__":
    main()
