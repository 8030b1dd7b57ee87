"""Futures that end with their client."""

from __future__ import annotations

import threading
from typing import Any

from support.crowd import together

from tinker_sync.errors import ClientClosedError
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.unfinished import Unfinished


def test_what_has_ended_is_forgotten() -> None:
    unfinished = Unfinished()
    futures: list[APIFuture[int]] = [APIFuture() for _ in range(3)]
    for future in futures:
        unfinished.add(future)
    futures[0].resolve(1)
    futures[1].fail(KeyError())
    futures[2].cancel()
    assert len(unfinished) == 0


def test_failures_are_reported_once_and_nothing_else_is() -> None:
    reported: list[BaseException] = []
    unfinished = Unfinished(reported.append)
    failure = KeyError("a")
    for end in (lambda f: f.fail(failure), lambda f: f.resolve(1), lambda f: f.cancel()):
        future: APIFuture[int] = APIFuture()
        unfinished.add(future)
        end(future)
    assert reported == [failure]


def test_closing_fails_all_there_are_and_all_that_come() -> None:
    unfinished = Unfinished()
    before: APIFuture[int] = APIFuture()
    unfinished.add(before)
    unfinished.close(ClientClosedError("first"))
    unfinished.close(ClientClosedError("second"))
    after: APIFuture[int] = APIFuture()
    unfinished.add(after)
    failures = [before.exception(0), after.exception(0)]
    assert [str(failure) for failure in failures] == ["first", "first"]
    assert failures[0] is not failures[1]


def test_whoever_comes_while_it_is_closed_is_failed_too() -> None:
    for _ in range(20):
        unfinished = Unfinished()
        futures: list[APIFuture[Any]] = [APIFuture() for _ in range(400)]

        def add(part: int, futures: Any = futures, unfinished: Unfinished = unfinished) -> None:
            for future in futures[part::4]:
                unfinished.add(future)

        together(
            *[lambda part=part: add(part) for part in range(4)],
            lambda unfinished=unfinished: unfinished.close(ClientClosedError()),
        )
        assert all(future.done() for future in futures)
        assert len(unfinished) == 0


def test_a_child_leaves_the_parents_futures_alone() -> None:
    unfinished = Unfinished()
    future: APIFuture[int] = APIFuture()
    unfinished.add(future)
    unfinished.renew_after_fork()
    unfinished.close(ClientClosedError())
    assert not future.done()


def test_a_callback_may_close_again() -> None:
    unfinished = Unfinished()
    future: APIFuture[int] = APIFuture()
    unfinished.add(future)
    done = threading.Event()
    future.when_done(lambda _: (unfinished.close(ClientClosedError()), done.set()))
    unfinished.close(ClientClosedError())
    assert done.is_set()
