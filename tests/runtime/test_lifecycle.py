"""The pending calls of a client are reported when they fail, and end with the client."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from support.crowd import together

from tinker_sync._base.events import CallFailed
from tinker_sync.errors import ClientClosedError
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.lifecycle import Lifecycle
from tinker_sync.runtime.pending import PendingChanges
from tinker_sync.runtime.workers import WorkerPools


def lifecycle() -> Lifecycle:
    parts: Any = SimpleNamespace(reactor=SimpleNamespace())
    return Lifecycle(parts, parts, WorkerPools(), PendingChanges())


def test_calls_that_have_ended_are_forgotten() -> None:
    life = lifecycle()
    futures: list[APIFuture[int]] = [APIFuture() for _ in range(3)]
    for future in futures:
        life.end_with_client(future)
    futures[0].resolve(1)
    futures[1].fail(KeyError())
    futures[2].cancel()
    assert life.unfinished == 0


def test_failures_are_reported_once_and_nothing_else_is() -> None:
    life, reported = lifecycle(), []

    class Watcher:
        def observe(self, event: object) -> None:
            assert isinstance(event, CallFailed)
            reported.append(event.error)

    life.observers = (Watcher(),)
    failure = KeyError("a")
    for end in (lambda f: f.fail(failure), lambda f: f.resolve(1), lambda f: f.cancel()):
        future: APIFuture[int] = APIFuture()
        life.end_with_client(future)
        end(future)
    assert reported == [failure]


def test_the_end_fails_all_calls_and_all_later_ones() -> None:
    life = lifecycle()
    before: APIFuture[int] = APIFuture()
    life.end_with_client(before)
    life.fail_calls()
    life.fail_calls()
    after: APIFuture[int] = APIFuture()
    life.end_with_client(after)
    failures = [before.exception(0), after.exception(0)]
    assert [type(failure) for failure in failures] == [ClientClosedError] * 2
    assert failures[0] is not failures[1]


def test_calls_made_while_the_client_is_closed_fail_too() -> None:
    for _ in range(20):
        life = lifecycle()
        futures: list[APIFuture[Any]] = [APIFuture() for _ in range(400)]

        def add(part: int, futures: Any = futures, life: Lifecycle = life) -> None:
            for future in futures[part::4]:
                life.end_with_client(future)

        together(*[lambda part=part: add(part) for part in range(4)], life.fail_calls)
        assert all(future.done() for future in futures)
        assert life.unfinished == 0


def test_a_child_leaves_the_parents_calls_alone() -> None:
    life = lifecycle()
    future: APIFuture[int] = APIFuture()
    life.end_with_client(future)
    life.renew_after_fork()
    life.fail_calls()
    assert not future.done()


def test_a_closed_client_stays_closed_in_a_child() -> None:
    life = lifecycle()
    life.renew_after_fork()
    assert not life.closing.is_set()
    life.fail_calls()
    life.renew_after_fork()
    assert life.closing.is_set()


def test_a_callback_may_end_the_client_again() -> None:
    life = lifecycle()
    future: APIFuture[int] = APIFuture()
    life.end_with_client(future)
    done = threading.Event()
    future._when_done(lambda _: (life.fail_calls(), done.set()))
    life.fail_calls()
    assert done.is_set()


def test_every_place_where_calls_wait_is_closed() -> None:
    life, closed = lifecycle(), []
    life.queues = (SimpleNamespace(close=closed.append), SimpleNamespace(close=closed.append))
    life.fail_calls()
    assert [type(failure) for failure in closed] == [ClientClosedError] * 2
