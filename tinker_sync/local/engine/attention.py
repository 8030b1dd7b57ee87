"""Causal attention with grouped heads, in blocks of queries, forward and backward.

A packed batch holds all sequences in consecutive rows. A `PackedSpan` describes sequences of `length` rows
each, from row `start` on. Shorter sequences are padded at their end. A token attends only to itself and to
earlier ones, so the padding needs no mask, and one call computes all sequences of a length.

Query heads that share a key head are stacked, so each product is one BLAS call for each sequence and key
head. A block of queries reads only the keys up to its own end.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tinker_sync.local.engine._arrays import Array

TRAIN_BLOCK = 128
"""The number of queries computed at once in training. BLAS is efficient, and the scores fit the cache."""


class PackedSpan(NamedTuple):
    """Consecutive sequences of a packed batch, each of `length` rows, from row `start` on."""

    start: int
    sequences: int
    length: int

    @property
    def rows(self) -> slice:
        """The rows of these sequences in the packed batch."""
        return slice(self.start, self.start + self.sequences * self.length)


@lru_cache(maxsize=64)
def _causal_mask(size: int) -> Array:
    """Return a square mask: minus infinity for keys after the query, else 0."""
    mask: Array = np.triu(np.full((size, size), -np.inf, dtype=np.float32), 1)
    return mask


def _stack_heads(x: Array, kv_heads: int) -> Array:
    """Copy `[n, rows, heads, dim]` to `[n, kv_heads, group * rows, dim]`."""
    n, rows, heads, dim = x.shape
    split = x.reshape(n, rows, kv_heads, heads // kv_heads, dim)
    stacked: Array = split.transpose(0, 2, 3, 1, 4).copy().reshape(n, kv_heads, -1, dim)
    return stacked


def _unstack_heads(x: Array, rows: int) -> Array:
    """Return rows stacked by `_stack_heads` as a view `[n, rows, kv_heads, group, dim]`."""
    n, kv_heads, _, dim = x.shape
    split: Array = x.reshape(n, kv_heads, -1, rows, dim).transpose(0, 3, 1, 2, 4)
    return split


def _scores(queries: Array, keys: Array, rows: int) -> Array:
    """Return the scaled products of queries and keys, `[n, kv_heads, group * rows, keys]`.

    They are minus infinity for keys after the query. The call also scales `queries` in place.
    """
    queries *= 1 / np.sqrt(queries.dtype.type(queries.shape[-1]))
    scores: Array = queries @ keys.swapaxes(-1, -2)
    n, kv_heads, stacked, seen = scores.shape
    scores.reshape(n, kv_heads, stacked // rows, rows, seen)[..., seen - rows :] += _causal_mask(rows)
    return scores


def attend_block(q: Array, keys: Array, values: Array) -> tuple[Array, Array]:
    """Compute the attention of the last queries, each over all keys up to its own position.

    Args:
        q: `[n, rows, heads, dim]`, the queries of the last `rows` keys.
        keys: `[n, kv_heads, seen, dim]`, the keys of all positions up to the last query.
        values: The same shape as `keys`.

    Returns:
        The mixed values `[n, rows, kv_heads, group, dim]`, where `group` is `heads / kv_heads`, and for each
        row of scores the logarithm of the sum of its exponentials.
    """
    rows = q.shape[1]
    scores = _scores(_stack_heads(q, keys.shape[1]), keys, rows)
    top = scores.max(axis=-1, keepdims=True)
    scores -= top
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    mixed = scores @ values
    mixed /= total
    np.log(total, out=total)
    total += top
    return _unstack_heads(mixed, rows), total


def _by_head(x: Array, span: PackedSpan) -> Array:
    """Return the rows of `span` in a packed batch as a view `[n, heads, length, dim]`."""
    heads: Array = x[span.rows].reshape(span.sequences, span.length, *x.shape[1:]).transpose(0, 2, 1, 3)
    return heads


def _blocks(length: int) -> list[tuple[int, int]]:
    return [(start, min(start + TRAIN_BLOCK, length)) for start in range(0, length, TRAIN_BLOCK)]


def attend(q: Array, k: Array, v: Array, spans: list[PackedSpan]) -> tuple[Array, list[Array]]:
    """Compute the attention within each sequence of a packed batch.

    Args:
        q: `[rows, heads, dim]`.
        k: `[rows, kv_heads, dim]`.
        v: The same shape as `k`.
        spans: The positions of the sequences.

    Returns:
        The mixed values `[rows, heads, dim]`, and the logarithms from `attend_block`, for `attend_backward`.
    """
    out = np.zeros(q.shape, dtype=q.dtype)
    kept = []
    for span in spans:
        queries = q[span.rows].reshape(span.sequences, span.length, *q.shape[1:])
        mixed = out[span.rows].reshape(span.sequences, span.length, *q.shape[1:])
        keys, values = _by_head(k, span), _by_head(v, span)
        for start, end in _blocks(span.length):
            part, total = attend_block(queries[:, start:end], keys[:, :, :end], values[:, :, :end])
            mixed[:, start:end].reshape(part.shape)[...] = part
            kept.append(total)
    return out, kept


def attend_backward(
    dout: Array, out: Array, q: Array, k: Array, v: Array, spans: list[PackedSpan], kept: list[Array]
) -> tuple[Array, Array, Array]:
    """Return the gradients of queries, keys and values, from the gradient `dout` of the result of `attend`.

    `out` and `kept` are the results of `attend`. The attention weights are computed again.
    """
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    totals = iter(kept)
    along = np.einsum("...i,...i->...", dout, out)[..., None]
    for span in spans:
        cut = (span.sequences, span.length)
        whole = [x[span.rows].reshape(*cut, *x.shape[1:]) for x in (q, dout, along, dq)]
        keys, values, dkeys, dvalues = (_by_head(x, span) for x in (k, v, dk, dv))
        for start, end in _blocks(span.length):
            queries, dmixed, means, dqueries = (x[:, start:end] for x in whole)
            rows, seen = end - start, slice(0, end)
            stacked = _stack_heads(queries, keys.shape[1])
            weights = _scores(stacked, keys[:, :, seen], rows)  # scales `stacked` too
            weights -= next(totals)
            np.exp(weights, out=weights)
            pulled = _stack_heads(dmixed, keys.shape[1])
            dvalues[:, :, seen] += weights.swapaxes(-1, -2) @ pulled
            dscores = pulled @ values[:, :, seen].swapaxes(-1, -2)
            dscores -= _stack_heads(means, keys.shape[1])
            dscores *= weights
            dkeys[:, :, seen] += dscores.swapaxes(-1, -2) @ stacked
            part = _unstack_heads(dscores @ keys[:, :, seen], rows)
            np.multiply(part, 1 / np.sqrt(q.dtype.type(q.shape[-1])), out=dqueries.reshape(part.shape))
    return dq, dk, dv
