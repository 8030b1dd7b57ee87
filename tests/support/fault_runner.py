"""Random programs. `live` runs the program of a seed on several threads, while the network fails."""

from __future__ import annotations

import random
from collections import Counter

from support.crowd import start
from support.fault_proxy import LYING, PASSING, FaultProxy
from support.fault_world import PROMPTS, Ground, Model, Sampler, Served, World

from tinker_sync.errors import ClientClosedError, TinkerError

THREADS = 3
ACTIONS = 25

totals: Counter[str] = Counter()
"""The numbers of damages, actions and outcomes, over all seeds of this process."""


def kinds_for(chance: random.Random, seed: int) -> tuple[str, ...]:
    """Return the kinds of damage for a seed: some of `PASSING`, and for one seed in five some of `LYING`."""
    usual = [kind for kind in PASSING if kind != "silent"]
    kinds = chance.sample(usual, 7) + (["silent"] if seed % 7 == 0 else [])
    return tuple(kinds + chance.sample(LYING, 2)) if seed % 5 == 4 else tuple(kinds)


def live(land: Ground, seed: int) -> World:
    """Run the program of one seed, and return its `World` after `finish`."""
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


def act(world: World, chance: random.Random, thread: int, *, forks: bool = False) -> str:
    """Carry out one action, chosen by the random generator `chance`. Return its name."""
    names = list(_WEIGHTS)
    name = chance.choices(names, [_WEIGHTS[each] for each in names])[0]
    served = chance.choice(world.services) if world.services else world.open()
    models = [model for model in world.models if not model.service.excused]
    samplers = [each for each in world.samplers if not each.service.excused]
    number = chance.randrange(len(PROMPTS))
    if name in _ON_MODELS and not models:
        name = "model"
    if name in _ON_SAMPLERS and not samplers:
        name = "sampler"
    if name == "fork" and not forks:
        name = "wait"
    try:
        if name in _ON_MODELS:
            _act_on_model(world, chance, name, chance.choice(models), thread)
        elif name in _ON_SAMPLERS:
            _act_on_sampler(world, name, chance.choice(samplers), models, thread, number)
        else:
            _act_on_service(world, chance, name, served, thread)
    except (TinkerError, AssertionError) as refusal:
        # Another thread has closed the client meanwhile, or its creation failed after a damage of `LYING`.
        explained = isinstance(refusal, ClientClosedError) or not world.passing or served.client is None
        if not explained:
            raise
        name = "refused"
    world.done[name] += 1
    return name


_WEIGHTS = {
    "pass": 14,
    "forward": 4,
    "step": 10,
    "save": 3,
    "save_sampler": 2,
    "snapshot": 1,
    "sample": 14,
    "score": 5,
    "copy": 1,
    "fork": 0.5,
    "read": 3,
    "model": 2,
    "resume": 1,
    "sampler": 2,
    "open": 0.7,
    "close": 0.7,
    "drop": 0.4,
    "cancel": 4,
    "wait": 6,
    "restart": 0.5,
}
_ON_MODELS = ("pass", "forward", "step", "save", "save_sampler", "snapshot")
_ON_SAMPLERS = ("sample", "score", "copy", "fork")


def _act_on_model(world: World, chance: random.Random, name: str, model: Model, thread: int) -> None:
    if name in ("pass", "forward"):
        world.passes(model, thread, chance.randint(1, 5), backward=name == "pass")
    elif name == "step":
        world.step(model, thread)
    elif name == "snapshot":
        world.snapshot(model)
    else:
        world.save(model, thread, state=name == "save")


def _act_on_sampler(
    world: World, name: str, sampler: Sampler, models: list[Model], thread: int, number: int
) -> None:
    if name == "sample":
        world.sample(sampler, thread, number)
    elif name == "score":
        world.score(sampler, thread, number)
    elif name == "copy":
        world.copy(sampler)
    else:
        world.fork(sampler, models[0] if models else None)


def _act_on_service(world: World, chance: random.Random, name: str, served: Served, thread: int) -> None:
    if name == "read":
        world.read(served, thread)
    elif name in ("model", "resume"):
        saved = [
            asked.future.result().path
            for asked in world.asked
            if asked.kind == "save" and asked.future.done() and not asked.future.cancelled()
            if asked.future.exception() is None and "/weights/" in asked.future.result().path
        ]
        world.model(served, chance.choice(saved) if saved and name == "resume" else None)
    elif name == "sampler":
        world.sampler(served)
    elif name == "open":
        world.open()
    elif name == "close":
        world.close(served)
    elif name == "drop":
        world.drop(served)
    elif name == "cancel":
        world.cancel(chance.randrange(1 << 20))
    elif name == "wait":
        world.wait_for(chance.randrange(1 << 20))
    elif name == "restart":
        world.restart_proxy()
