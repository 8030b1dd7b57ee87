"""The decoder: hidden states of packed rows, and the backward pass to an adapter's gradients.

`hidden_states` runs the layers over any rows and leaves attention to its `Attend` argument: the packed
attention of training, or one that reads and writes a cache. `Tape` keeps the intermediate arrays for the
backward pass.

The operations between a layer's matrix products are pure functions on float32 (or float64) arrays. `dx` and
`dy` are the gradients of the loss with respect to `x` and `y`.

Attention is causal, with grouped heads, in blocks of queries. A packed batch holds all sequences in
consecutive rows. A `PackedSpan` describes sequences of `length` rows each, from row `start` on. Shorter
sequences are padded at their end. A token attends only to itself and to earlier ones, so the padding needs no
mask, and one call computes all sequences of a length.

Query heads that share a key head are stacked, so each product is one BLAS call for each sequence and key
head. A block of queries reads only the keys up to its own end.

The head computes log-probabilities of target tokens from hidden states. Rows are computed in blocks that fit
the processor's cache. The probabilities of a small batch are kept for the backward pass; those of a larger
one are computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import attrs
import numpy as np

from tinker_sync.local.engine.lora import AdapterRoute, LoraParams, apply_adapter, apply_adapter_backward
from tinker_sync.local.engine.model import Layer, ModelConfig, Weights
from tinker_sync.local.engine.safetensors import Array

if TYPE_CHECKING:
    from typing import TypeAlias


def round_up(count: int, quantum: int) -> int:
    """Round a count up to a multiple of `quantum`.

    >>> round_up(13, 8), round_up(16, 8)
    (16, 16)
    """
    return -(-count // quantum) * quantum


def describe_bad_token(ids: Array, vocab_size: int) -> str:
    """Return an error message with the first token id outside of the vocabulary and its position."""
    at = np.unravel_index(int(np.argmax((ids < 0) | (ids >= vocab_size))), ids.shape)
    place = "".join(f"[{index}]" for index in at)
    return f"a token id lies outside of 0 … {vocab_size - 1}: {ids[at]} at {place}"


# --------------------------------------------------------------------------------- the operations of a layer


def rms_norm(x: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """Scale rows to a mean square of one, times `weight`; also return the scale of each row.

    >>> rms_norm(np.array([[3.0, 4.0]]), np.ones(2), 0.0)[0].round(4).tolist()
    [[0.8485, 1.1314]]
    """
    scale = np.einsum("...i,...i->...", x, x)
    scale /= x.shape[-1]
    scale += eps
    np.sqrt(scale, out=scale)
    np.reciprocal(scale, out=scale)
    y = x * scale[..., None]
    y *= weight
    return y, scale


def rms_norm_backward(dy: Array, x: Array, scale: Array, weight: Array) -> Array:
    """Return the gradient of `x`, the input of `rms_norm`, from `dy`, the gradient of its result."""
    dx = dy * weight
    along = np.einsum("...i,...i->...", dx, x)
    along *= scale * scale
    along /= x.shape[-1]
    dx -= x * along[..., None]
    dx *= scale[..., None]
    return dx


class Rotation(NamedTuple):
    """The cosines and sines of a rotary embedding, for each row and each pair of dimensions of a head."""

    cos: Array
    sin: Array


def frequencies(config: ModelConfig) -> Array:
    """Return the angle by which each pair of dimensions of a head rotates per position."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    base = (1.0 / config.rope_theta**exponent).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return base
    wavelength = 2 * math.pi / base.astype(np.float64)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((scaling.original_max_positions / wavelength - low) / (high - low), 0.0, 1.0)
    return ((1 - smooth) * base / scaling.factor + smooth * base).astype(np.float32)


def rotation(config: ModelConfig, positions: Array, dtype: np.dtype[np.floating]) -> Rotation:
    """Return the rotation of each position. Angles are rounded to float32, as in the models' training."""
    angles = (positions.astype(np.float32)[:, None] * frequencies(config)).astype(dtype)
    return Rotation(np.cos(angles), np.sin(angles))


def rotate(x: Array, turn: Rotation, *, back: bool = False) -> Array:
    """Rotate heads `[rows, heads, head_dim]`; with `back` in the other direction, for the gradient."""
    half = x.shape[-1] // 2
    cos, sin = turn.cos[:, None], turn.sin[:, None]
    left, right = x[..., :half], x[..., half:]
    y = np.empty(x.shape, dtype=x.dtype)
    one, two = (right * sin, left * sin)
    np.multiply(left, cos, out=y[..., :half])
    np.multiply(right, cos, out=y[..., half:])
    if back:
        y[..., :half] += one
        y[..., half:] -= two
    else:
        y[..., :half] -= one
        y[..., half:] += two
    return y


def _sigmoid(x: Array) -> Array:
    # The sigmoid is computed with tanh, which cannot overflow.
    y = x * 0.5
    np.tanh(y, out=y)
    y += 1
    y *= 0.5
    return y


