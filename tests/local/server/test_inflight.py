"""Each inflight save gives its weights to all inflight samplers of the model; snapshots keep theirs."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from support.embedded import BASE, Running, alive, running

from tinker_sync.local.engine.lora import LoraParams

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


class Run:
    """A model that a test trains and saves, and the requests to its samplers."""

    def __init__(self, server: Running) -> None:
        self.server = server
        self.session = server.session()
        self.model = server.model(self.session)
        self._seq = self._sampler = 0

    def seq(self) -> int:
        self._seq += 1
        return self._seq

    def learn(self) -> None:
        self.server.pass_(self.model, self.seq())
        self.server.optim(self.model, self.seq(), learning_rate=0.05)

    def save(self, kind: str | None) -> str:
        """Save the present weights for a sampler of this kind, and return the sampler's id."""
        body: dict[str, Any] = {"model_id": self.model, "sampling_session_seq_id": self._sampler}
        self._sampler += 1
        body |= {"seq_id": self.seq(), **({} if kind is None else {"kind": kind})}
        made: str = self.server.result_of("/save_weights_for_sampler", body)["sampling_session_id"]
        return made

    def scores(self, sampler: str, number: int | None = None) -> list[float]:
        """Return the log-probabilities of the prompt, by which a test recognises the weights of a sampler."""
        found: list[float] = self.server.sampled(sampler, number, PROMPT, prompt_logprobs=True)[
            "prompt_logprobs"
        ]
        return found


def test_an_inflight_save_moves_the_older_inflight_samplers_and_no_snapshot(server: Running) -> None:
    run = Run(server)
    run.learn()
    snapshot, unnamed, first = run.save("snapshot"), run.save(None), run.save("inflight")
    before = run.scores(first)
    assert run.scores(snapshot) == run.scores(unnamed) == before
    run.learn()
    later_snapshot = run.save("snapshot")
    assert run.scores(first) == before  # a snapshot moves no other sampler
    second = run.save("inflight")
    after = run.scores(second)
    assert after != before
    assert run.scores(first) == run.scores(later_snapshot) == after
    assert run.scores(snapshot) == run.scores(unnamed) == before
    run.learn()
    third = run.save("inflight")
    newest = run.scores(third)
    assert newest not in (before, after)
    assert run.scores(first) == run.scores(second) == newest
    assert run.scores(later_snapshot) == after


def test_models_do_not_move_the_samplers_of_each_other(server: Running) -> None:
    one, other = Run(server), Run(server)
    one.learn()
    sampler = one.save("inflight")
    before = one.scores(sampler)
    other.learn()
    other.learn()
    assert other.scores(other.save("inflight")) != before
    assert one.scores(sampler) == before


def test_only_the_newest_inflight_weights_stay_in_memory(server: Running) -> None:
    run = Run(server)
    run.learn()
    run.save("inflight")
    before = alive(LoraParams)
    for _ in range(3):
        run.save("inflight")
    assert not alive(LoraParams) - before


