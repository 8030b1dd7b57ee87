"""The order of numbered requests, without a server."""

from __future__ import annotations

import asyncio

import pytest
from support.loops import in_a_loop

from tinker_sync.local.server.calls import Refused
from tinker_sync.local.server.lanes import Lane, Seen, Step
from tinker_sync.local.server.promises import Promise


class Scene:
    """A lane, and the list `done` of the steps that it has carried out, in order."""

    def __init__(self, patience_s: float = 60.0) -> None:
        self.done: list[str] = []
        self.lane = Lane(self._run, patience_s=patience_s)

    async def _run(self, step: Step) -> None:
        await step.work()
        self.done.append(step.promise.request_id)

    def add(self, number: int | None, name: str = "", digest: bytes = b"") -> Promise:
        async def work() -> None:
            await asyncio.sleep(0)

        promise = Promise(name or str(number), "OptimStep")
        self.lane.add(number, digest or str(number).encode(), Step(promise, work))
        return promise

    async def settled(self, count: int) -> list[str]:
        async def enough() -> None:
            while len(self.done) < count:
                await asyncio.sleep(0.001)

        await asyncio.wait_for(enough(), 120)
        await self.lane.close()
        return self.done


@in_a_loop
async def test_any_order_of_arrival_becomes_the_order_of_the_numbers() -> None:
    scene = Scene()
    for number in (2, 3, 4, 1, 6, 5):  # the first of a batch comes last
        scene.add(number)
    assert await scene.settled(6) == ["1", "2", "3", "4", "5", "6"]


@in_a_loop
async def test_nothing_is_done_before_its_turn() -> None:
    scene = Scene()
    early = scene.add(2)
    await asyncio.sleep(0.01)
    assert scene.done == []
    assert early.waits_for == "waiting for seq_id 1 of this model, which has not arrived"
    scene.add(1)
    assert early.waits_for is None
    await scene.settled(2)


@in_a_loop
async def test_without_a_number_it_is_the_next() -> None:
    scene = Scene()
    scene.add(None, "made")
    scene.add(1)
    scene.add(3)
    scene.add(None, "between")
    scene.add(2)
    assert await scene.settled(5) == ["made", "1", "between", "2", "3"]


@in_a_loop
async def test_a_repeated_request_is_recognised() -> None:
    scene = Scene()
    promise = scene.add(1, digest=b"same")
    assert scene.lane.known(1, b"same") == promise.request_id
    with pytest.raises(Refused) as refused:
        scene.lane.known(1, b"another body")
    assert refused.value.status == 409
    assert scene.lane.known(2, b"new") is None
    await scene.settled(1)
    assert scene.lane.known(1, b"same") == promise.request_id


@in_a_loop
async def test_a_number_that_never_comes_is_skipped_and_then_too_late() -> None:
    scene = Scene(patience_s=0.02)
    scene.add(1)
    scene.add(4)
    scene.add(3)
    done = list(await scene.settled(3))
    with pytest.raises(Refused, match="too late"):
        scene.lane.known(2, b"late")
    assert done == ["1", "3", "4"]


@in_a_loop
async def test_a_wide_gap_is_skipped_at_once() -> None:
    scene = Scene(patience_s=0.02)
    scene.add(10**6)
    assert await scene.settled(1) == ["1000000"]


@in_a_loop
async def test_patience_begins_anew_with_each_gap() -> None:
    scene = Scene(patience_s=0.02)
    scene.add(2)
    scene.add(5)
    assert await scene.settled(2) == ["2", "5"]


@in_a_loop
async def test_a_closed_lane_does_nothing_more() -> None:
    scene = Scene(patience_s=0.01)
    scene.add(2)
    await scene.lane.close()
    await asyncio.sleep(0.05)
    assert scene.done == []


def test_a_limited_number_of_requests_is_remembered() -> None:
    seen = Seen(limit=3)
    for number in range(5):
        seen.add(number, b"", number * 10)
    assert [seen.get(number, b"") for number in range(5)] == [None, None, 20, 30, 40]