def swiglu(gate_up: Array) -> Array:
    """Return `silu(gate) * up`. A row of `gate_up` is a row of `gate`, followed by one of `up`.

    >>> float(swiglu(np.array([[2.0, 3.0]]))[0, 0].round(4))
    5.2848
    """
    half = gate_up.shape[1] // 2
    y = _sigmoid(gate_up[:, :half])
    y *= gate_up[:, :half]
    y *= gate_up[:, half:]
    return y


def swiglu_backward(dy: Array, gate_up: Array) -> Array:
    """Return the gradient of `gate_up`, the input of `swiglu`, from `dy`, the gradient of its result."""
    half = gate_up.shape[1] // 2
    gate, up = gate_up[:, :half], gate_up[:, half:]
    slope = _sigmoid(gate)
    silu = slope * gate
    joined = np.empty(gate_up.shape, dtype=gate_up.dtype)
    np.multiply(dy, silu, out=joined[:, half:])
    # silu' = s + silu * (1 - s)
    rest = 1 - slope
    rest *= silu
    slope += rest
    slope *= up
    np.multiply(dy, slope, out=joined[:, :half])
    return joined


# ------------------------------------------------------------------------------------------------- attention


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
        The attention output `[n, rows, kv_heads, group, dim]`, where `group` is `heads / kv_heads`, and the
        log-sum-exp of each row of scores.
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
        The attention output `[rows, heads, dim]`, and the log-sum-exps of the scores, for `attend_backward`.
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


# ------------------------------------------------------------------------------------------------ the layers


Attend: TypeAlias = Callable[[int, Array, Array, Array], Array]
"""A function of the layer number, queries `[rows, heads, dim]`, keys and values `[rows, kv_heads, dim]`."""


@attrs.define(eq=False, slots=True)
class Frame:
    """The intermediate arrays of one layer, for its gradient."""

    x: Array
    attn_scale: Array
    raw_q: Array
    raw_k: Array
    q_scale: Array | None
    k_scale: Array | None
    q: Array
    k: Array
    v: Array
    mixed: Array
    totals: list[Array]
    middle: Array
    mlp_scale: Array
    gate_up: Array


@attrs.define(eq=False)
class Tape:
    """The intermediate arrays of a forward pass over packed sequences.

    `frames` has those of the layers; it stays empty unless the tape is `recording`.
    """

    spans: list[PackedSpan]
    recording: bool = True
    frames: list[Frame] = attrs.Factory(list)
    last: Array | None = None
    last_scale: Array | None = None


def hidden_states(
    weights: Weights, tokens: Array, turn: Rotation, routes: Sequence[AdapterRoute], attend: Attend
) -> Array:
    """Return the normalized hidden state of each row, ready for the head."""
    x = weights.embedding[tokens]
    for number, layer in enumerate(weights.layers):
        x = _layer(weights, layer, number, x, turn, routes, attend, None)
    return rms_norm(x, weights.final_norm, weights.config.norm_eps)[0]


def packed_states(
    weights: Weights, tokens: Array, positions: Array, params: LoraParams | None, tape: Tape
) -> Array:
    """Return the hidden states of whole sequences, packed as in `tape.spans`.

    A recording tape keeps the intermediate arrays for `backward`.
    """
    turn = rotation(weights.config, positions, weights.dtype)
    totals: list[Array] = []

    def attend_packed(_: int, q: Array, k: Array, v: Array) -> Array:
        out, kept = attend(q, k, v, tape.spans)
        totals[:] = kept
        return out

    x = weights.embedding[tokens]
    for number, layer in enumerate(weights.layers):
        x = _layer(
            weights,
            layer,
            number,
            x,
            turn,
            (AdapterRoute(params),),
            attend_packed,
            tape if tape.recording else None,
        )
        if tape.recording:
            tape.frames[-1].totals = list(totals)
    y, scale = rms_norm(x, weights.final_norm, weights.config.norm_eps)
    tape.last, tape.last_scale = x, scale
    return y


