"""The adapters that stay in memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from support.embedded import running
from support.engine_models import busy_params, tiny_weights
from support.loops import in_a_loop

from tinker_sync.local.engine.lora import LoraParams, LoraSettings
from tinker_sync.local.server.state import Adapters

WEIGHTS = tiny_weights()


def params(seed: int) -> LoraParams:
    return busy_params(WEIGHTS, LoraSettings(rank=2), seed=seed).snapshot()


EACH = params(0).flat.nbytes


class Scene:
    """Adapters with room for two and a half, and the lists of those that left memory and were loaded."""

    def __init__(self, room: float = 2.5) -> None:
        self.left: list[LoraParams] = []
        self.loaded: list[str] = []
        self.adapters = Adapters(self.left.append, limit_bytes=int(room * EACH))

    async def get(self, key: str) -> LoraParams:
        async def load() -> LoraParams:
            self.loaded.append(key)
            await asyncio.sleep(0)
            return params(9)

        return await self.adapters.get(key, load)


@in_a_loop
async def test_the_longest_unused_leaves_memory_and_is_loaded_again() -> None:
    scene, kept = Scene(), [params(seed) for seed in range(4)]
    for index, one in enumerate(kept):
        scene.adapters.put(f"a{index}", one)
        assert await scene.get("a0") is kept[0]  # so `a0` is never the longest unused
    assert [each is one for each, one in zip(scene.left, kept[1:], strict=False)] == [True, True]
    assert await scene.get("a3") is kept[3]
    assert np.array_equal((await scene.get("a1")).flat, params(9).flat)
    assert scene.loaded == ["a1"]


@in_a_loop
async def test_an_adapter_is_loaded_once_for_all_who_ask() -> None:
    scene = Scene()
    found = await asyncio.gather(*(scene.get("tinker://x") for _ in range(5)))
    assert scene.loaded == ["tinker://x"]
    assert all(one is found[0] for one in found)


@in_a_loop
async def test_a_failed_load_is_tried_again() -> None:
    async def broken() -> LoraParams:
        raise OSError("no disk")

    scene = Scene()
    with pytest.raises(OSError, match="no disk"):
        await scene.adapters.get("a", broken)
    assert np.array_equal((await scene.get("a")).flat, params(9).flat)


@in_a_loop
async def test_a_dropped_adapter_makes_room() -> None:
    scene, kept = Scene(), params(0)
    scene.adapters.put("a", kept)
    scene.adapters.put("b", params(1))
    for key in ("b", "never was"):
        scene.adapters.drop(key)
    scene.adapters.put("c", params(2))
    assert await scene.get("a") is kept


@in_a_loop
async def test_an_adapter_larger_than_the_limit_is_held() -> None:
    scene, last = Scene(0.1), params(2)
    for one in (params(0), params(1), last):
        scene.adapters.put(f"a{one.flat[0]}", one)
    assert await scene.get(f"a{last.flat[0]}") is last
    assert len(scene.left) == 2


def test_samples_of_unsaved_weights_that_left_memory_fail_and_say_why(tmp_path: Path) -> None:
    with running(tmp_path, adapter_bytes=1) as server:
        session = server.session()
        model = server.model(session)
        samplers = []
        for number in range(2):
            unsaved = {"model_id": model, "sampling_session_seq_id": number, "seq_id": number + 1}
            samplers.append(server.result_of("/save_weights_for_sampler", unsaved)["sampling_session_id"])
        failed = server.sampled(samplers[0], 1)
        assert (failed["category"], "have left memory" in failed["error"]) == ("user", True), failed
        assert server.sampled(samplers[1], 1)["sequences"]
        saved = {"model_id": model, "path": "kept", "seq_id": 3}
        path = server.result_of("/save_weights_for_sampler", saved)["path"]
        kept = server.sampler(session, 2, model_path=path).json()["sampling_session_id"]
        for number in (1, 2):
            assert server.sampled(kept, number)["sequences"]  # out of its checkpoint
            server.sampled(samplers[1], number + 1)
