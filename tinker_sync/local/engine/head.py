"""The head of the model: log-probabilities of target tokens from hidden states, and the backward pass.

Rows are computed in blocks that fit the processor's cache. The probabilities of a small batch are kept for
the backward pass; those of a larger one are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from tinker_sync.local.engine._arrays import Array
from tinker_sync.local.engine.lora import AdapterRoute, LoraParams, apply_adapter, apply_adapter_backward
from tinker_sync.local.engine.model import Weights

BLOCK_CELLS = 1 << 18
"""About the number of logits computed at once. They take one megabyte, as the private cache of a core."""

KEPT_CELLS = 1 << 25
"""The largest number of probabilities to keep: 128 MB."""


def logits(weights: Weights, hidden: Array, routes: Sequence[AdapterRoute]) -> Array:
    """Return the logits of rows of hidden states."""
    return apply_adapter(hidden, weights.head, routes, "head")


def log_softmax(rows: Array) -> Array:
    """Turn rows of logits into log-probabilities, in place.

    >>> np.exp(log_softmax(np.array([[0.0, 0.0]]))).tolist()
    [[0.5, 0.5]]
    """
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return rows


def blocks(weights: Weights, rows: int) -> list[slice]:
    """Divide a number of rows into blocks of about `BLOCK_CELLS` logits, but at least 8 rows."""
    size = max(8, BLOCK_CELLS // weights.config.vocab_size)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


@attrs.define(eq=False)
class HeadTape:
    """The arrays of `target_logprobs` that its backward pass needs.

    `kept` has the probabilities of all tokens, block by block; None if they must be computed again.
    """

    hidden: Array
    targets: Array
    kept: list[Array] | None


def target_logprobs(
    weights: Weights, hidden: Array, targets: Array, params: LoraParams | None, *, keep: bool = False
) -> tuple[Array, HeadTape]:
    """Return the log-probabilities of `targets[row, candidate]`, and the tape for the backward pass.

    If `keep` is set and the batch is small, the tape keeps the probabilities of all tokens.
    """
    p = np.empty(targets.shape, dtype=weights.dtype)
    keep = keep and len(hidden) * weights.config.vocab_size <= KEPT_CELLS
    tape = HeadTape(hidden, targets, [] if keep else None)
    for block in blocks(weights, len(hidden)):
        p[block], probabilities = _block(weights, hidden[block], targets[block], params)
        if tape.kept is not None:
            tape.kept.append(probabilities)
    return p, tape


def _block(weights: Weights, hidden: Array, targets: Array, params: LoraParams | None) -> tuple[Array, Array]:
    """Return the log-probabilities of the targets, and the probabilities of all tokens."""
    rows = logits(weights, hidden, (AdapterRoute(params),))
    rows -= rows.max(axis=1, keepdims=True)
    p = np.take_along_axis(rows, targets, axis=1)
    np.exp(rows, out=rows)
    total = rows.sum(axis=1, keepdims=True)
    p -= np.log(total)
    rows /= total
    return p, rows


def target_logprobs_backward(
    weights: Weights, tape: HeadTape, dp: Array, params: LoraParams, grads: LoraParams
) -> Array:
    """Return the gradient of the hidden states, and add that of the adapter to `grads`.

    `dp` is the gradient of the log-probabilities. The call overwrites the tape, so a tape serves one call.
    """
    dhidden = np.zeros_like(tape.hidden)
    for number, block in enumerate(blocks(weights, len(dp))):
        rows = np.flatnonzero(dp[block].any(axis=1))  # skip tokens without weight, such as those of a prompt
        if not len(rows):
            continue
        whole = len(rows) == block.stop - block.start
        hidden, targets, slope = (
            x[block] if whole else x[block][rows] for x in (tape.hidden, tape.targets, dp)
        )
        if tape.kept is not None:
            dlogits = tape.kept[number] if whole else tape.kept[number][rows]
        else:
            dlogits = _block(weights, hidden, targets, params)[1]
        dlogits *= -slope.sum(axis=1, keepdims=True)
        each = np.arange(len(slope))
        for column in range(slope.shape[1]):
            dlogits[each, targets[:, column]] += slope[:, column]
        dhidden[block.start + rows] = apply_adapter_backward(
            dlogits, hidden, weights.head, params, grads, "head"
        )
    return dhidden
