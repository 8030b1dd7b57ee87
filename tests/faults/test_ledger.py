"""One training client, used by many threads, in faults of all kinds and outages longer than its patience.

The ledger of the engine is compared with the futures: each call is done once and in order or not at all, no
success is wrong, and the client goes on after each outage. A few rounds run with the suite;
`LEDGER_ROUNDS=100 pytest -s tests/faults/test_ledger.py` runs as many, and prints the figures.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import pytest
from support.crowd import together
from support.fault_proxy import LYING, PASSING, FaultProxy
from support.fault_world import Asked, Ground, World, ground

from tinker_sync.errors import DeadlineError, EarlierCallFailedError

pytestmark = pytest.mark.usefixtures("quiet_logs")

ROUNDS = int(os.environ.get("LEDGER_ROUNDS", "3"))
SEED = int(os.environ.get("LEDGER_SEED", "0"))
THREADS = 16
# The clients of these tests shorten pauses to a hundredth, and count them in full for deadlines.
DEADLINE_S = 100.0
OUTAGES = (
    "taken_503", "busy", "lost_answer", "taken_429",
    "reset_early", "taken_408", "bad_gateway", "taken_425",
)  # fmt: skip
EVERY = 4
"""An outage begins in one of so many rounds."""
LOST = 2
"""An outage ends when so many calls of the round have failed: the first, and the one that waits for it."""


@pytest.fixture(scope="module")
def land() -> Iterator[Ground]:
    with ground() as made:
        yield made


def fate_of(asked: Asked, done: set[Any]) -> str:
    """Return the fate of a training call as a word: what its future says, compared with the ledger."""
    failure = asked.future.exception()
    whole, none = done.issuperset(asked.marks), done.isdisjoint(asked.marks)
    future: Any = asked.future
    if failure is None:
        return "succeeded" if whole else "succeeded, but was not done"
    if isinstance(failure, EarlierCallFailedError):
        return "not sent" if none and not failure.final else "denied"
    if "sends the same request again first" in str(failure):
        return "in doubt, then done" if whole else "in doubt, and was not done later"
    if future.request_ids:
        return "done, result lost" if whole else "accepted, but was not done"
    if isinstance(failure, DeadlineError):
        return "too late" if none else "too late, but was done"
    return f"failed with {failure!r}"


def await_failures(asked: list[Asked], count: int) -> None:
    """Wait until so many of the calls have failed."""
    failed = threading.Semaphore(0)

    def note(future: Future[Any]) -> None:
        if future.exception() is not None:
            failed.release()

    for each in asked:
        each.future.add_done_callback(note)
    for _ in range(count):
        assert failed.acquire(timeout=120)


def test_each_call_is_done_once_and_in_order_or_not_at_all(land: Ground) -> None:
    kinds = tuple(kind for kind in (*PASSING, *LYING) if kind != "silent")
    outages = itertools.cycle(OUTAGES)
    fates: Counter[str] = Counter()
    with FaultProxy(land.port, seed=SEED, rate=0.0, kinds=kinds) as proxy:
        world = World(land, proxy, passing=False, deadline_s=DEADLINE_S)
        model = world.model(world.open())
        model.client.result(120)

        def calls(thread: int, number: int) -> None:
            own = random.Random(f"{SEED} {thread} {number}")
            world.passes(model, thread, own.randint(1, 5), backward=own.random() < 0.8)
            world.step(model, thread)
            if own.random() < 0.1:
                world.save(model, thread, state=own.random() < 0.5)

        for number in range(ROUNDS):
            proxy.rate = 0.2
            proxy.outage = next(outages) if number % EVERY == 1 else None
            begun = len(world.asked)
            together(*[partial(calls, thread, number) for thread in range(THREADS)])
            asked = world.asked[begun:]
            if proxy.outage is not None:
                await_failures(asked, LOST)
                proxy.outage = None
            assert not wait([each.future for each in asked], 120).not_done
            proxy.rate = 0.0
            world.step(model, THREADS)
            assert world.asked[-1].future.result(120)  # the client goes on
        history = model.history.asked
        problems = world.finish()
        (run,) = land.ledger.with_marks({mark for each in history for mark in each.marks})
        done = {mark for applied in run for mark in applied.marks}
        fates.update(fate_of(each, done) for each in history)
        struck, requests = dict(sorted(proxy.struck.items())), proxy.requests
    sys.stdout.write(
        f"\n{json.dumps(dict(sorted(fates.items())))}\n{requests} requests, {json.dumps(struck)}\n"
    )
    assert problems == []
    assert set(fates) <= {"succeeded", "not sent", "in doubt, then done", "done, result lost", "too late"}
    if ROUNDS > 1:
        assert fates["in doubt, then done"]
    land.forget()
