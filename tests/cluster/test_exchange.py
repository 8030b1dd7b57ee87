"""A pool and its workers without a cluster: a double of Ray loses replies and restarts workers."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, repeat
from typing import Any, NamedTuple

import pytest
from support.crowd import start, until

import tinker_sync
from tinker_sync.errors import BudgetExceededError, ClientClosedError, TinkerError
from tinker_sync.testing import LocalServer
from tinker_sync.types import ModelInput, SamplingParams

pytest.importorskip("ray", reason="no Ray: pip install 'tinker-sync[ray]'")

from ray.exceptions import ActorDiedError

from tinker_sync.ray import asking
from tinker_sync.ray import pool as pool_module
from tinker_sync.ray import worker as worker_module

MODEL = "tinker-sync/random"
PARAMS = SamplingParams(max_tokens=2, seed=7)
PATIENCE_S = 120.0
PROMPTS = [[1 + number, 5] for number in range(30)]


class FakeActor:
    """A double of a Ray actor, whose worker runs in this process.

    Args:
        make: makes the worker.
        mishap: called for each exchange with the worker; it may lose the reply or the worker.
        starts: False for an actor for which the cluster has no room.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        mishap: Callable[[FakeActor, tuple[Any, ...]], bytes],
        starts: bool = True,
    ) -> None:
        self.make = make
        self.worker = make()
        self.calls = 0
        self.killed = threading.Event()
        self.starts = starts
        self.exchange = self._method(lambda *args: mishap(self, args))
        self.place = self._method(lambda: ("machine", 1))

    def kill(self) -> None:
        """Fail the calls that wait for the start, and later ones, as Ray does."""
        self.killed.set()

    def _method(self, work: Callable[..., Any]) -> Any:
        def wait_for_the_start(*args: Any) -> Any:
            if not self.starts:
                self.killed.wait()
                raise ActorDiedError
            return work(*args)

        def remote(*args: Any) -> Any:
            reply = start(partial(wait_for_the_start, *args))
            return types.SimpleNamespace(future=lambda: reply)

        return types.SimpleNamespace(remote=remote)


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
    """A client of the driver, and the double of Ray.

    The workers of the double have another client.
    """

    service: tinker_sync.ServiceClient
    sampling: tinker_sync.SamplingClient
    use: Callable[..., list[FakeActor]]
    """Replaces Ray with the double. The first argument is the `mishap` of its actors. `starting` has an entry
    for each actor: does it start? The result is a list to which each actor is added.
    """
    up: threading.Event
    """Set as long as the double runs."""
    jobs: list[str]
    """The ids of the connections with the double, the newest last."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    limits = types.SimpleNamespace(own_usage=lambda: ("server", "a", {}))
    monkeypatch.setattr(worker_module, "share_limits", lambda _: limits)
    monkeypatch.setattr(pool_module, "find_board", lambda: None)
    up = threading.Event()
    up.set()
    jobs = ["1"]
    with LocalServer(model=MODEL) as server, server.service() as service, server.service() as elsewhere:
        far = elsewhere.create_sampling_client(base_model=MODEL).result()

        def use(mishap: Any, starting: Iterable[bool] = ()) -> list[FakeActor]:
            actors: list[FakeActor] = []
            starts = chain(starting, repeat(True))

            def remote(kind: Any) -> Any:
                def make(_: Any) -> FakeActor:
                    actors.append(FakeActor(lambda: kind(far), mishap, next(starts)))
                    return actors[-1]

                return types.SimpleNamespace(options=lambda **_: types.SimpleNamespace(remote=make))

            fake = types.SimpleNamespace(
                remote=remote,
                kill=FakeActor.kill,
                is_initialized=up.is_set,
                get_runtime_context=lambda: types.SimpleNamespace(
                    get_node_id=lambda: "machine", get_job_id=lambda: jobs[-1]
                ),
            )
            monkeypatch.setattr(pool_module, "ray", fake)
            monkeypatch.setattr(asking, "ray", fake)
            return actors

        yield World(service, service.create_sampling_client(base_model=MODEL).result(), use, up, jobs)


def die_for_good(actor: FakeActor, args: tuple[Any, ...]) -> bytes:
    """Run the first exchange. From then on the actor is one that Ray has given up."""
    actor.calls += 1
    if actor.calls > 1:
        raise ActorDiedError
    return actor.worker.exchange(*args)


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


def test_no_prompt_waits_for_a_worker_that_does_not_start(world: World) -> None:
    world.use(keep, starting=[False])
    with pool_module.SamplerPool(world.sampling, workers=2, max_in_flight=8) as pool:
        futures = [pool.sample(ModelInput.from_ints(each), 1, PARAMS) for each in PROMPTS]
        assert all(future.result(PATIENCE_S) for future in futures)


def test_no_prompt_waits_for_an_idle_worker_that_does_not_start_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "_NOTICE_S", 0.01)
    world.use(keep)
    with pool_module.SamplerPool(world.sampling, workers=2) as pool:
        until(lambda: len(pool._idle) == 2)
        pool._idle[0].starts = False  # the next prompt wakes this one
        assert pool.sample(ModelInput.from_ints([1]), 1, PARAMS).result(PATIENCE_S)


def test_the_prompts_of_a_worker_that_is_given_up_go_to_the_others(world: World) -> None:
    first: list[FakeActor] = []

    def lose_one(actor: FakeActor, args: tuple[Any, ...]) -> bytes:
        first[:] = first or [actor]
        return die_for_good(actor, args) if actor is first[0] else keep(actor, args)

    world.use(lose_one)
    with pool_module.SamplerPool(world.sampling, workers=2, max_in_flight=8) as pool:
        items = list(pool.map(PROMPTS, PARAMS, progress=False))
        again = pool.sample(ModelInput.from_ints([1]), 1, PARAMS)
        assert again.result(PATIENCE_S)
    assert [item.ok for item in items] == [True] * len(PROMPTS)


def test_prompts_fail_when_no_worker_is_left(world: World) -> None:
    world.use(die_for_good)
    with pool_module.SamplerPool(world.sampling, workers=2, max_in_flight=2) as pool:
        items = list(pool.map(PROMPTS, PARAMS, progress=False))
    assert not items[-1].ok
    assert "a worker of the pool failed" in str(items[-1].error)


def test_a_pool_ends_with_ray(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_NOTICE_S", 0.01)
    actors = world.use(keep, starting=[False])
    with pool_module.SamplerPool(world.sampling, workers=1) as pool:
        future = pool.sample(ModelInput.from_ints([1]), 1, PARAMS)
        world.up.clear()
        with pytest.raises(ClientClosedError, match="Ray was shut down"):
            future.result(PATIENCE_S)
    # Ray would start again to kill them.
    assert [actor.killed.is_set() for actor in actors] == [False]


def test_a_pool_ends_with_ray_also_if_ray_starts_again_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "_NOTICE_S", 0.01)
    actors = world.use(keep, starting=[False])
    with pool_module.SamplerPool(world.sampling, workers=1) as pool:
        future = pool.sample(ModelInput.from_ints([1]), 1, PARAMS)
        world.jobs.append("2")
        with pytest.raises(ClientClosedError, match="Ray was shut down"):
            future.result(PATIENCE_S)
    assert [actor.killed.is_set() for actor in actors] == [False]


def test_the_end_of_the_process_closes_its_pools(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    actors = world.use(keep, starting=[False])
    with pool_module.SamplerPool(world.sampling, workers=1) as pool:
        future = pool.sample(ModelInput.from_ints([1]), 1, PARAMS)
        with monkeypatch.context() as child:
            child.setattr(pool_module.os, "getpid", lambda: -1)
            pool_module._close_all()
        assert [actor.killed.is_set() for actor in actors] == [False]
        pool_module._close_all()
        with pytest.raises(ClientClosedError):
            future.result(PATIENCE_S)
    assert [actor.killed.is_set() for actor in actors] == [True]


def test_a_pool_goes_on_after_a_moment_without_threads(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.use(keep)

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with pool_module.SamplerPool(world.sampling, workers=1) as pool:
        until(lambda: pool._idle)
        with monkeypatch.context() as moment:
            moment.setattr(pool._threads, "run", refuse)
            with pytest.raises(TinkerError, match="can't start new thread"):
                pool.sample(ModelInput.from_ints([1]), 1, PARAMS)
        assert pool.sample(ModelInput.from_ints([1]), 1, PARAMS).result(PATIENCE_S)