def test_a_save_looks_at_all_samplers_a_few_times_only(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may make a sampler at each step, and the event loop serves all calls meanwhile."""
    looks = 0

    class Counting(dict[str, Any]):
        def values(self) -> Any:
            nonlocal looks
            looks += 1
            return super().values()

    run = Run(server)
    monkeypatch.setattr(server.app.service, "samplers", Counting())
    for count in (2, 20):
        for _ in range(count):
            run.save("inflight")
        looks = 0
        run.save("inflight")
        assert 0 < looks <= 3
    looks = 0
    server.app.service.loop.call_soon_threadsafe(server.app.service.release, run.session)
    server.session()
    assert 0 < looks <= 3
    assert not server.app.service.samplers


def test_a_sample_ends_while_the_target_moves(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample that waits for its weights while an inflight save replaces them uses the new weights."""
    run = Run(server)
    run.learn()
    sampler = run.save("inflight")
    before = run.scores(sampler)
    adapters = server.app.service.adapters
    asked, moved = threading.Event(), asyncio.Event()
    get = adapters.get

    async def late(key: str, load: Any = None) -> LoraParams:
        if not asked.is_set():
            asked.set()
            await asyncio.wait_for(moved.wait(), 10)
        return await get(key, load)

    monkeypatch.setattr(adapters, "get", late)
    promise = server.sample(sampler, 7, PROMPT, prompt_logprobs=True)["request_id"]
    assert asked.wait(120)
    run.learn()
    newest = run.save("inflight")
    server.app.service.loop.call_soon_threadsafe(moved.set)
    after = server.result(promise)["prompt_logprobs"]
    assert after == run.scores(newest) != before


def test_a_long_sample_goes_on_while_the_target_moves(server: Running) -> None:
    run = Run(server)
    run.learn()
    sampler = run.save("inflight")
    params = {"max_tokens": 60, "stop": [], "temperature": 1.0}
    promises = [server.sample(sampler, n, PROMPT, params=params)["request_id"] for n in range(8)]
    run.learn()
    run.save("inflight")
    for promise in promises:
        assert len(server.result(promise)["sequences"][0]["tokens"]) == 60


def test_what_a_prompt_left_behind_is_not_used_for_newer_weights(server: Running) -> None:
    run = Run(server)
    run.learn()
    sampler = run.save("inflight")
    once = server.sampled(sampler, 0, PROMPT)
    again = server.sampled(sampler, 1, PROMPT)
    assert (once.get("prompt_cache_hit_tokens", 0), again["prompt_cache_hit_tokens"] > 0) == (0, True)
    run.learn()
    run.save("inflight")
    moved = server.sampled(sampler, 2, PROMPT)
    assert moved.get("prompt_cache_hit_tokens", 0) == 0
    fresh = run.save("snapshot")
    assert run.scores(sampler, 3) == run.scores(fresh, 0)


def test_inflight_and_a_name_exclude_each_other(server: Running) -> None:
    run = Run(server)
    body = {"model_id": run.model, "path": "a", "seq_id": run.seq(), "kind": "inflight"}
    reply = server.post("/save_weights_for_sampler", body)
    assert (reply.status, "always a snapshot" in reply.detail) == (400, True)
    run.learn()
    assert run.scores(run.save("inflight"))


def test_a_repeated_inflight_save_moves_the_target_once(server: Running) -> None:
    run = Run(server)
    run.learn()
    body = {"model_id": run.model, "sampling_session_seq_id": 0, "seq_id": run.seq(), "kind": "inflight"}
    first = server.ok("/save_weights_for_sampler", body)
    run.learn()
    again = server.ok("/save_weights_for_sampler", body)
    assert again == first
    sampler = server.result(first["request_id"])["sampling_session_id"]
    before = run.scores(sampler)
    run._sampler = 1
    assert run.scores(run.save("inflight")) != before


def test_after_a_restart_inflight_weights_are_gone_and_snapshots_by_name_stay(tmp_path: Path) -> None:
    with running(tmp_path, seed=1) as server:
        run = Run(server)
        run.learn()
        sampler = run.save("inflight")
        named = {"model_id": run.model, "path": "kept", "seq_id": run.seq(), "kind": "snapshot"}
        path = server.result_of("/save_weights_for_sampler", named)["path"]
        before = run.scores(sampler)
    with running(tmp_path, seed=1) as server:
        run.server = server
        told = server.get(f"/samplers/{sampler}").json()
        assert (told["base_model"], told.get("model_path")) == (BASE, None)
        body = {"sampling_session_id": sampler, "prompt": {"chunks": []}, "sampling_params": {}}
        reply = server.post("/asample", body)
        assert (reply.status, "never saved" in reply.detail) == (410, True)
        opened = server.sampler(server.session(), model_path=path).json()["sampling_session_id"]
        assert run.scores(opened) == before
