from __future__ import annotations

import threading
import weakref
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

import pytest
from support.clock import PATIENCE_S, FakeClock
from support.crowd import together
from support.raising import raising

from tinker_sync.runtime.combine import CombinedFuture
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.progress import FutureState, Status, Timeline


def parts_of(count: int, clock: FakeClock | None = None) -> list[APIFuture[Any]]:
    return [APIFuture(clock=clock or FakeClock()) for _ in range(count)]


def combined(parts: list[APIFuture[Any]], **more: Any) -> CombinedFuture[Any, list[Any]]:
    return CombinedFuture(parts, merge=list, **more)


def combined_of(count: int) -> tuple[CombinedFuture[Any, list[Any]], list[APIFuture[Any]]]:
    parts = parts_of(count)
    return combined(parts), parts


class TestResult:
    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
    def test_is_merged_in_the_order_of_the_parts(self, order: tuple[int, ...]) -> None:
        whole, parts = combined_of(3)
        for index in order:
            assert not whole.done()
            parts[index].resolve(index)
        assert whole.result(0) == [0, 1, 2]

    def test_the_last_part_merges_once(self) -> None:
        merges: list[threading.Thread] = []

        def merge(values: list[Any]) -> list[Any]:
            merges.append(threading.current_thread())
            return values

        def bring(part: APIFuture[Any]) -> threading.Thread:
            part.resolve(1)
            return threading.current_thread()

        for _ in range(50):
            parts = parts_of(8)
            whole = CombinedFuture(parts, merge=merge)
            threads = together(*[partial(bring, part) for part in parts])
            assert whole.result(PATIENCE_S) == [1] * 8
            assert merges.pop() in threads
            assert merges == []

    def test_what_the_merge_raises_is_the_failure(self) -> None:
        (part,) = parts_of(1)
        whole = CombinedFuture([part], merge=raising(ZeroDivisionError("no weights")))
        part.resolve(1)
        with pytest.raises(ZeroDivisionError, match="no weights"):
            whole.result(0)


class TestFailure:
    def test_the_first_in_time_wins_and_at_once(self) -> None:
        whole, parts = combined_of(3)
        first = KeyError("second part")
        parts[1].fail(first)
        assert whole.exception(0) is first
        parts[0].fail(KeyError("first part"))
        assert whole.exception(0) is first

    def test_the_others_go_on(self) -> None:
        whole, parts = combined_of(3)
        parts[1].fail(KeyError())
        assert [part.done() for part in parts] == [False, True, False]
        assert parts[0].resolve(1)
        assert parts[2].resolve(3)
        assert whole.status() == Status(FutureState.DONE, "failed: KeyError")


class TestCancel:
    def test_reaches_parts_that_come_later(self) -> None:
        whole: CombinedFuture[int, int] = CombinedFuture([], merge=sum)
        assert whole.cancel()
        part: APIFuture[int] = APIFuture()
        whole.follow([part])
        assert part.cancelled()

    def test_of_a_part_fails_the_whole(self) -> None:
        whole, parts = combined_of(2)
        whole._begin()
        parts[0].cancel()
        with pytest.raises(CancelledError):
            whole.result(0)

    def test_leaves_finished_parts_alone(self) -> None:
        whole, parts = combined_of(2)
        parts[0].resolve(1)
        whole.cancel()
        assert parts[0].result(0) == 1
        assert parts[1].cancelled()


class TestProgress:
    def test_status_is_that_of_the_part_furthest_behind(self) -> None:
        whole, parts = combined_of(2)
        seen = [whole.status().state]
        for step in (
            parts[1]._mark_sending,
            lambda: parts[1]._mark_accepted("req-2"),
            parts[0]._mark_sending,
            lambda: parts[0]._mark_accepted("req-1"),
            lambda: parts[1]._mark_paused("rate limit"),
            parts[1]._mark_waiting,
            lambda: parts[1].resolve(2),
            lambda: parts[0].resolve(1),
        ):
            step()
            seen.append(whole.status().state)
        assert [str(state) for state in seen] == [
            *("queued", "sending", "sending", "sending", "waiting", "paused", "waiting", "waiting", "done")
        ]

    def test_the_reason_of_a_delay_comes_through_once_all_parts_are_accepted(self) -> None:
        whole, parts = combined_of(3)
        parts[1]._mark_waiting("no answer")
        assert whole.status() == Status(FutureState.SENDING)
        parts[0]._mark_accepted("req-1")
        parts[2].resolve(3)
        assert whole.status() == Status(FutureState.WAITING, "no answer")
        parts[1]._mark_waiting()
        assert whole.status() == Status(FutureState.WAITING)

    def test_request_ids_stay_after_the_end(self) -> None:
        whole, parts = combined_of(3)
        assert (whole.request_id, whole.request_ids) == (None, ())
        parts[2]._mark_accepted("req-3")
        parts[0]._mark_accepted("req-1")
        assert (whole.request_id, whole.request_ids) == ("req-1", ("req-1", "req-3"))
        parts[1].fail(KeyError())
        assert (whole.request_id, whole.request_ids) == ("req-1", ("req-1", "req-3"))

    def test_timeline(self) -> None:
        clock = FakeClock(now_s=10.0)
        parts = parts_of(2, clock)
        whole = combined(parts, clock=clock)
        for step in (
            parts[1]._mark_sending,
            lambda: parts[1]._mark_accepted("req-2"),
            parts[0]._mark_sending,
        ):
            clock.advance(1)
            step()
        assert whole.timeline == Timeline(10.0, 11.0, None, None)
        for step in (
            lambda: parts[0]._mark_accepted("req-1"),
            lambda: parts[0].resolve(1),
            lambda: parts[1].resolve(2),
        ):
            clock.advance(1)
            step()
        assert whole.timeline == Timeline(10.0, 11.0, 14.0, 16.0)


def test_results_of_the_parts_go_with_the_parts() -> None:
    """The whole future keeps only the merged result. The results of the parts are freed."""

    class Large:
        pass

    parts = parts_of(2)
    whole = CombinedFuture(parts, merge=len)
    large = Large()
    gone = weakref.ref(large)
    for part in parts:
        part.resolve(large)
    assert whole.result(0) == 2
    del large, part, parts
    import gc

    gc.collect()
    assert gone() is None
