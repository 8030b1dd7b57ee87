"""Tests that are coroutines: each runs on an event loop of its own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable


def in_a_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Run a coroutine function as a test."""

    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())  # type: ignore[arg-type]  # it is a coroutine

    return run
