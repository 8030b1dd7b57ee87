from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from support.clock import PATIENCE_S
from support.crowd import start

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
