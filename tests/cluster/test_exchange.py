"""A pool and its workers without a cluster: a double of Ray loses replies and restarts workers."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

import tinker_sync
from tinker_sync.errors import BudgetExceededError
from tinker_sync.testing import LocalServer
from tinker_sync.types import ModelInput, SamplingParams

pytest.importorskip("ray", reason="no Ray: pip install 'tinker-sync[ray]'")

from tinker_sync.ray import pool as pool_module

MODEL = "tinker-sync/random"
PARAMS = SamplingParams(max_tokens=2, seed=7)
PATIENCE_S = 120.0
PROMPTS = [[1 + number, 5] for number in range(30)]


class FakeActor:
    """A double of a Ray actor, whose worker runs in this process.

    Args:
        make: makes the worker.
        mishap: called for each exchange with the worker; it may lose the reply or the worker.
    """

    def __init__(
        self, make: Callable[[], Any], mishap: Callable[[FakeActor, tuple[Any, ...]], bytes]
    ) -> None:
        self.make = make
        self.worker = make()
        self.calls = 0
        self.exchange = types.SimpleNamespace(remote=lambda *args: lambda: mishap(self, args))


def keep(actor: FakeActor, args: tuple[Any, ...]) -> bytes:
    return actor.worker.exchange(*args)


def lose_reply(actor: FakeActor, args: tuple[Any, ...]) -> bytes:
    """Run an exchange. At every second call, run it twice, as if Ray had lost the first reply."""
    actor.calls += 1
    if actor.calls % 2:
        actor.worker.exchange(*args)
    return actor.worker.exchange(*args)


def lose_worker(actor: FakeActor, args: tuple[Any, ...]) -> bytes:
    """Run an exchange. Before the second call, replace the worker with a new one, which has no samples."""
    actor.calls += 1
    if actor.calls == 2:
        actor.worker = actor.make()
    return actor.worker.exchange(*args)


class World(NamedTuple):
    """A client of the driver, and a function that installs a double of Ray.

    The workers of the double have another client.
    """

    service: tinker_sync.ServiceClient
    sampling: tinker_sync.SamplingClient
    use: Callable[[Any], None]
    """Replaces Ray with the double. The argument is the `mishap` of its actors."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    limits = types.SimpleNamespace(own_usage=lambda: ("server", "a", {}))
    monkeypatch.setattr(pool_module, "share_limits", lambda _: limits)
    monkeypatch.setattr(pool_module, "find_board", lambda: None)
    with LocalServer(model=MODEL) as server, server.service() as service, server.service() as elsewhere:
        far = elsewhere.create_sampling_client(base_model=MODEL).result()

        def use(mishap: Any) -> None:
            def remote(kind: Any) -> Any:
                made = types.SimpleNamespace(remote=lambda _: FakeActor(lambda: kind(far), mishap))
                return types.SimpleNamespace(options=lambda **_: made)

            fake = types.SimpleNamespace(remote=remote, get=lambda call: call(), kill=lambda _: None)
            monkeypatch.setattr(pool_module, "ray", fake)

        yield World(service, service.create_sampling_client(base_model=MODEL).result(), use)


@pytest.mark.parametrize("mishap", [keep, lose_reply, lose_worker])
def test_each_prompt_gets_one_result(mishap: Any, world: World) -> None:
    world.use(mishap)
    with pool_module.SamplerPool(world.sampling, workers=2, max_in_flight=8) as pool:
        items = list(pool.map(PROMPTS, PARAMS, progress=False))
        again = pool.sample(ModelInput.from_ints(PROMPTS[3]), 1, PARAMS).result(PATIENCE_S)
    alone = [item.result() for item in world.sampling.map(PROMPTS, PARAMS, progress=False)]
    assert [item.result().sequences[0].tokens for item in items] == [
        each.sequences[0].tokens for each in alone
    ]
    assert again.sequences[0].tokens == alone[3].sequences[0].tokens


def test_a_budget_of_the_driver_holds_for_its_workers(world: World) -> None:
    world.use(keep)
    seen: list[bool] = []

    def sample_all(pool: Any) -> None:
        seen.extend(item.ok for item in pool.map(PROMPTS, PARAMS, progress=False))

    with (
        world.service.budget(tokens=41) as budget,
        pool_module.SamplerPool(world.sampling, workers=2, max_in_flight=4) as pool,
        pytest.raises(BudgetExceededError),
    ):
        sample_all(pool)
    assert seen == [True] * 10  # a sample has two prompt tokens and two sampled ones
    assert budget.spent_tokens == 40
