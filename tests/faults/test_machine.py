"""`World` as a state machine: hypothesis searches for the shortest program that breaks an invariant.

`FAULT_EXAMPLES=500 pytest tests/faults/test_machine.py` runs as many programs.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support import isolation
from support.crowd import until
from support.fault_proxy import PASSING, FaultProxy
from support.fault_world import Ground, Model, Sampler, World, ground

pytestmark = pytest.mark.usefixtures("quiet_logs")

EXAMPLES = int(os.environ.get("FAULT_EXAMPLES", "3"))
_QUICK = tuple(kind for kind in PASSING if kind != "silent")

indexes = st.integers(0, 7)


@pytest.fixture(scope="module")
def land() -> Iterator[Ground]:
    with ground() as made:
        yield made


@pytest.fixture(autouse=True)
def dropped_clients_end() -> Iterator[None]:
    """Wait until the threads of clients have ended that the programs have dropped."""
    before = isolation.our_threads()
    yield
    gc.collect()
    until(lambda: isolation.our_threads() <= before)


class Machine(RuleBasedStateMachine):
    """The actions of a program with one thread on a `World`, as rules from which hypothesis chooses."""

    land: Ground

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()

    @initialize(seed=st.integers(0, 1 << 16), kinds=st.sets(st.sampled_from(_QUICK), min_size=1))
    def begin(self, seed: int, kinds: set[str]) -> None:
        proxy = FaultProxy(self.land.port, seed=seed, rate=0.3, kinds=tuple(sorted(kinds)))
        self.proxy = self.stack.enter_context(proxy)
        self.world = World(self.land, proxy)
        self.world.model(self.world.open())
        self.world.sampler(self.world.services[0])

    def model(self, index: int) -> Model:
        return self.world.models[index % len(self.world.models)]

    def sampler(self, index: int) -> Sampler:
        return self.world.samplers[index % len(self.world.samplers)]

    def has_models(self) -> bool:
        return bool(self.world.models)

    def has_samplers(self) -> bool:
        return bool(self.world.samplers)

    @rule()
    def open(self) -> None:
        served = self.world.open()
        self.world.model(served)
        self.world.sampler(served)

    @precondition(has_models)
    @rule(index=indexes, count=st.integers(1, 5), backward=st.booleans())
    def passes(self, index: int, count: int, backward: bool) -> None:
        self.world.passes(self.model(index), 0, count, backward=backward)

    @precondition(has_models)
    @rule(index=indexes)
    def step(self, index: int) -> None:
        self.world.step(self.model(index), 0)

    @precondition(has_models)
    @rule(index=indexes, state=st.booleans())
    def save(self, index: int, state: bool) -> None:
        self.world.save(self.model(index), 0, state=state)

    @precondition(has_models)
    @rule(index=indexes)
    def snapshot(self, index: int) -> None:
        self.world.snapshot(self.model(index))

    @precondition(has_samplers)
    @rule(index=indexes, number=indexes)
    def sample(self, index: int, number: int) -> None:
        self.world.sample(self.sampler(index), 0, number)

    @precondition(has_samplers)
    @rule(index=indexes, number=indexes)
    def score(self, index: int, number: int) -> None:
        self.world.score(self.sampler(index), 0, number)

    @rule(number=st.integers(0, 1 << 16))
    def cancel(self, number: int) -> None:
        self.world.cancel(number)

    @rule(number=st.integers(0, 1 << 16))
    def wait(self, number: int) -> None:
        self.world.wait_for(number)

    @rule()
    def restart_proxy(self) -> None:
        self.world.restart_proxy()

    @rule(rate=st.sampled_from((0.0, 0.3, 0.6)))
    def weather(self, rate: float) -> None:
        self.proxy.rate = rate

    @precondition(lambda self: len(self.world.services) > 1)
    @rule(index=indexes, drop=st.booleans())
    def end(self, index: int, drop: bool) -> None:
        served = self.world.services[index % len(self.world.services)]
        (self.world.drop if drop else self.world.close)(served)

    def teardown(self) -> None:
        with self.stack:
            if hasattr(self, "world"):
                assert self.world.finish() == []
                self.land.forget()
                del self.world


def test_no_program_breaks_an_invariant(land: Ground) -> None:
    Machine.land = land
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=20,
            deadline=None,
            database=None,
            derandomize=EXAMPLES < 100,
            suppress_health_check=list(HealthCheck),
        ),
    )
