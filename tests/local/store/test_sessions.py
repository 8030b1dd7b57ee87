"""Sessions, samplers, and searching them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from support.clock import FakeClock
from support.stores import START, adapter, add_run, failure_of, store_with_run

from tinker_sync.local.store import Store, StoreError
from tinker_sync.types.search import (
    ActiveSessionStatusQuery,
    ClientFinishedSessionStatusQuery,
    ClientSessionFinished,
    FailedSessionStatusQuery,
    SessionActive,
    SessionSearchRequest,
)

BEGIN = datetime.fromtimestamp(START, timezone.utc)


def kind_of(caught: pytest.ExceptionInfo[StoreError]) -> str:
    return caught.value.kind


def test_a_session_keeps_its_facts_across_a_restart(tmp_path: Path) -> None:
    with Store(tmp_path, clock=FakeClock(time_s=START)) as store:
        store.add_session(
            "s-1",
            tags=["a", "b"],
            user_metadata={"team": "x", "n": None},
            sdk_version="0.36.0",
            project_id="p-1",
            display_name="Night",
        )
        opened = store.session("s-1")
        assert (opened.created_at, opened.status) == (BEGIN, SessionActive())
        assert (opened.checkpoints_count, opened.checkpoint_storage_bytes) == (0, 0)
    with Store(tmp_path) as store:
        assert store.session("s-1") == opened
        assert opened.user_metadata == {"team": "x", "n": "null"}
        assert (opened.project_id, opened.display_name) == ("p-1", "Night")


def test_duplicate_and_unknown_ids_are_refused(tmp_path: Path) -> None:
    with store_with_run(tmp_path) as store:
        with pytest.raises(StoreError, match="s-1") as caught:
            store.add_session("s-1")
        assert kind_of(caught) == "exists"
        for look in (store.session, store.sampler, store.run):
            with pytest.raises(StoreError, match="there is no") as caught:
                look("nobody")
            assert kind_of(caught) == "not_found"
        for bad in ("", "..", "a/b", "x" * 300, "a\n", "ä", "a b"):
            assert failure_of(store.add_session, bad) == "bad_name"
        with pytest.raises(StoreError, match="no session s-2") as caught:
            add_run(store, "r-2", session_id="s-2")
        assert kind_of(caught) == "not_found"


def test_a_session_keeps_its_first_end(tmp_path: Path) -> None:
    with store_with_run(tmp_path) as store:
        store.finish_session("s-1", "success", "done")
        store.finish_session("s-1", "interrupted")
        status = store.session("s-1").status
        assert isinstance(status, ClientSessionFinished)
        assert (status.reason.type, status.detail) == ("success", "done")
        with pytest.raises(StoreError, match="no session s-9"):
            store.finish_session("s-9", "success")


def test_a_touch_is_visible_at_once_and_durable(tmp_path: Path) -> None:
    clock = FakeClock(time_s=START)
    with store_with_run(tmp_path, clock) as store:
        clock.advance(60)
        store.touch_run("r-1")
        store.touch_run("unknown")
        assert store.run("r-1").last_request_time == BEGIN + timedelta(seconds=60)
        clock.advance(60)
        store.touch_run("r-1")
    with Store(tmp_path) as store:
        assert store.run("r-1").last_request_time == BEGIN + timedelta(seconds=120)


def test_pages_are_ordered_and_give_the_total(tmp_path: Path) -> None:
    clock = FakeClock(time_s=START)
    with Store(tmp_path, clock=clock) as store:
        for number in range(7):
            store.add_session(f"s-{number}")
            if number % 2:  # some share a moment
                clock.advance(1)
        seen = []
        for offset in range(0, 9, 3):
            page, total = store.list_sessions(3, offset)
            assert total == 7
            seen += page
        assert seen == [f"s-{number}" for number in reversed(range(7))]


def test_a_session_lists_its_runs_and_samplers(tmp_path: Path) -> None:
    with store_with_run(tmp_path) as store:
        store.add_session("s-2")
        add_run(store, "r-2", session_id="s-2")
        sources = ["tinker://r-1/sampler_weights/x#7", None, "unsaved:r-1"]
        for number, source in enumerate(sources):
            name = f"s-1:sample:{number}"
            store.add_sampler(name, session_id="s-1", base_model="org/base", source=source)
            assert store.sampler(name) == (name, "s-1", "org/base", source)
        assert store.run_session("r-2") == "s-2"
        assert store.session_runs("s-1") == ["r-1"]
        assert store.session_samplers("s-1") == ["s-1:sample:0", "s-1:sample:1", "s-1:sample:2"]
        assert store.session_samplers("s-2") == []
        assert failure_of(store.add_sampler, "x", session_id="s-3", base_model="org/base") == "not_found"


def test_a_run_keeps_its_settings(tmp_path: Path) -> None:
    with store_with_run(tmp_path) as store:
        run = store.run("r-1")
        assert (run.training_run_id, run.base_model, run.is_lora, run.lora_rank) == (
            "r-1",
            "org/base",
            True,
            2,
        )
        assert (run.last_checkpoint, run.last_sampler_checkpoint, run.corrupted) == (None, None, False)
        saved = store.save_checkpoint("r-1", "training", "a", adapter(), {})
        latest = store.save_checkpoint("r-1", "sampler", "a", adapter(), {})
        store.set_run_corrupted("r-1")
        run = store.run("r-1")
        assert (run.last_checkpoint, run.last_sampler_checkpoint, run.corrupted) == (saved, latest, True)


def test_runs_are_listed_by_project(tmp_path: Path) -> None:
    with store_with_run(tmp_path) as store:
        for number in range(2, 6):
            add_run(store, f"r-{number}", project_id="p-2")
        runs, total = store.list_runs(3, 0)
        assert ([run.training_run_id for run in runs], total) == (["r-5", "r-4", "r-3"], 5)
        runs, total = store.list_runs(3, 3, "p-2")
        assert ([run.training_run_id for run in runs], total) == (["r-2"], 4)
        store.set_session_project("s-1", "p-3")
        assert store.list_runs(9, 0, "p-3")[1] == 5
        assert store.session("s-1").project_id == "p-3"


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


def test_checkpoints_of_a_session_are_counted(tmp_path: Path) -> None:
    with store_with_run(tmp_path) as store:
        add_run(store, "r-2")
        store.add_session("s-2")
        sizes = [
            store.save_checkpoint(run, "sampler", "x", adapter(), {}).size_bytes or 0
            for run in ("r-1", "r-2")
        ]
        store.save_checkpoint("r-1", "sampler", "gone", adapter(), {}, ttl_s=0)
        (other, mine), _ = store.search_sessions(SessionSearchRequest())
        assert (mine.checkpoints_count, mine.checkpoint_storage_bytes) == (2, sum(sizes))
        assert (other.checkpoints_count, other.checkpoint_storage_bytes) == (0, 0)
