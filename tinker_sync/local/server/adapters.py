"""The adapters of samplers: those used last in memory, the others on disk until the next sample needs them.

A program that saves an adapter at every step makes thousands of them, and memory must not grow with their
number. When the adapters take too much memory, the least recently used one leaves it. An adapter that no
checkpoint contains is written to a temporary file first; any other is read from its checkpoint again.

An `Adapters` belongs to one event loop. An executor reads and writes the files.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

if TYPE_CHECKING:
    from tinker_sync.local.engine.lora import LoraParams, LoraSettings
    from tinker_sync.local.engine.model import ModelConfig
    from tinker_sync.local.host.workers import JobWorker

LIMIT_BYTES = 512 * 1024 * 1024


def adapter_key(path: str, save: int | None) -> str:
    """Return the key of a checkpoint's adapter. A later save under the same path gives another key."""
    return f"{path}#{save}"


@attrs.frozen(eq=False)
class _Spilled:
    path: Path
    config: ModelConfig
    settings: LoraSettings


class Adapters:
    """The adapters of all samplers, by key: those used last in memory, the others on disk.

    Args:
        forget: called with each adapter that leaves memory before `close`, to drop its cached prompts.
        executor: reads and writes the files.
        limit_bytes: the most bytes in memory; the adapter used last stays in any case.
    """

    def __init__(
        self, forget: Callable[[LoraParams], None], executor: JobWorker, *, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self._forget = forget
        self._executor = executor
        self._limit = limit_bytes
        self._held: OrderedDict[str, LoraParams] = OrderedDict()
        self._without_source: set[str] = set()
        self._spilled: dict[str, _Spilled] = {}
        self._loading: dict[str, asyncio.Future[LoraParams]] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files = 0

    @property
    def held_bytes(self) -> int:
        """The size of the adapters in memory."""
        return sum(params.flat.nbytes for params in self._held.values())

    def __contains__(self, key: str) -> bool:
        return key in self._held or key in self._spilled

    async def put(self, key: str, params: LoraParams) -> None:
        """Add an adapter that no checkpoint contains, or whose checkpoint is about to be replaced."""
        self._without_source.add(key)
        await self._hold(key, params)

    async def get(self, key: str, load: Callable[[], Awaitable[LoraParams]] | None = None) -> LoraParams:
        """Return the adapter with a key: from memory, from its temporary file, or else from `load`.

        Raises:
            KeyError: the adapter is neither in memory nor in such a file, and `load` is None.
            Exception: what `load` raises.
        """
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        if key not in self._loading:
            self._loading[key] = asyncio.ensure_future(self._fetch(key, load))
            self._loading[key].add_done_callback(lambda _: self._loading.pop(key, None))
        return await asyncio.shield(self._loading[key])

    async def _fetch(self, key: str, load: Callable[[], Awaitable[LoraParams]] | None) -> LoraParams:
        spilled = self._spilled.get(key)
        if spilled is not None:
            params: LoraParams = await self._in_executor(_read, spilled)
        elif load is not None:
            params = await load()
        else:
            raise KeyError(key)
        if spilled is None or key in self._spilled:  # not dropped meanwhile
            await self._hold(key, params)
        return params

    async def _hold(self, key: str, params: LoraParams) -> None:
        self._held[key] = params
        self._held.move_to_end(key)
        while self.held_bytes > self._limit and len(self._held) > 1:
            oldest, leaving = next(iter(self._held.items()))
            if oldest in self._without_source and oldest not in self._spilled:
                await self._spill(oldest, leaving)
            # A caller may have asked for it while it was written. Then it is no longer the oldest one.
            if next(iter(self._held), None) == oldest and self._held[oldest] is leaving:
                del self._held[oldest]
                self._forget(leaving)

    async def _spill(self, key: str, params: LoraParams) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="tinker-sync-adapters-")
        self._files += 1
        path = Path(self._folder.name) / f"{self._files}.npy"
        await self._in_executor(np.save, path, params.flat)
        if key in self._without_source:
            self._spilled[key] = _Spilled(path, params.config, params.settings)
        else:  # dropped meanwhile
            path.unlink(missing_ok=True)

    def drop(self, key: str) -> None:
        """Drop an adapter that no sampler uses any more."""
        self._without_source.discard(key)
        params = self._held.pop(key, None)
        if params is not None:
            self._forget(params)
        spilled = self._spilled.pop(key, None)
        if spilled is not None:
            spilled.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Drop all adapters and their files."""
        self._held.clear()
        self._spilled.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    async def _in_executor(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.wrap_future(self._executor.submit(lambda: work(*arguments)))


def _read(spilled: _Spilled) -> LoraParams:
    from tinker_sync.local.engine.lora import LoraParams

    flat = np.load(spilled.path)
    flat.setflags(write=False)
    return LoraParams(spilled.config, spilled.settings, flat)