def _layer(
    weights: Weights,
    layer: Layer,
    number: int,
    x: Array,
    turn: Rotation,
    routes: Sequence[AdapterRoute],
    attend: Attend,
    tape: Tape | None,
) -> Array:
    config, rows = weights.config, len(x)
    query, kv, eps = config.query_size, config.kv_size, config.norm_eps
    normed, attn_scale = rms_norm(x, layer.attn_norm, eps)
    qkv = apply_adapter(normed, layer.qkv, routes, f"{number}.qkv")
    raw_q = qkv[:, :query].reshape(rows, config.heads, config.head_dim)
    raw_k = qkv[:, query : query + kv].reshape(rows, config.kv_heads, config.head_dim)
    v = qkv[:, query + kv :].reshape(rows, config.kv_heads, config.head_dim)
    q, k, q_scale, k_scale = raw_q, raw_k, None, None
    if layer.q_norm is not None and layer.k_norm is not None:
        q, q_scale = rms_norm(raw_q, layer.q_norm, eps)
        k, k_scale = rms_norm(raw_k, layer.k_norm, eps)
    q, k = rotate(q, turn), rotate(k, turn)
    mixed = attend(number, q, k, v)
    middle = apply_adapter(mixed.reshape(rows, query), layer.out, routes, f"{number}.out")
    middle += x
    normed, mlp_scale = rms_norm(middle, layer.mlp_norm, eps)
    gate_up = apply_adapter(normed, layer.gate_up, routes, f"{number}.gate_up")
    y = apply_adapter(swiglu(gate_up), layer.down, routes, f"{number}.down")
    y += middle
    if tape is not None:
        tape.frames.append(
            Frame(
                x, attn_scale, raw_q, raw_k, q_scale, k_scale, q, k, v, mixed, [], middle, mlp_scale, gate_up
            )
        )
    return y


def backward(
    weights: Weights, tape: Tape, positions: Array, dy: Array, params: LoraParams, grads: LoraParams
) -> None:
    """Add to `grads` the gradients that follow from `dy`, the gradient of the result of `packed_states`.

    The call uses up `tape`, which must have been `recording`. If only the head is adapted, it does nothing.
    """
    assert tape.last is not None  # noqa: S101
    assert tape.last_scale is not None  # noqa: S101
    settings = params.settings
    if not (settings.train_attn or settings.train_mlp):
        return
    back = rotation(weights.config, positions, weights.dtype)
    dx = rms_norm_backward(dy, tape.last, tape.last_scale, weights.final_norm)
    for number in reversed(range(weights.config.layers)):
        frame, layer = tape.frames.pop(), weights.layers[number]
        dx = _mlp_backward(layer, number, frame, dx, params, grads)
        if number or settings.train_attn:
            dx = _attention_backward(weights, layer, number, frame, dx, params, grads, back, tape.spans)


def _normalize(x: Array, scale: Array, weight: Array) -> Array:
    # The forward pass has not kept this product, because computing it again is cheaper.
    y: Array = x * scale[:, None]
    y *= weight
    return y


def _mlp_backward(
    layer: Layer, number: int, frame: Frame, dx: Array, params: LoraParams, grads: LoraParams
) -> Array:
    dact = apply_adapter_backward(dx, swiglu(frame.gate_up), layer.down, params, grads, f"{number}.down")
    assert dact is not None  # noqa: S101
    djoined = swiglu_backward(dact, frame.gate_up)
    normed = _normalize(frame.middle, frame.mlp_scale, layer.mlp_norm)
    dnormed = apply_adapter_backward(djoined, normed, layer.gate_up, params, grads, f"{number}.gate_up")
    assert dnormed is not None  # noqa: S101
    dmiddle = rms_norm_backward(dnormed, frame.middle, frame.mlp_scale, layer.mlp_norm)
    dmiddle += dx
    return dmiddle


def _attention_backward(
    weights: Weights,
    layer: Layer,
    number: int,
    frame: Frame,
    dmiddle: Array,
    params: LoraParams,
    grads: LoraParams,
    turn: Rotation,
    spans: list[PackedSpan],
) -> Array:
    config, rows = weights.config, len(dmiddle)
    mixed = frame.mixed.reshape(rows, config.query_size)
    dmixed = apply_adapter_backward(dmiddle, mixed, layer.out, params, grads, f"{number}.out")
    assert dmixed is not None  # noqa: S101
    dq, dk, dv = attend_backward(
        dmixed.reshape(frame.mixed.shape), frame.mixed, frame.q, frame.k, frame.v, spans, frame.totals
    )
    dq, dk = rotate(dq, turn, back=True), rotate(dk, turn, back=True)
    if layer.q_norm is not None and layer.k_norm is not None:
        assert frame.q_scale is not None  # noqa: S101
        assert frame.k_scale is not None  # noqa: S101
        dq = rms_norm_backward(dq, frame.raw_q, frame.q_scale, layer.q_norm)
        dk = rms_norm_backward(dk, frame.raw_k, frame.k_scale, layer.k_norm)
    dqkv = np.concatenate([d.reshape(rows, -1) for d in (dq, dk, dv)], axis=1)
    normed = _normalize(frame.x, frame.attn_scale, layer.attn_norm)
    lowest = number == 0
    dnormed = apply_adapter_backward(
        dqkv, normed, layer.qkv, params, grads, f"{number}.qkv", want_dx=not lowest
    )
    if dnormed is None:
        return dmiddle
    dx = rms_norm_backward(dnormed, frame.x, frame.attn_scale, layer.attn_norm)
    dx += dmiddle
    return dx


# -------------------------------------------------------------------------------------------------- the head


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
