"""Programs at random, on several threads, while the network fails at random.

A handful of seeds run with the suite; `FAULT_SEEDS=2000 pytest tests/faults/test_seeds.py` runs as many, from
`FAULT_FIRST` on. A failure names its seed.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
from support import isolation
from support.crowd import start, until
from support.fault_proxy import LYING, PASSING, FaultProxy
from support.fault_world import Ground, World, act, ground

SEEDS = int(os.environ.get("FAULT_SEEDS", "6"))
FIRST = int(os.environ.get("FAULT_FIRST", "0"))
THREADS = 3
ACTIONS = 25

totals: Counter[str] = Counter()


@pytest.fixture(scope="module")
def land() -> Iterator[Ground]:
    with ground() as made:
        yield made
    report = os.environ.get("FAULT_REPORT")
    if report:
        with open(report, "a") as file:
            file.write(json.dumps(dict(sorted(totals.items()))) + "\n")


@pytest.fixture(autouse=True)
def quiet_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "tinker_sync")


def kinds_for(chance: random.Random, seed: int) -> tuple[str, ...]:
    """Return the damages of a seed: some of those that pass; in every fifth seed also lies."""
    usual = [kind for kind in PASSING if kind != "silent"]
    kinds = chance.sample(usual, 7) + (["silent"] if seed % 7 == 0 else [])
    return tuple(kinds + chance.sample(LYING, 2)) if seed % 5 == 4 else tuple(kinds)


def live(land: Ground, seed: int) -> World:
    """Live through one seed, and return its world."""
    chance = random.Random(seed)
    kinds = kinds_for(chance, seed)
    with FaultProxy(land.port, seed=seed, rate=chance.choice((0.05, 0.15, 0.3)), kinds=kinds) as proxy:
        world = World(land, proxy, passing=not set(kinds) & set(LYING))
        world.model(world.open())
        world.sampler(world.services[0])

        def job(thread: int) -> None:
            own = random.Random(f"{seed} {thread}")
            for _ in range(ACTIONS):
                act(world, own, thread, forks=thread == 0)

        for future in [start(lambda thread=thread: job(thread)) for thread in range(THREADS)]:  # type: ignore[misc]
            future.result(180)
        world.finish()
        totals.update({f"struck {kind}": count for kind, count in proxy.struck.items()})
        totals["requests"] += proxy.requests
    totals.update({f"done {name}": count for name, count in world.done.items()})
    totals.update({f"ended {name}": count for name, count in world.outcomes.items()})
    return world


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_nothing_is_lost_doubled_or_mixed_up(land: Ground, seed: int) -> None:
    before = isolation.our_threads() | {one for one in threading.enumerate() if one.name == "aside"}
    world = live(land, seed)
    assert not world.problems, "\n".join([f"seed {seed}", *world.problems])
    totals["seeds"] += 1
    land.ledger.forget()
    land.server.forget()
    del world
    gc.collect()
    until(lambda: isolation.our_threads() <= before)
