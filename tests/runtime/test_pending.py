from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from support.crowd import together

from tinker_sync.errors import TinkerError
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.pending import MAX_EARLY, PendingTable

Table = PendingTable["APIFuture[Any]"]


def test_promises_wait_in_the_order_they_came() -> None:
    table: Table = PendingTable()
    futures = {name: APIFuture[int]() for name in ("req-2", "req-1", "req-3")}
    assert [table.add(name, future) for name, future in futures.items()] == [True] * 3
    assert table.waiting() == ["req-2", "req-1", "req-3"]
    assert table.take("req-1") is futures["req-1"]
    assert table.take("req-1") is None
    assert repr(table) == "<PendingTable 2 waiting, 0 early>"


def test_a_promise_given_twice_fails_the_second_waiter_only() -> None:
    table: Table = PendingTable()
    first, second = APIFuture[int](), APIFuture[int]()
    assert table.add("req-1", first)
    assert not table.add("req-1", second)
    with pytest.raises(TinkerError, match="req-1 to two requests"):
        second.result(0)
    assert table.take("req-1") is first
    assert not first.done()


class TestCompletions:
    def test_a_completion_finds_its_waiter_who_stays(self) -> None:
        table: Table = PendingTable()
        future = APIFuture[int]()
        table.add("req-1", future)
        assert table.complete("req-1", "finished") is future
        assert table.early("req-1") is None
        assert table.waiting() == ["req-1"]

    def test_one_that_overtakes_the_promise_is_kept_for_it(self) -> None:
        table: Table = PendingTable()
        assert table.complete("req-1", "finished") is None
        table.add("req-1", APIFuture[int]())
        assert table.early("req-1") == "finished"
        assert table.early("req-1") is None

    def test_w24_those_nobody_waits_for_are_not_kept_for_ever(self) -> None:
        table: Table = PendingTable()
        for number in range(MAX_EARLY + 3):
            table.complete(f"req-{number}", number)
        assert repr(table) == f"<PendingTable 0 waiting, {MAX_EARLY} early>"
        assert table.early("req-2") is None
        assert table.early("req-3") == 3
        assert table.early(f"req-{MAX_EARLY + 2}") == MAX_EARLY + 2

    def test_none_is_missed_however_it_meets_its_promise(self) -> None:
        for number in range(100):
            table: Table = PendingTable()
            future = APIFuture[int]()

            def promised(
                table: Table = table, future: APIFuture[int] = future, name: str = f"req-{number}"
            ) -> Any:
                table.add(name, future)
                return table.early(name)

            early, waiter = together(
                promised, lambda table=table, n=number: table.complete(f"req-{n}", "finished")
            )
            assert (early, waiter) in [("finished", None), (None, future)]


class TestClose:
    def test_fails_who_waits_and_who_comes_later(self) -> None:
        table: Table = PendingTable()
        futures = present, another, late, later = [APIFuture[int]() for _ in range(4)]
        table.add("req-0", another)
        table.add("req-1", present)
        table.close(TinkerError("the client was closed"))
        assert not table.add("req-2", late)
        assert not table.add("req-3", later)
        for future in futures:
            with pytest.raises(TinkerError, match="the client was closed"):
                future.result(0)
        assert len({id(future.exception(0)) for future in futures}) == 4
        assert repr(table) == "<PendingTable 0 waiting, 0 early, closed>"

    def test_the_first_one_counts(self) -> None:
        table: Table = PendingTable()
        table.close(TinkerError("first"))
        table.close(TinkerError("second"))
        future = APIFuture[int]()
        table.add("req-1", future)
        with pytest.raises(TinkerError, match="first"):
            future.result(0)

    def test_skips_who_has_ended_already(self) -> None:
        table: PendingTable[Future[int]] = PendingTable()
        cancelled, present = APIFuture[int](), Future[int]()
        table.add("req-1", cancelled)
        table.add("req-2", present)
        cancelled.cancel()
        table.close(TinkerError("closed"))
        assert cancelled.cancelled()
        assert isinstance(present.exception(0), TinkerError)

    def test_callbacks_run_with_the_lock_free(self) -> None:
        table: Table = PendingTable()
        future = APIFuture[int]()
        seen: list[Any] = []
        future.when_done(lambda _: seen.append(table.waiting()))  # would hang under the lock
        table.add("req-1", future)
        table.close(TinkerError("closed"))
        assert seen == [[]]

    def test_completions_are_no_longer_kept(self) -> None:
        table: Table = PendingTable()
        table.complete("req-1", "finished")
        table.close(TinkerError("closed"))
        table.complete("req-2", "finished")
        assert repr(table) == "<PendingTable 0 waiting, 0 early, closed>"


def test_many_threads() -> None:
    table: Table = PendingTable()
    futures = [APIFuture[int]() for _ in range(400)]

    def use(offset: int) -> list[Any]:
        names = [(index, f"req-{index}") for index in range(offset, 400, 8)]
        for index, name in names:
            assert table.add(name, futures[index])
        return [table.take(name) is futures[index] for index, name in names]

    results = together(*[lambda offset=offset: use(offset) for offset in range(8)])
    assert all(all(found) for found in results)
    assert len(table) == 0
