"""What the store keeps: checkpoints with their files, sessions and their search, usage."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from support.clock import FakeClock
from support.engine_models import busy_params, tiny_weights
from support.stores import START, adapter, failure_of, same, store_with_run, with_optimizer

from tinker_sync.local.engine.lora import LoraSettings
from tinker_sync.local.engine.model import read_safetensors
from tinker_sync.local.store import Store, StoreError
from tinker_sync.local.store.peft import config
from tinker_sync.types.search import (
    ActiveSessionStatusQuery,
    ClientFinishedSessionStatusQuery,
    FailedSessionStatusQuery,
    SessionSearchRequest,
)

BEGIN = datetime.fromtimestamp(START, timezone.utc)


def folders(directory: Path) -> set[str]:
    return {path.name for part in ("checkpoints", "staging") for path in (directory / part).iterdir()}


def names(store: Store) -> set[str]:
    return {row.checkpoint_id for row in store.list_checkpoints("r-1")}


def test_a_checkpoint_survives_a_restart_bit_for_bit(tmp_path: Path) -> None:
    arrays = with_optimizer(1)
    arrays["m.q_proj.lora_A"][0, :3] = [np.nan, -0.0, np.inf]
    info = {"optimizer": {"type": "adamw"}, "lists": [1, None, "ä"]}
    with store_with_run(tmp_path) as store:
        saved = store.save_checkpoint("r-1", "training", "a", arrays, info, user_metadata={"k": "v"})
        assert (saved.time, saved.expires_at, saved.public) == (BEGIN, None, False)
        assert (saved.user_metadata, saved.base_model) == ({"k": "v"}, "org/base")
        assert saved.tinker_path == "tinker://r-1/weights/a"
        files = store.checkpoint("r-1", "training", "a").files
        assert saved.size_bytes == sum(file.path.stat().st_size for file in files.values())
    with Store(tmp_path) as store:
        loaded = store.load_checkpoint("r-1", "training", "a")
        assert loaded[0] == info == store.checkpoint("r-1", "training", "a").info
        assert same(loaded[1], arrays)
        assert store.checkpoint("r-1", "training", "a").described == saved == store.list_checkpoints("r-1")[0]


@pytest.mark.parametrize("overwrite", [False, True])
def test_concurrent_saves_leave_one_checkpoint(tmp_path: Path, overwrite: bool) -> None:
    gate = Barrier(6)

    def save(number: int) -> bool:
        gate.wait(120)
        try:
            store.save_checkpoint("r-1", "training", "a", adapter(number), {"n": number}, overwrite=overwrite)
        except StoreError as refused:
            return refused.kind != "exists"
        return True

    with store_with_run(tmp_path) as store, ThreadPoolExecutor(6) as pool:
        won = list(pool.map(save, range(6)))
        assert won.count(True) == (6 if overwrite else 1)
        info, arrays = store.load_checkpoint("r-1", "training", "a")
        assert same(arrays, adapter(info["n"]))
        assert won[info["n"]]
        assert len(folders(tmp_path)) == 1


def test_readers_get_a_complete_checkpoint_or_not_found(tmp_path: Path) -> None:
    """Readers of a checkpoint that another thread overwrites and deletes get a whole save or `not_found`."""
    with store_with_run(tmp_path) as store, ThreadPoolExecutor(4) as pool:
        store.save_checkpoint("r-1", "training", "a", with_optimizer(0), {"n": 0})

        def read(_: int) -> bool:
            try:
                info, arrays = store.load_checkpoint("r-1", "training", "a")
            except StoreError as gone:
                if gone.kind != "not_found":
                    raise
                return False
            assert same(arrays, with_optimizer(info["n"]))
            return True

        reads = pool.map(read, range(150))
        for number in range(1, 31):
            if number % 3 == 0:
                store.delete_checkpoint("r-1", "training", "a")
            store.save_checkpoint(
                "r-1", "training", "a", with_optimizer(number), {"n": number}, overwrite=True
            )
        assert any(reads)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "a\\b", "/etc/passwd", "a\0", "a\n", "x" * 256, "ä", "a b", "%2e"]
)
def test_unsafe_names_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "data").mkdir()
    with store_with_run(tmp_path / "data") as store:
        before = sorted(path for path in tmp_path.rglob("*"))
        assert failure_of(store.save_checkpoint, "r-1", "training", name, adapter(), {}) == "bad_name"
        calls: list[Any] = [store.load_checkpoint, store.delete_checkpoint, store.checkpoint]
        for call in calls:
            assert failure_of(call, "r-1", "training", name) == "not_found"
            assert failure_of(call, name, "training", "a") == "not_found"
            assert failure_of(call, "r-1", name, "a") == "not_found"
        assert sorted(path for path in tmp_path.rglob("*")) == before


def test_bad_content_is_refused_and_leaves_no_files(tmp_path: Path) -> None:
    with store_with_run(tmp_path) as store:
        for kind in ("sampler", "external"):
            with pytest.raises(ValueError, match=r"cannot hold optimizer\.first"):
                store.save_checkpoint("r-1", kind, "a", with_optimizer(), {})
        with pytest.raises(ValueError, match="not one adapter"):
            store.save_checkpoint("r-1", "training", "a", {}, {})
        with pytest.raises(ValueError, match="cannot be written"):
            store.save_checkpoint("r-1", "training", "a", {**adapter(), "odd": np.zeros(1, "c8")}, {})
        with pytest.raises(TypeError):
            store.save_checkpoint("r-1", "training", "a", adapter(), {"no": object()})
        with pytest.raises(StoreError, match="no training run r-9"):
            store.save_checkpoint("r-9", "training", "a", adapter(), {})
        assert folders(tmp_path) == set()
        assert names(store) == set()


def test_deleting_removes_the_files(tmp_path: Path) -> None:
    with store_with_run(tmp_path) as store:
        store.save_checkpoint("r-1", "training", "a", adapter(), {})
        file = store.checkpoint("r-1", "training", "a").files["adapter_model.safetensors"]
        with file.path.open("rb") as reader:
            store.delete_checkpoint("r-1", "training", "a")
            assert len(reader.read()) > 64  # an open file stays readable
        assert folders(tmp_path) == set()
        calls: list[Any] = [store.delete_checkpoint, store.load_checkpoint, store.checkpoint]
        for call in calls:
            with pytest.raises(StoreError, match="has no training checkpoint a") as caught:
                call("r-1", "training", "a")
            assert caught.value.kind == "not_found"


def test_expiry_hides_a_checkpoint_and_the_sweep_removes_its_files(tmp_path: Path) -> None:
    clock = FakeClock(time_s=START)
    with store_with_run(tmp_path, clock) as store:
        saved = store.save_checkpoint("r-1", "training", "a", adapter(), {}, ttl_s=10)
        assert saved.expires_at == BEGIN + timedelta(seconds=10)
        store.save_checkpoint("r-1", "training", "b", adapter(), {}, ttl_s=20)
        store.save_checkpoint("r-1", "sampler", "stays", adapter(), {})
        clock.advance(9.999)
        assert store.sweep_expired() == 0
        assert store.run("r-1").last_checkpoint is not None
        clock.advance(0.001)
        assert names(store) == {"weights/b", "sampler_weights/stays"}
        assert store.list_user_checkpoints(10, 0)[1] == 2
        assert failure_of(store.load_checkpoint, "r-1", "training", "a") == "not_found"
        with pytest.raises(StoreError):
            store.set_ttl("r-1", "training", "a", None)  # too late
        assert len(folders(tmp_path)) == 3
        assert store.sweep_expired() == 1
        assert len(folders(tmp_path)) == 2
        clock.advance(100)
        store.save_checkpoint("r-1", "training", "b", adapter(4), {})  # the name is free before the sweep
        assert same(store.load_checkpoint("r-1", "training", "b")[1], adapter(4))
        assert store.sweep_expired() == 0
        assert len(folders(tmp_path)) == 2


@pytest.mark.parametrize("damage", ["cut", "longer", "flipped", "gone", "folder"])
def test_changed_files_are_reported_as_damaged(tmp_path: Path, damage: str) -> None:
    with store_with_run(tmp_path) as store:
        store.save_checkpoint("r-1", "training", "a", with_optimizer(), {})
        store.save_checkpoint("r-1", "training", "b", with_optimizer(), {})
        path = store.checkpoint("r-1", "training", "a").files["optimizer.safetensors"].path
        content = path.read_bytes()
        if damage == "cut":
            path.write_bytes(content[:-1])
        elif damage == "longer":
            path.write_bytes(content + b"x")
        elif damage == "flipped":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        elif damage == "gone":
            path.unlink()
        else:
            path.unlink()
            path.mkdir()
        assert failure_of(store.load_checkpoint, "r-1", "training", "a") == "damaged"
        store.load_checkpoint("r-1", "training", "b")
        assert names(store) == {"weights/a", "weights/b"}


def test_a_stored_adapter_has_the_layout_of_peft(tmp_path: Path) -> None:
    """The tensors of the files, with the scale that PEFT computes, give the same product as the engine."""
    weights = tiny_weights()
    params = busy_params(weights, LoraSettings(rank=4))
    with Store(tmp_path) as store:
        store.add_session("s-1")
        store.add_run(
            "r-1", session_id="s-1", model_seq_id=0, base_model="org/base", lora=LoraSettings(rank=4)
        )
        store.save_checkpoint("r-1", "sampler", "x", params.named(), {})
        files = store.checkpoint("r-1", "sampler", "x").files
    assert set(files) == {"adapter_config.json", "adapter_model.safetensors"}
    tree = json.loads(files["adapter_config.json"].path.read_bytes())
    tensors = read_safetensors(files["adapter_model.safetensors"].path)
    assert tree["base_model_name_or_path"] == "org/base"
    assert (tree["peft_type"], tree["task_type"], tree["r"]) == ("LORA", "CAUSAL_LM", 4)
    names = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    assert set(tree["target_modules"]) == names
    assert len(tensors) == 2 * (2 * 7 + 1)
    assert [name for name in tensors if ".layers." not in name] == [
        f"base_model.model.model.unembed_tokens.{part}.weight" for part in ("lora_A", "lora_B")
    ]
    module = "base_model.model.model.layers.1.self_attn.k_proj"
    a, b = tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
    x = np.random.default_rng(0).standard_normal((3, weights.config.hidden_size)).astype(np.float32)
    pair = params.pairs["1.qkv"]
    ours = params.settings.scale * (x @ pair.a[4:8].T) @ pair.bs[1][1].T
    np.testing.assert_allclose(tree["lora_alpha"] / tree["r"] * (x @ a.T) @ b.T, ours, rtol=1e-5)


def test_halves_and_mixed_ranks_are_refused() -> None:
    half = {"x.lora_A": np.zeros((4, 8))}
    with pytest.raises(ValueError, match="not one adapter"):
        config(half, "org/base")
    with pytest.raises(ValueError, match=r"ranks \[2, 4\]"):
        config({**half, "x.lora_B": np.zeros((8, 2))}, "org/base")
    with pytest.raises(ValueError, match="0 modules"):
        config({}, "org/base")


def test_a_checkpoint_is_a_request_of_its_run(tmp_path: Path) -> None:
    clock = FakeClock(time_s=START)
    with store_with_run(tmp_path, clock) as store:
        clock.advance(60)
        store.save_checkpoint("r-1", "training", "a", adapter(), {})
    with Store(tmp_path) as store:
        assert store.run("r-1").last_request_time == BEGIN + timedelta(seconds=60)


@pytest.fixture
def many(tmp_path: Path) -> Store:
    clock = FakeClock(time_s=START)
    store = Store(tmp_path, clock=clock)
    store.add_session("s-0", display_name="Nightly run", user_metadata={"team": "a", "n": "1", "epoch": 3})
    store.add_session("s-1", display_name="nightly", project_id="p-1", user_metadata={"team": "a"})
    clock.advance(1)
    store.add_session("s-2", display_name="day", project_id="p-2")
    store.add_session("s-3")
    store.finish_session("s-1", "success")
    store.finish_session("s-2", "errored")
    return store


@pytest.mark.parametrize(
    ("request_", "found"),
    [
        (SessionSearchRequest(), ["s-3", "s-2", "s-1", "s-0"]),
        (SessionSearchRequest(session_id="s-2"), ["s-2"]),
        (SessionSearchRequest(display_name="NIGHT"), ["s-1", "s-0"]),
        (SessionSearchRequest(display_name="run night"), ["s-0"]),
        (SessionSearchRequest(display_name="night", session_id="s-2"), ["s-2", "s-1", "s-0"]),
        (SessionSearchRequest(project_ids=["p-1", "p-2"]), ["s-2", "s-1"]),
        (SessionSearchRequest(user_metadata={"team": "a"}), ["s-1", "s-0"]),
        (SessionSearchRequest(user_metadata={"team": "a", "n": "1"}), ["s-0"]),
        (SessionSearchRequest(user_metadata={"epoch": "3"}), ["s-0"]),
        (SessionSearchRequest(project_ids=["p-1", "default"]), ["s-3", "s-1", "s-0"]),
        (SessionSearchRequest(statuses=[ActiveSessionStatusQuery()]), ["s-3", "s-0"]),
        (SessionSearchRequest(statuses=[FailedSessionStatusQuery()]), []),
        (SessionSearchRequest(statuses=[ClientFinishedSessionStatusQuery()]), ["s-2", "s-1"]),
        (
            SessionSearchRequest(
                statuses=[ClientFinishedSessionStatusQuery(reasons=["errored"]), FailedSessionStatusQuery()]
            ),
            ["s-2"],
        ),
    ],
)
def test_a_search_finds_its_sessions(many: Store, request_: SessionSearchRequest, found: list[str]) -> None:
    with many:
        sessions, cursor = many.search_sessions(request_)
        assert ([session.session_id for session in sessions], cursor) == (found, None)


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_a_search_continues_at_the_cursor(many: Store, limit: int) -> None:
    with many:
        seen, cursor, pages = [], None, 0
        while True:
            page, cursor = many.search_sessions(SessionSearchRequest(limit=limit, cursor=cursor))
            seen += [session.session_id for session in page]
            pages += 1
            if cursor is None:
                break
        assert seen == ["s-3", "s-2", "s-1", "s-0"]
        assert pages == -(-4 // limit)
