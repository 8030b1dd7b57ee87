"""The adapters of samplers in memory, up to a number of bytes.

A program that saves an adapter at every step makes thousands of them, and memory must not grow with their
number. When the adapters take too much memory, the least recently used one leaves it. It is read from its
checkpoint again; the weights that no checkpoint contains are gone then.

An `Adapters` belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinker_sync.local.engine.lora import LoraParams


class Adapters:
    """The adapters of samplers in memory, by key: those used last.

    Args:
        forget: called with each adapter that leaves memory before `close`, to drop its cached prompts.
        limit_bytes: the most bytes in memory; the adapter used last stays in any case.
    """

    def __init__(self, forget: Callable[[LoraParams], None], *, limit_bytes: int) -> None:
        self._forget = forget
        self._limit = limit_bytes
        self._held: OrderedDict[str, LoraParams] = OrderedDict()
        self._held_bytes = 0
        self._loading: dict[str, asyncio.Future[LoraParams]] = {}

    def put(self, key: str, params: LoraParams) -> None:
        """Add an adapter."""
        self.drop(key)
        self._held[key] = params
        self._held_bytes += params.flat.nbytes
        while self._held_bytes > self._limit and len(self._held) > 1:
            self.drop(next(iter(self._held)))

    async def get(self, key: str, load: Callable[[], Awaitable[LoraParams]]) -> LoraParams:
        """Return the adapter with a key: from memory, or else from `load`, which is called once for all.

        Raises:
            Exception: what `load` raises.
        """
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        if key not in self._loading:
            self._loading[key] = asyncio.ensure_future(self._load(key, load))
            self._loading[key].add_done_callback(lambda _: self._loading.pop(key, None))
        return await asyncio.shield(self._loading[key])

    async def _load(self, key: str, load: Callable[[], Awaitable[LoraParams]]) -> LoraParams:
        params = await load()
        self.put(key, params)
        return params

    def drop(self, key: str) -> None:
        """Drop an adapter from memory."""
        params = self._held.pop(key, None)
        if params is not None:
            self._held_bytes -= params.flat.nbytes
            self._forget(params)

    def close(self) -> None:
        """Drop all adapters."""
        self._held.clear()
