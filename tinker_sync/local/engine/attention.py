"""Causal attention with grouped heads, in blocks of queries, forward and backward.

A `Span` says that from row `start` of a packed batch on there are sequences of `length` rows each. Sequences
that are shorter are padded at their end: causality alone keeps what is real from seeing the padding, so no
mask is needed for it, and sequences of one length are handled by one call.

Within a group of heads that share a key head the queries are stacked, so that each product is one call of
BLAS for each sequence and key head. A block of queries looks only at the keys up to its own end.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tinker_sync.local.engine._arrays import Array

TRAIN_BLOCK = 128
"""Queries handled at once in training: enough for BLAS, few enough for the scores to stay in the cache."""


class Span(NamedTuple):
    """So many sequences of `length` rows each, from row `start` on."""

    start: int
    sequences: int
    length: int

    @property
    def rows(self) -> slice:
        """Where they are in the packed batch."""
        return slice(self.start, self.start + self.sequences * self.length)


@lru_cache(maxsize=64)
def _future(size: int) -> Array:
    """Minus infinity where a key comes after the query."""
    mask: Array = np.triu(np.full((size, size), -np.inf, dtype=np.float32), 1)
    return mask


def _stacked(x: Array, kv_heads: int) -> Array:
    """`[n, rows, heads, dim]` as `[n, kv_heads, group * rows, dim]`, always a copy."""
    n, rows, heads, dim = x.shape
    split = x.reshape(n, rows, kv_heads, heads // kv_heads, dim)
    stacked: Array = split.transpose(0, 2, 3, 1, 4).copy().reshape(n, kv_heads, -1, dim)
    return stacked


def _unstacked(x: Array, rows: int) -> Array:
    """The way back."""
    n, kv_heads, _, dim = x.shape
    split: Array = x.reshape(n, kv_heads, -1, rows, dim).transpose(0, 3, 1, 2, 4)
    return split


def _scores(queries: Array, keys: Array, rows: int) -> Array:
    """Scaled products `[n, kv_heads, group * rows, keys]`, minus infinity for the future."""
    queries *= 1 / np.sqrt(queries.dtype.type(queries.shape[-1]))
    scores: Array = queries @ keys.swapaxes(-1, -2)
    n, kv_heads, stacked, seen = scores.shape
    scores.reshape(n, kv_heads, stacked // rows, rows, seen)[..., seen - rows :] += _future(rows)
    return scores


def attend_block(q: Array, keys: Array, values: Array) -> tuple[Array, Array]:
    """Let the last queries look at all keys up to their own.

    Args:
        q: `[n, rows, heads, dim]`, the queries of the last `rows` keys.
        keys: `[n, kv_heads, seen, dim]`.
        values: The same shape.

    Returns:
        `[n, rows, kv_heads, group, dim]`, and the logarithm of the sum of each row of exponentials.
    """
    rows = q.shape[1]
    scores = _scores(_stacked(q, keys.shape[1]), keys, rows)
    top = scores.max(axis=-1, keepdims=True)
    scores -= top
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    mixed = scores @ values
    mixed /= total
    np.log(total, out=total)
    total += top
    return _unstacked(mixed, rows), total


def _by_head(x: Array, span: Span) -> Array:
    """Rows of a packed batch as `[n, heads, length, dim]`, a view."""
    heads: Array = x[span.rows].reshape(span.sequences, span.length, *x.shape[1:]).transpose(0, 2, 1, 3)
    return heads


def _blocks(length: int) -> list[tuple[int, int]]:
    return [(start, min(start + TRAIN_BLOCK, length)) for start in range(0, length, TRAIN_BLOCK)]


def attend(q: Array, k: Array, v: Array, spans: list[Span]) -> tuple[Array, list[Array]]:
    """Attention inside each sequence of a packed batch.

    Args:
        q: `[rows, heads, dim]`.
        k: `[rows, kv_heads, dim]`.
        v: The same shape.
        spans: Where the sequences are.

    Returns:
        `[rows, heads, dim]`, and what `attend_backward` wants.
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
    dout: Array, out: Array, q: Array, k: Array, v: Array, spans: list[Span], kept: list[Array]
) -> tuple[Array, Array, Array]:
    """The gradients of queries, keys and values. The weights are computed anew rather than kept."""
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
            stacked = _stacked(queries, keys.shape[1])
            weights = _scores(stacked, keys[:, :, seen], rows)  # scales `stacked` too
            weights -= next(totals)
            np.exp(weights, out=weights)
            pulled = _stacked(dmixed, keys.shape[1])
            dvalues[:, :, seen] += weights.swapaxes(-1, -2) @ pulled
            dscores = pulled @ values[:, :, seen].swapaxes(-1, -2)
            dscores -= _stacked(means, keys.shape[1])
            dscores *= weights
            dkeys[:, :, seen] += dscores.swapaxes(-1, -2) @ stacked
            part = _unstacked(dscores @ keys[:, :, seen], rows)
            np.multiply(part, 1 / np.sqrt(q.dtype.type(q.shape[-1])), out=dqueries.reshape(part.shape))
    return dq, dk, dv
