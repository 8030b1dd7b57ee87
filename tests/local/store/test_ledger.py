"""Usage and the audit log."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clock import FakeClock
from support.stores import START, adapter, add_run, store_with_run

from tinker_sync.local.store import Store
from tinker_sync.local.store.ledger import _storage

BEGIN = datetime.fromtimestamp(START, timezone.utc)
HOUR = timedelta(hours=1)
HOUR_MICROS = 3_600_000_000


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
        rows = store.usage(BEGIN, BEGIN + 5 * HOUR)
        assert [(row.bucket_start, row.kind, row.amount) for row in rows] == [
            (BEGIN, "sample", 7),
            (BEGIN, "training", 111),
            (BEGIN + HOUR, "training", 3),
        ]
        assert {(row.session_id, row.base_model, row.project_id) for row in rows} == {
            ("s-1", "org/base", "p-1")
        }
        assert [row.amount for row in store.usage(BEGIN + HOUR, BEGIN + 2 * HOUR)] == [3]
        assert store.usage(BEGIN + 2 * HOUR, BEGIN + 5 * HOUR) == []
        assert [row.amount for row in store.usage(BEGIN - 2 * HOUR, BEGIN + HOUR)] == [7, 111]


def test_runs_of_one_session_are_billed_together(tmp_path: Path) -> None:
    with store_with_run(tmp_path) as store:
        add_run(store, "r-2")
        for run in ("r-1", "r-2"):
            store.record_usage("s-1", run, "org/base", "training", 5)
        [row] = store.usage(BEGIN, BEGIN + HOUR)
        assert row.amount == 10


def test_checkpoints_are_billed_by_number_and_storage_hours(tmp_path: Path) -> None:
    clock = FakeClock(time_s=START)
    with store_with_run(tmp_path, clock) as store:
        clock.advance(1800)
        size = store.save_checkpoint("r-1", "training", "a", adapter(), {}).size_bytes
        store.save_checkpoint("r-1", "training", "b", adapter(), {}, ttl_s=900)
        clock.advance(1800 + 3600 + 900)
        store.delete_checkpoint("r-1", "training", "a")
        store.sweep_expired()
        clock.advance(7200)
        rows = store.usage(BEGIN, BEGIN + 9 * HOUR)
        assert [(row.bucket_start, row.amount) for row in rows if row.kind == "checkpoint"] == [(BEGIN, 2)]
        stored = [(row.bucket_start, row.amount) for row in rows if row.kind == "storage"]
        assert stored == [
            (BEGIN, pytest.approx(size * 0.75 / 1e9)),  # one for half an hour, the other for a quarter
            (BEGIN + HOUR, pytest.approx(size / 1e9)),
            (BEGIN + 2 * HOUR, pytest.approx(size * 0.25 / 1e9)),
        ]
        assert {row.project_id for row in rows} == {"p-1"}


def test_storage_counts_up_to_now(tmp_path: Path) -> None:
    clock = FakeClock(time_s=START)
    with store_with_run(tmp_path, clock) as store:
        size = store.save_checkpoint("r-1", "training", "a", adapter(), {}).size_bytes
        clock.advance(360)
        [storage] = [row for row in store.usage(BEGIN, BEGIN + HOUR) if row.kind == "storage"]
        assert storage.amount == pytest.approx(size * 0.1 / 1e9)


spans = st.lists(
    st.tuples(
        st.sampled_from(["p-1", None]),
        st.integers(1, 10**9),
        st.integers(-2 * HOUR_MICROS, 8 * HOUR_MICROS),
        st.integers(0, 6 * HOUR_MICROS),
    ),
    max_size=6,
)


@given(spans, st.integers(0, 3), st.integers(1, 6))
def test_storage_is_the_sum(given_: list[tuple[str | None, int, int, int]], first: int, hours: int) -> None:
    end = first + hours
    within = [
        (project, size, since, since + length)
        for project, size, since, length in given_
        if since < end * HOUR_MICROS and since + length > first * HOUR_MICROS
    ]
    expected = {}
    for hour in range(first, end):
        for project, size, since, until in within:
            overlap = min(until, (hour + 1) * HOUR_MICROS) - max(since, hour * HOUR_MICROS)
            if overlap > 0:
                key = (project, hour)
                expected[key] = expected.get(key, 0.0) + size * overlap / HOUR_MICROS / 1e9
    got = {
        (row.project_id, int(row.bucket_start.timestamp()) // 3600): row.amount
        for row in _storage(within, first, end)
    }
    assert set(got) == set(expected)
    np.testing.assert_allclose([got[key] for key in expected], list(expected.values()), rtol=1e-9)


def test_present_storage_is_listed_by_project(tmp_path: Path) -> None:
    with store_with_run(tmp_path) as store:
        add_run(store, "r-2", project_id=None)
        assert store.storage_now() == []
        sizes = [store.save_checkpoint("r-1", "training", name, adapter(), {}).size_bytes for name in "ab"]
        store.save_checkpoint("r-2", "training", "c", adapter(), {})
        store.save_checkpoint("r-2", "training", "gone", adapter(), {}, ttl_s=0)
        rows = {row.project_id: (row.checkpoint_count, row.size_bytes) for row in store.storage_now()}
        assert rows == {"p-1": (2, sum(sizes)), None: (1, sizes[0])}
        [row] = store.storage_now("p-1")
        assert row.checkpoint_count == 2


def test_the_audit_log_filters_by_day_and_event(tmp_path: Path) -> None:
    clock = FakeClock(time_s=datetime(2026, 2, 3, 23, 59, tzinfo=timezone.utc).timestamp())
    with store_with_run(tmp_path, clock) as store:
        store.audit("checkpoint_saved", {"tinker_path": "tinker://r-1/weights/a"})
        store.audit("checkpoint_read", {})
        clock.advance(120)
        store.audit("checkpoint_read", {"n": 2})
    with Store(tmp_path, clock=clock) as store:
        rows = store.audit_log(date(2026, 2, 3))
        assert [row.event for row in rows] == ["checkpoint_saved", "checkpoint_read"]
        assert rows[0].detail == {"tinker_path": "tinker://r-1/weights/a"}
        assert [row.detail for row in store.audit_log()] == [{"n": 2}]
        assert store.audit_log(date(2026, 2, 5)) == []
