"""`AwaitableConcurrentFuture`, with which scripts' doubles of clients make their results."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from concurrent.futures import CancelledError, Future

import pytest

import tinker_sync as tinker
from tinker_sync.lib.public_interfaces.api_future import AwaitableConcurrentFuture


def test_it_has_the_result_of_the_other_future() -> None:
    ended: Future[int] = Future()
    ended.set_result(7)
    assert AwaitableConcurrentFuture(ended).result() == 7
    open_: Future[int] = Future()
    future = AwaitableConcurrentFuture[int](open_)
    assert isinstance(future, tinker.APIFuture)
    assert future.future() is open_
    assert not future.done()
    with pytest.raises(TimeoutError):
        future.result(timeout=0)
    open_.set_result(8)
    assert (future.done(), future.result(), future.exception()) == (True, 8, None)


def test_it_has_the_failure_of_the_other_future() -> None:
    failed: Future[int] = Future()
    future = AwaitableConcurrentFuture(failed)
    failure = KeyError("x")
    failed.set_exception(failure)
    assert future.exception() is failure
    with pytest.raises(KeyError):
        future.result()


def test_a_result_from_another_thread_wakes_those_that_wait() -> None:
    started = threading.Event()

    def work() -> str:
        started.wait(60)
        return "done"

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        future = AwaitableConcurrentFuture(pool.submit(work))
        waiting = pool.submit(concurrent.futures.wait, [future], 60)
        started.set()
        assert future.result(timeout=60) == "done"
        assert waiting.result(60).done == {future}


def test_it_can_be_awaited() -> None:
    async def main() -> list[int]:
        made: list[Future[int]] = [Future() for _ in range(3)]
        first, second, third = map(AwaitableConcurrentFuture, made)
        task = asyncio.create_task(third.coroutine())
        await asyncio.sleep(0)
        for number, each in enumerate(made):
            each.set_result(number)
        return [await first, await second.result_async(timeout=60), await task]

    assert asyncio.run(main()) == [0, 1, 2]


def test_a_cancel_goes_both_ways() -> None:
    one: Future[int] = Future()
    assert AwaitableConcurrentFuture(one).cancel()
    assert one.cancelled()
    other: Future[int] = Future()
    future = AwaitableConcurrentFuture(other)
    other.cancel()
    assert future.cancelled()
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result()


def test_work_that_runs_cannot_be_cancelled() -> None:
    running: Future[int] = Future()
    future = AwaitableConcurrentFuture(running)
    running.set_running_or_notify_cancel()
    assert future.running()
    assert not future.cancel()
    running.set_result(1)
    assert (future.running(), future.result()) == (False, 1)


def test_it_wraps_a_call_of_a_client() -> None:
    call: tinker.APIFuture[int] = tinker.APIFuture()
    future = AwaitableConcurrentFuture(call)
    call.resolve(3)
    assert future.result(timeout=60) == 3
