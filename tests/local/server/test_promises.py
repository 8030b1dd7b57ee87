"""Promises: waiting for them, the forms of their results, and the limits of kept results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tinker_sync.local.server.promises import Failure, Promises, Result
from tinker_sync.types import OptimStepResponse

PREFIX = "req-0a0a0a0a-"


def with_promises(test: Callable[[Promises], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        async def main() -> None:
            await test(Promises(PREFIX, kept_bytes=1000))

        asyncio.run(main())

    return run


def result(size: int) -> Result:
    made = Result(b"", bytes)
    made._forms["application/json"] = b"x" * size
    return made


@with_promises
async def test_all_waiters_are_woken(promises: Promises) -> None:
    promise = promises.open("Sample")
    waits = [asyncio.create_task(promises.wait(promise, 10)) for _ in range(5)]
    await asyncio.sleep(0)
    assert len(promise.waiters) == 5
    promises.settle(promise, Failure("no", "user"))
    assert await asyncio.gather(*waits) == [True] * 5
    assert promise.waiters == set()
    assert await promises.wait(promise, 0)


@with_promises
async def test_waiters_are_woken_although_a_callback_fails(promises: Promises) -> None:
    promise = promises.open("Sample")
    promise.on_done.append(lambda _: 1 / 0)
    wait = asyncio.create_task(promises.wait(promise, 1e6))
    await asyncio.sleep(0)
    (waiter,) = promise.waiters
    with pytest.raises(ZeroDivisionError):
        promises.settle(promise, Failure("no", "user"))
    assert waiter.done()
    assert await wait


@with_promises
async def test_no_wait_is_longer_than_its_limit(promises: Promises) -> None:
    promise = promises.open("Sample")
    assert not await promises.wait(promise, 0.01)
    assert not await promises.wait(promise, 0)
    gone = asyncio.get_running_loop().create_future()
    wait = asyncio.create_task(promises.wait(promise, 10, gone))
    await asyncio.sleep(0)
    gone.set_result(None)
    assert not await wait
    assert promise.waiters == set()


@with_promises
async def test_closing_answers_those_who_wait_and_those_who_come_later(promises: Promises) -> None:
    promise = promises.open("Sample")
    wait = asyncio.create_task(promises.wait(promise, 10))
    await asyncio.sleep(0)
    promises.close()
    assert not await wait
    assert not await promises.wait(promise, 10)


@with_promises
async def test_the_first_outcome_counts(promises: Promises) -> None:
    promise = promises.open("Sample")
    told: list[Any] = []
    promise.on_done.append(told.append)
    for text in ("first", "second"):
        promises.settle(promise, Failure(text, "user"))
    assert isinstance(promise.outcome, Failure)
    assert promise.outcome.error == "first"
    assert told == [promise]


@with_promises
async def test_fetched_results_make_room_oldest_first(promises: Promises) -> None:
    opened = [promises.open("Sample") for _ in range(5)]
    for promise in opened:
        promises.settle(promise, result(400))
    for promise in opened[1:]:  # the first is never fetched, so it stays
        promises.mark_retrieved(promise)
        promises.mark_retrieved(promise)  # marking a promise twice has no effect
    kept = [promise for promise in opened if promises.get(promise.request_id) is promise]
    assert kept == [opened[0], opened[3], opened[4]]
    assert promises.is_gone(opened[1].request_id)


@with_promises
async def test_one_that_is_larger_than_all_room_is_kept_until_the_next(promises: Promises) -> None:
    large, small = promises.open("Sample"), promises.open("Sample")
    for promise, size in ((large, 5000), (small, 10)):
        promises.settle(promise, result(size))
        promises.mark_retrieved(promise)
        assert promises.get(promise.request_id) is promise
    assert promises.get(large.request_id) is None


@with_promises
async def test_ids_from_before_a_restart_differ_from_nonsense(promises: Promises) -> None:
    promises.open("Sample")
    ids = (f"{PREFIX}0", f"{PREFIX}7", "req-ffffffff-7", "req-x", "nonsense", "", "req-7")
    assert [promises.is_gone(each) for each in ids] == [True, False, True, False, False, False, False]
    for number in ("²", "9" * 5000):  # no number, and more than int takes
        assert not promises.is_gone(PREFIX + number)


@with_promises
async def test_what_a_session_leaves_is_dropped_but_for_what_is_under_way(promises: Promises) -> None:
    mine, under_way, other = (promises.open("Sample", session) for session in ("a", "a", "b"))
    for promise in (mine, other):
        promises.settle(promise, result(10))
        promises.mark_retrieved(promise)
    assert promises.drop_session("a") == [under_way]
    found = [promises.get(each.request_id) for each in (mine, under_way, other)]
    assert found == [None, under_way, other]


def test_forms_are_made_once_and_as_asked_for() -> None:
    made: list[Any] = []

    def to_protobuf(value: Any) -> bytes:
        made.append(value)
        return b"proto"

    value = OptimStepResponse(metrics={"a": 1.0})
    both = Result(value, to_protobuf)
    assert [both.form(protobuf=True) for _ in range(2)] == [(b"proto", "application/x-protobuf")] * 2
    assert made == [value]
    assert both.form(protobuf=False) == (b'{"metrics":{"a":1.0}}', "application/json")
    assert Result(value).form(protobuf=True)[1] == "application/json"
    assert both.size == 21
