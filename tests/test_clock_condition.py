from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from support.clock import PATIENCE_S
from support.crowd import start, until

from tinker_sync._clock import SafeCondition
from tinker_sync.runtime.futures import APIFuture


@pytest.mark.parametrize(
    "call",
    [
        lambda future: future.when_done(lambda _: None),
        lambda future: future.add_done_callback(lambda _: None),
        lambda future: future.result(timeout=0),
        lambda future: future.running(),
    ],
    ids=["when_done", "add_done_callback", "result", "running"],
)
def test_ctrl_c_while_the_lock_of_a_future_is_taken(call: Callable[[Any], object]) -> None:
    """The lock of a future is released, although Ctrl-C arrives just after a method has taken it."""

    def interrupt(frame: Any, event: str, _: Any) -> None:
        if event == "return" and frame.f_code is threading.Condition.__enter__.__code__:
            raise KeyboardInterrupt

    future: APIFuture[int] = APIFuture()
    sys.setprofile(interrupt)
    try:
        with suppress(KeyboardInterrupt, TimeoutError):
            call(future)
    finally:
        sys.setprofile(None)
    assert start(lambda: future.resolve(7)).result(PATIENCE_S)
    assert future.result(0) == 7


def test_waits_end_with_a_notice_or_in_time() -> None:
    condition = SafeCondition()

    def wait() -> bool:
        with condition, condition:  # also if it is entered twice
            return condition.wait(PATIENCE_S)

    waits = [start(wait) for _ in range(3)]
    until(lambda: len(condition._waiters) == 3)
    with condition:
        condition.notify_all()
    assert [each.result(PATIENCE_S) for each in waits] == [True] * 3
    with condition:
        assert not condition.wait(0.0)
        assert not condition.wait(0.001)
    assert not condition._waiters


def test_a_wait_gives_the_lock_back_when_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def acquire(self, *_: Any) -> bool:
            if threading.current_thread() is threading.main_thread() and _:
                raise KeyboardInterrupt
            return True

    monkeypatch.setattr("tinker_sync._clock.allocate_lock", Broken)
    condition = SafeCondition()
    with pytest.raises(KeyboardInterrupt), condition:
        condition.wait()
    assert start(lambda: condition.acquire(timeout=PATIENCE_S)).result(PATIENCE_S)
    assert not condition._waiters


class InterruptedCondition(SafeCondition):
    """A condition whose wait Ctrl-C interrupts right after the release of the lock."""

    def _release_save(self) -> None:
        super()._release_save()  # type: ignore[misc]  # not in the published types
        raise KeyboardInterrupt


def test_an_interrupt_right_after_the_release_keeps_the_lock_right() -> None:
    condition = InterruptedCondition()
    with pytest.raises(KeyboardInterrupt), condition:
        condition.wait()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(condition.acquire, False).result(PATIENCE_S) is True
