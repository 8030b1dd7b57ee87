"""Keys and values of the sequences in progress, and the attention of one new row for each.

Sequences of similar length share an `Arena`, a dense array with a slot for each sequence. A sequence that is
too long for its arena moves to a longer one, and the last sequence of the old arena fills the free slot. So a
step takes a few dense operations, and a short sequence is not computed at the length of a long one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tinker_sync.local.engine._arrays import Array
from tinker_sync.local.engine.model import ModelConfig

_SHORTEST = 64


def arena_length(positions: int) -> int:
    """Return the length of the arena for a number of positions: 64, 96, 128, 192, 256 ...

    >>> [arena_length(positions) for positions in (1, 65, 97, 129)]
    [64, 96, 128, 192]
    """
    length = _SHORTEST
    while length < positions:
        half = length + length // 2
        if half >= positions:
            return half
        length *= 2
    return length


class Seat:
    """The slot of one sequence, the number of its filled positions, and `owner`, an object of the caller."""

    __slots__ = ("arena", "filled", "owner", "slot")

    def __init__(self, owner: Any, arena: Arena, slot: int, filled: int) -> None:
        self.owner = owner
        self.arena = arena
        self.slot = slot
        self.filled = filled


class Arena:
    """Slots for sequences of up to `length` positions; slot `i` belongs to `seats[i]`."""

    def __init__(self, config: ModelConfig, length: int, dtype: Any) -> None:
        self.length = length
        self.seats: list[Seat] = []
        self.keys = np.zeros((config.layers, 0, config.kv_heads, length, config.head_dim), dtype=dtype)
        self.values = self.keys.copy()

    def append(self, owner: Any, keys: Array, values: Array) -> Seat:
        """Add a sequence with keys and values `[layers, kv_heads, positions, head_dim]`."""
        slot, filled = len(self.seats), keys.shape[2]
        if slot == self.keys.shape[1]:
            self.keys, self.values = _double(self.keys), _double(self.values)
        self.keys[:, slot, :, :filled] = keys
        self.values[:, slot, :, :filled] = values
        self.seats.append(Seat(owner, self, slot, filled))
        return self.seats[slot]

    def remove(self, seat: Seat) -> None:
        """Remove a seat; the last seat moves into its slot."""
        last = self.seats.pop()
        if last is seat:
            return
        self.keys[:, seat.slot, :, : last.filled] = self.keys[:, last.slot, :, : last.filled]
        self.values[:, seat.slot, :, : last.filled] = self.values[:, last.slot, :, : last.filled]
        last.slot = seat.slot
        self.seats[seat.slot] = last


def _double(array: Array) -> Array:
    layers, slots, *rest = array.shape
    larger = np.zeros((layers, max(4, 2 * slots), *rest), dtype=array.dtype)
    larger[:, :slots] = array
    return larger


class KVCache:
    """The keys and values of all sequences in progress. Not thread-safe.

    >>> size = {"vocab_size": 9, "hidden_size": 8, "layers": 1, "mlp_size": 8}
    >>> config = ModelConfig(heads=2, kv_heads=1, head_dim=4, **size)
    >>> cache = KVCache(config, np.float32)
    >>> seat = cache.add("mine", np.zeros((1, 1, 70, 4)), np.zeros((1, 1, 70, 4)))
    >>> seat.arena.length, [seat.owner for seat in cache.seats()]
    (96, ['mine'])
    """

    def __init__(self, config: ModelConfig, dtype: Any) -> None:
        self._config = config
        self._dtype = dtype
        self._arenas: dict[int, Arena] = {}

    def add(self, owner: Any, keys: Array, values: Array) -> Seat:
        """Add a sequence, with room for one more position. The new seat keeps `owner`."""
        length = arena_length(keys.shape[2] + 1)
        if length not in self._arenas:
            self._arenas[length] = Arena(self._config, length, self._dtype)
        return self._arenas[length].append(owner, keys, values)

    def grow(self, seat: Seat) -> Seat:
        """Return the seat. If it is full, move its sequence to a longer arena and return the new seat."""
        if seat.filled < seat.arena.length:
            return seat
        larger = self.add(seat.owner, seat.arena.keys[:, seat.slot], seat.arena.values[:, seat.slot])
        self.remove(seat)
        return larger

    def remove(self, seat: Seat) -> None:
        """Remove the seat of a sequence. An arena without seats is freed."""
        seat.arena.remove(seat)
        if not seat.arena.seats:
            del self._arenas[seat.arena.length]

    def seats(self) -> list[Seat]:
        """Return the seats of all sequences, in the order of the rows of `Continuation`."""
        return [seat for arena in self._arenas.values() for seat in arena.seats]

    def continuation(self) -> Continuation:
        """Start a step, which adds a position to every seat, and return its attention."""
        return Continuation(list(self._arenas.values()))


class Continuation:
    """The attention of one step. It stores the key and value of each new row, and attends up to that row."""

    def __init__(self, arenas: list[Arena]) -> None:
        self._parts = []
        start = 0
        for arena in arenas:
            count = len(arena.seats)
            filled = np.array([seat.filled for seat in arena.seats])
            mask = np.where(np.arange(arena.length) > filled[:, None], -np.inf, 0.0).astype(arena.keys.dtype)
            self._parts.append(
                (arena, slice(start, start + count), np.arange(count), filled, mask[:, None, None])
            )
            start += count
            for seat in arena.seats:
                seat.filled += 1

    def __call__(self, number: int, q: Array, k: Array, v: Array) -> Array:
        """Compute the attention of layer `number` for one row of each seat, as `decoder.Attend` requires."""
        out = np.empty(q.shape, dtype=q.dtype)
        kv_heads, dim = k.shape[1:]
        scale = 1 / np.sqrt(q.dtype.type(dim))
        for arena, rows, slots, filled, mask in self._parts:
            keys, values = arena.keys[number, : len(slots)], arena.values[number, : len(slots)]
            keys[slots, :, filled] = k[rows]
            values[slots, :, filled] = v[rows]
            scores = (q[rows] * scale).reshape(len(slots), kv_heads, -1, dim) @ keys.swapaxes(-1, -2)
            scores += mask
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            total = scores.sum(axis=-1, keepdims=True)
            mixed = scores @ values
            mixed /= total
            out[rows] = mixed.reshape(len(slots), *q.shape[1:])
        return out
