"""A cache of the keys and values of earlier prompts, for prompts with the same beginning.

It holds prompts without the tokens sampled after them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from tinker_sync.local.engine._arrays import Array
from tinker_sync.local.engine.lora import LoraParams


class Past(NamedTuple):
    """The keys and values `[layers, kv_heads, positions, head_dim]` of a prompt's beginning."""

    keys: Array
    values: Array

    @property
    def length(self) -> int:
        """The number of positions."""
        return int(self.keys.shape[2])


class _KnownPrompt(NamedTuple):
    params: LoraParams | None  # compared by identity; this reference keeps the identity from being reused
    tokens: Array
    past: Past


class PrefixStore:
    """The latest prompts, up to a total number of positions. Not thread-safe.

    >>> import numpy as np
    >>> store = PrefixStore(limit=64)
    >>> store.remember(None, np.arange(20), Past(np.zeros((1, 1, 20, 2)), np.zeros((1, 1, 20, 2))))
    >>> past = store.find(None, np.arange(30), most=29)
    >>> past.length, store.find(None, np.arange(9), most=9).length
    (20, 9)
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[int, _KnownPrompt] = OrderedDict()
        self._next = 0
        self._held = 0

    def keeps(self, length: int) -> bool:
        """Return True if a prompt of this length fits into the store."""
        return length <= self._limit

    def find(self, params: LoraParams | None, tokens: Array, most: int) -> Past | None:
        """Return the longest cached beginning of `tokens[:most]` for this adapter, or None without one."""
        best, length = None, 0
        for name, entry in self._entries.items():
            common = _common(entry.tokens, tokens[:most]) if entry.params is params else 0
            if common > length:
                best, length = name, common
        if best is None:
            return None
        self._entries.move_to_end(best)
        past = self._entries[best].past
        return Past(past.keys[:, :, :length], past.values[:, :, :length])

    def remember(self, params: LoraParams | None, tokens: Array, past: Past) -> None:
        """Cache a prompt unless it is known; the least recently used prompts make room."""
        length = len(tokens)
        if not self.keeps(length):
            return
        known = [name for name, entry in self._entries.items() if entry.params is params]
        for name in known:
            common = _common(self._entries[name].tokens, tokens)
            if common == length:
                return
            if common == len(self._entries[name].tokens):
                self._forget(name)  # the new prompt begins with this one
        while self._held + length > self._limit:
            self._forget(next(iter(self._entries)))
        kept = Past(past.keys.copy(), past.values.copy())
        self._entries[self._next] = _KnownPrompt(params, tokens.copy(), kept)
        self._next += 1
        self._held += length

    def forget(self, params: LoraParams | None) -> None:
        """Drop all prompts of an adapter, so that it can be freed."""
        for name in [name for name, entry in self._entries.items() if entry.params is params]:
            self._forget(name)

    def _forget(self, name: int) -> None:
        self._held -= len(self._entries.pop(name).tokens)


def _common(one: Array, two: Array) -> int:
    """Return the length of the common beginning of two arrays of tokens."""
    size = min(len(one), len(two))
    differs = one[:size] != two[:size]
    return int(differs.argmax()) if differs.any() else size
