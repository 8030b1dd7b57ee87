"""Usage and storage."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

from support.clock import FakeClock
from support.stores import START, adapter, add_run, store_with_run, usage_of

from tinker_sync.local.store import Store

BEGIN = datetime.fromtimestamp(START, timezone.utc)


def test_tokens_are_summed_by_hour_and_kind(tmp_path: Path) -> None:
    clock = FakeClock(time_s=START)
    with store_with_run(tmp_path, clock) as store:
        store.record_usage("s-1", "r-1", "org/base", "training", 100)
        store.record_usage("s-1", "r-1", "org/base", "training", 11)
        store.record_usage("s-1", None, "org/base", "sample", 7)
        store.record_usage("s-1", None, "org/base", "prefill_cached", 0)
        clock.advance(3600)
        store.record_usage("s-1", "r-1", "org/base", "training", 1)
    with Store(tmp_path, clock=clock) as store:
        store.record_usage("s-1", "r-1", "org/base", "training", 2)
        first = [(0, "sampling_sample", 7), (0, "training", 111)]
        assert usage_of(store, 0) == [*first, (1, "training", 3)]
        events = store.usage(BEGIN, BEGIN + timedelta(hours=5))
        assert {(each.session_id, each.base_model, each.project_id) for each in events} == {
            ("s-1", "org/base", "p-1")
        }
        assert usage_of(store, 1, 1) == [(1, "training", 3)]
        assert usage_of(store, 2) == []
        assert usage_of(store, -2, 3) == first


def test_runs_of_one_session_are_billed_together(tmp_path: Path) -> None:
    with store_with_run(tmp_path) as store:
        add_run(store, "r-2")
        for run in ("r-1", "r-2"):
            store.record_usage("s-1", run, "org/base", "training", 5)
        assert usage_of(store, 0) == [(0, "training", 10)]


def test_checkpoints_are_billed_by_number(tmp_path: Path) -> None:
    with store_with_run(tmp_path) as store:
        for name in "ab":
            store.save_checkpoint("r-1", "training", name, adapter(), {})
        store.delete_checkpoint("r-1", "training", "a")
        assert usage_of(store, 0) == [(0, "checkpoint", 2)]


def test_present_storage_is_listed_by_project(tmp_path: Path) -> None:
    with store_with_run(tmp_path) as store:
        store.add_session("s-2")
        add_run(store, "r-2", session_id="s-2", project_id=None)
        assert store.storage_now() == []
        sizes = [
            store.save_checkpoint("r-1", "training", name, adapter(), {}).size_bytes or 0 for name in "ab"
        ]
        store.save_checkpoint("r-2", "training", "c", adapter(), {})
        store.save_checkpoint("r-2", "training", "gone", adapter(), {}, ttl_s=0)
        rows = {row.project_id: (row.checkpoint_count, row.size_bytes) for row in store.storage_now()}
        assert rows == {"p-1": (2, sum(sizes)), None: (1, sizes[0])}
        [row] = store.storage_now("p-1")
        assert row.checkpoint_count == 2
