"""The adapters that stay in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from support.engine_models import busy_params, tiny_weights

from tinker_sync.local.engine.lora import LoraParams, LoraSettings
from tinker_sync.local.host.workers import JobWorker
from tinker_sync.local.server.adapters import Adapters

WEIGHTS = tiny_weights()


def params(seed: int) -> LoraParams:
    return busy_params(WEIGHTS, LoraSettings(rank=2), seed=seed).snapshot()


EACH = params(0).flat.nbytes


def play(test: Callable[[Adapters, list[LoraParams]], Awaitable[None]], limit: float = 2.5) -> None:
    forgotten: list[LoraParams] = []

    async def main() -> None:
        with contextlib.closing(JobWorker("tinker-disk", threads=2)) as pool:
            adapters = Adapters(forgotten.append, pool, limit_bytes=int(limit * EACH))
            try:
                await test(adapters, forgotten)
            finally:
                adapters.close()

    asyncio.run(main())


def with_adapters(test: Callable[[Adapters, list[LoraParams]], Awaitable[None]]) -> Callable[[], None]:
    return lambda: play(test)


@with_adapters
async def test_the_longest_unused_leaves_memory_and_comes_back_bit_by_bit(
    adapters: Adapters, forgotten: list[LoraParams]
) -> None:
    kept = {f"a{seed}": params(seed) for seed in range(5)}
    for key, one in kept.items():
        await adapters.put(key, one)
        await adapters.get("a0")  # so `a0` is never the longest unused
    assert adapters.held_bytes <= 2.5 * EACH
    assert forgotten == [kept["a1"], kept["a2"], kept["a3"]]
    assert await adapters.get("a0") is kept["a0"]
    for key, one in kept.items():
        again = await adapters.get(key)
        assert np.array_equal(again.flat, one.flat)
        assert not again.flat.flags.writeable
        assert again.settings == one.settings
    assert adapters.held_bytes <= 2.5 * EACH


@with_adapters
async def test_what_can_be_loaded_is_loaded_once_for_all_who_ask(
    adapters: Adapters, forgotten: list[LoraParams]
) -> None:
    loads: list[str] = []

    async def load() -> LoraParams:
        loads.append("once")
        await asyncio.sleep(0)
        return params(1)

    found = await asyncio.gather(*(adapters.get("tinker://x", load) for _ in range(5)))
    assert loads == ["once"]
    assert all(one is found[0] for one in found)
    for seed in range(3):
        await adapters.put(f"a{seed}", params(seed))
    assert "tinker://x" not in adapters  # nothing was written: it can be loaded again
    await adapters.get("tinker://x", load)
    assert loads == ["once", "once"]


@with_adapters
async def test_a_failed_load_is_tried_again(adapters: Adapters, forgotten: list[LoraParams]) -> None:
    async def broken() -> LoraParams:
        raise OSError("no disk")

    async def load() -> LoraParams:
        return params(1)

    with pytest.raises(OSError, match="no disk"):
        await adapters.get("a", broken)
    assert np.array_equal((await adapters.get("a", load)).flat, params(1).flat)


@with_adapters
async def test_a_dropped_adapter_leaves_memory_and_disk(
    adapters: Adapters, forgotten: list[LoraParams]
) -> None:
    for seed in range(4):
        await adapters.put(f"a{seed}", params(seed))
    spilled = adapters._spilled["a0"].path
    assert spilled.exists()
    for key in ("a0", "a3", "never was"):
        adapters.drop(key)
        assert key not in adapters
        with pytest.raises(KeyError):
            await adapters.get(key)
    assert not spilled.exists()
    assert len(forgotten) == 3


def test_an_adapter_larger_than_the_limit_is_held() -> None:
    async def scenario(adapters: Adapters, forgotten: list[LoraParams]) -> None:
        for seed in range(3):
            await adapters.put(f"a{seed}", params(seed))
        assert adapters.held_bytes == EACH
        assert np.array_equal((await adapters.get("a0")).flat, params(0).flat)

    play(scenario, limit=0.1)


def test_closing_removes_the_files() -> None:
    folders = []

    async def scenario(adapters: Adapters, forgotten: list[LoraParams]) -> None:
        for seed in range(4):
            await adapters.put(f"a{seed}", params(seed))
        folders.append(adapters._spilled["a0"].path.parent)
        assert folders[0].exists()

    play(scenario)
    assert not folders[0].exists()
