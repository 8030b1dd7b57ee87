"""Checkpoints are saved, loaded, listed, replaced, expired and deleted, with their files."""

from __future__ import annotations

import gc
import json
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from support.clock import FakeClock
from support.stores import START, adapter, add_run, failure_of, same, store_with_run, with_optimizer

from tinker_sync.local.store import Store, StoreError

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
        files = store.checkpoint_files("r-1", "training", "a")
        assert saved.size_bytes == sum(file.path.stat().st_size for file in files.values())
    with Store(tmp_path) as store:
        loaded = store.load_checkpoint("r-1", "training", "a")
        assert loaded[0] == info == store.checkpoint_info("r-1", "training", "a")
        assert same(loaded[1], arrays)
        assert store.checkpoint("r-1", "training", "a") == saved == store.list_checkpoints("r-1")[0]


def test_the_oldest_checkpoints_are_deleted_beyond_a_size(tmp_path: Path) -> None:
    with store_with_run(tmp_path) as store:
        rows = [store.save_checkpoint("r-1", "sampler", name, adapter(), {}) for name in "abcd"]
        sizes = [row.size_bytes or 0 for row in rows]
        assert store.prune(sum(sizes)) == 0
        assert store.prune(sum(sizes[2:])) == 2
        assert names(store) == {"sampler_weights/c", "sampler_weights/d"}
        assert len(folders(tmp_path)) == 2
        assert store.prune(0) == 2


def test_a_training_checkpoint_has_optimizer_and_info_files(tmp_path: Path) -> None:
    with store_with_run(tmp_path) as store:
        store.save_checkpoint("r-1", "training", "a", with_optimizer(), {"steps": 3})
        files = store.checkpoint_files("r-1", "training", "a")
        assert set(files) == {
            "adapter_model.safetensors",
            "adapter_config.json",
            "optimizer.safetensors",
            "checkpoint.json",
        }
        about = json.loads(files["checkpoint.json"].path.read_bytes())
        assert (about["run"], about["kind"], about["name"]) == ("r-1", "training", "a")
        assert about["info"] == {"steps": 3}


def test_names_are_separate_for_each_kind_and_run(tmp_path: Path) -> None:
    with store_with_run(tmp_path) as store:
        add_run(store, "r-2")
        for number, (run, kind) in enumerate(
            [("r-1", "training"), ("r-1", "sampler"), ("r-1", "external"), ("r-2", "training")]
        ):
            store.save_checkpoint(run, kind, "a", adapter(number), {"number": number})  # type: ignore[arg-type]
        assert names(store) == {"weights/a", "sampler_weights/a", "external_weights/a"}
        info, arrays = store.load_checkpoint("r-1", "external", "a")
        assert info == {"number": 2}
        assert same(arrays, adapter(2))


def test_a_taken_name_is_refused_and_leaves_no_files(tmp_path: Path) -> None:
    with store_with_run(tmp_path) as store:
        store.save_checkpoint("r-1", "training", "a", adapter(1), {})
        before = folders(tmp_path)
        with pytest.raises(StoreError, match="already has a training checkpoint a") as caught:
            store.save_checkpoint("r-1", "training", "a", adapter(2), {})
        assert caught.value.kind == "exists"
        assert folders(tmp_path) == before
        assert same(store.load_checkpoint("r-1", "training", "a")[1], adapter(1))


def test_overwriting_replaces_a_checkpoint(tmp_path: Path) -> None:
    with store_with_run(tmp_path) as store:
        store.save_checkpoint("r-1", "training", "a", adapter(1), {"n": 1})
        store.set_published("r-1", "training", "a", True)
        store.save_checkpoint("r-1", "training", "a", adapter(2), {"n": 2}, overwrite=True)
        info, arrays = store.load_checkpoint("r-1", "training", "a")
        assert info == {"n": 2}
        assert same(arrays, adapter(2))
        assert len(folders(tmp_path)) == 1
        assert not store.checkpoint("r-1", "training", "a").public
        store.save_checkpoint("r-1", "training", "b", adapter(3), {}, overwrite=True)  # a new name
        assert names(store) == {"weights/a", "weights/b"}


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
        calls: list[Any] = [store.load_checkpoint, store.delete_checkpoint, store.checkpoint_files]
        for call in calls:
            assert failure_of(call, "r-1", "training", name) == "not_found"
            assert failure_of(call, name, "training", "a") == "not_found"
            assert failure_of(call, "r-1", name, "a") == "not_found"
        assert sorted(path for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["a", "A-1_b.c", "...a", "-", "x" * 255, "con"])
