"""Items that few workers handle, without threads: the workers are run by hand."""

from __future__ import annotations

import pytest
from support.sends import HandWorkers

from tinker_sync.runtime.tickets import Drain


class Bench:
    def __init__(self) -> None:
        self.workers = HandWorkers()
        self.handled: list[int] = []
        self.refused: list[int] = []
        self.drain: Drain[int] = Drain(
            self.workers, self.handled.append, lambda item, _: self.refused.append(item)
        )


def test_one_worker_handles_all_items_in_order() -> None:
    bench = Bench()
    bench.drain.add([1, 2])
    bench.drain.add([3])
    assert len(bench.workers.jobs) == 1
    bench.workers.do()
    assert bench.handled == [1, 2, 3]
    assert bench.drain.first is None


def test_nothing_wakes_no_worker() -> None:
    bench = Bench()
    bench.drain.add([])
    bench.drain.add([], held_up=True)
    assert bench.workers.jobs == []


def test_a_worker_that_has_ended_is_followed_by_another() -> None:
    bench = Bench()
    for item in (1, 2):
        bench.drain.add([item])
        bench.workers.do()
    assert bench.handled == [1, 2]


def test_many_items_call_more_workers_up_to_a_limit() -> None:
    bench = Bench()
    for item in range(1000):
        bench.drain.add([item])
    assert len(bench.workers.jobs) == 8
    bench.workers.do_all()
    assert bench.handled == list(range(1000))


def test_a_worker_that_is_held_up_is_joined_by_another() -> None:
    bench = Bench()
    bench.drain.add([1, 2])
    bench.drain.add([], held_up=True)
    assert len(bench.workers.jobs) == 2
    bench.workers.do_all()
    assert bench.handled == [1, 2]


def test_closed_workers_refuse_every_item() -> None:
    bench = Bench()

    def refuse(_: object) -> None:
        raise RuntimeError("closed")

    bench.workers.run = refuse  # type: ignore[method-assign]
    bench.drain.add([1, 2])
    assert bench.refused == [1, 2]


def test_items_behind_one_that_ends_its_worker_are_handled() -> None:
    bench = Bench()

    def handle(item: int) -> None:
        if item == 1:
            raise SystemExit
        bench.handled.append(item)

    drain: Drain[int] = Drain(bench.workers, handle, lambda *_: None)
    drain.add([1, 2])
    with pytest.raises(SystemExit):
        bench.workers.do()
    bench.workers.do_all()
    assert bench.handled == [2]