def test_valid_names_are_accepted(tmp_path: Path, name: str) -> None:
    with store_with_run(tmp_path) as store:
        store.save_checkpoint("r-1", "sampler", name, adapter(), {})
        assert names(store) == {f"sampler_weights/{name}"}


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
        file = store.checkpoint_files("r-1", "training", "a")["adapter_model.safetensors"]
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


def test_a_time_to_live_can_be_changed_and_removed(tmp_path: Path) -> None:
    clock = FakeClock(time_s=START)
    with store_with_run(tmp_path, clock) as store:
        store.save_checkpoint("r-1", "training", "a", adapter(), {})
        store.set_ttl("r-1", "training", "a", 60)
        assert store.checkpoint("r-1", "training", "a").expires_at == BEGIN + timedelta(seconds=60)
        clock.advance(30)
        store.set_ttl("r-1", "training", "a", 60)  # from now
        assert store.checkpoint("r-1", "training", "a").expires_at == BEGIN + timedelta(seconds=90)
        store.set_ttl("r-1", "training", "a", None)
        clock.advance(1000)
        assert store.checkpoint("r-1", "training", "a").expires_at is None
        store.set_ttl("r-1", "training", "a", 1e300)
        assert store.checkpoint("r-1", "training", "a").expires_at is None


def test_a_checkpoint_can_be_published_and_unpublished(tmp_path: Path) -> None:
    with store_with_run(tmp_path) as store:
        store.save_checkpoint("r-1", "training", "a", adapter(), {})
        store.save_checkpoint("r-1", "training", "b", adapter(), {})
        store.set_published("r-1", "training", "a", True)
        assert [row.public for row in store.list_checkpoints("r-1")] == [False, True]
        store.set_published("r-1", "training", "a", False)
        assert not store.checkpoint("r-1", "training", "a").public
        with pytest.raises(StoreError, match="has no"):
            store.set_published("r-1", "sampler", "a", True)


def test_all_checkpoints_are_listed_in_pages(tmp_path: Path) -> None:
    with store_with_run(tmp_path) as store:
        add_run(store, "r-2", project_id="p-2")
        for number in range(4):
            store.save_checkpoint("r-1", "training", f"a{number}", adapter(), {})
        store.save_checkpoint("r-2", "training", "b", adapter(), {})
        pages = [store.list_user_checkpoints(2, offset) for offset in (0, 2, 4, 6)]
        names = [[row.checkpoint_id.removeprefix("weights/") for row in rows] for rows, _ in pages]
        assert names == [["b", "a3"], ["a2", "a1"], ["a0"], []]
        assert {total for _, total in pages} == {5}
        with pytest.raises(StoreError, match="no training run r-3"):
            store.list_checkpoints("r-3")


@pytest.mark.parametrize("damage", ["cut", "longer", "flipped", "gone", "folder"])
def test_changed_files_are_reported_as_damaged(tmp_path: Path, damage: str) -> None:
    with store_with_run(tmp_path) as store:
        store.save_checkpoint("r-1", "training", "a", with_optimizer(), {})
        store.save_checkpoint("r-1", "training", "b", with_optimizer(), {})
        path = store.checkpoint_files("r-1", "training", "a")["optimizer.safetensors"].path
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


def test_saving_keeps_no_reference_to_the_arrays(tmp_path: Path) -> None:
    arrays = with_optimizer()
    with store_with_run(tmp_path) as store:
        store.save_checkpoint("r-1", "training", "a", arrays, {})
        gc.collect()
        held = [other for other in gc.get_referrers(arrays["optimizer.first"]) if other is not arrays]
        assert [other for other in held if isinstance(other, dict)] == []
