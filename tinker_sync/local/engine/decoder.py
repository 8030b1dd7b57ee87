"""The decoder: hidden states of packed rows, and the backward pass to an adapter's gradients.

`hidden_states` runs the layers over any rows and leaves attention to its `Attend` argument: the packed
attention of training, or one that reads and writes a cache. `Tape` keeps the intermediate arrays for the
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from tinker_sync.local.engine import attention, ops
from tinker_sync.local.engine._arrays import Array
from tinker_sync.local.engine.attention import PackedSpan
from tinker_sync.local.engine.lora import AdapterRoute, LoraParams, apply_adapter, apply_adapter_backward
from tinker_sync.local.engine.model import Layer, Weights

if TYPE_CHECKING:
    from typing import TypeAlias

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
    weights: Weights, tokens: Array, turn: ops.Rotation, routes: Sequence[AdapterRoute], attend: Attend
) -> Array:
    """Return the normalized hidden state of each row, ready for the head."""
    x = weights.embedding[tokens]
    for number, layer in enumerate(weights.layers):
        x = _layer(weights, layer, number, x, turn, routes, attend, None)
    return ops.rms_norm(x, weights.final_norm, weights.config.norm_eps)[0]


def packed_states(
    weights: Weights, tokens: Array, positions: Array, params: LoraParams | None, tape: Tape
) -> Array:
    """Return the hidden states of whole sequences, packed as in `tape.spans`.

    A recording tape keeps the intermediate arrays for `backward`.
    """
    turn = ops.rotation(weights.config, positions, weights.dtype)
    totals: list[Array] = []

    def attend(_: int, q: Array, k: Array, v: Array) -> Array:
        out, kept = attention.attend(q, k, v, tape.spans)
        totals[:] = kept
        return out

    x = weights.embedding[tokens]
    for number, layer in enumerate(weights.layers):
        x = _layer(
            weights, layer, number, x, turn, (AdapterRoute(params),), attend, tape if tape.recording else None
        )
        if tape.recording:
            tape.frames[-1].totals = list(totals)
    y, scale = ops.rms_norm(x, weights.final_norm, weights.config.norm_eps)
    tape.last, tape.last_scale = x, scale
    return y


def _layer(
    weights: Weights,
    layer: Layer,
    number: int,
    x: Array,
    turn: ops.Rotation,
    routes: Sequence[AdapterRoute],
    attend: Attend,
    tape: Tape | None,
) -> Array:
    config, rows = weights.config, len(x)
    query, kv, eps = config.query_size, config.kv_size, config.norm_eps
    normed, attn_scale = ops.rms_norm(x, layer.attn_norm, eps)
    qkv = apply_adapter(normed, layer.qkv, routes, f"{number}.qkv")
    raw_q = qkv[:, :query].reshape(rows, config.heads, config.head_dim)
    raw_k = qkv[:, query : query + kv].reshape(rows, config.kv_heads, config.head_dim)
    v = qkv[:, query + kv :].reshape(rows, config.kv_heads, config.head_dim)
    q, k, q_scale, k_scale = raw_q, raw_k, None, None
    if layer.q_norm is not None and layer.k_norm is not None:
        q, q_scale = ops.rms_norm(raw_q, layer.q_norm, eps)
        k, k_scale = ops.rms_norm(raw_k, layer.k_norm, eps)
    q, k = ops.rotate(q, turn), ops.rotate(k, turn)
    mixed = attend(number, q, k, v)
    middle = apply_adapter(mixed.reshape(rows, query), layer.out, routes, f"{number}.out")
    middle += x
    normed, mlp_scale = ops.rms_norm(middle, layer.mlp_norm, eps)
    gate_up = apply_adapter(normed, layer.gate_up, routes, f"{number}.gate_up")
    y = apply_adapter(ops.swiglu(gate_up), layer.down, routes, f"{number}.down")
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
    back = ops.rotation(weights.config, positions, weights.dtype)
    dx = ops.rms_norm_backward(dy, tape.last, tape.last_scale, weights.final_norm)
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
    dact = apply_adapter_backward(dx, ops.swiglu(frame.gate_up), layer.down, params, grads, f"{number}.down")
    assert dact is not None  # noqa: S101
    djoined = ops.swiglu_backward(dact, frame.gate_up)
    normed = _normalize(frame.middle, frame.mlp_scale, layer.mlp_norm)
    dnormed = apply_adapter_backward(djoined, normed, layer.gate_up, params, grads, f"{number}.gate_up")
    assert dnormed is not None  # noqa: S101
    dmiddle = ops.rms_norm_backward(dnormed, frame.middle, frame.mlp_scale, layer.mlp_norm)
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
    turn: ops.Rotation,
    spans: list[PackedSpan],
) -> Array:
    config, rows = weights.config, len(dmiddle)
    mixed = frame.mixed.reshape(rows, config.query_size)
    dmixed = apply_adapter_backward(dmiddle, mixed, layer.out, params, grads, f"{number}.out")
    assert dmixed is not None  # noqa: S101
    dq, dk, dv = attention.attend_backward(
        dmixed.reshape(frame.mixed.shape), frame.mixed, frame.q, frame.k, frame.v, spans, frame.totals
    )
    dq, dk = ops.rotate(dq, turn, back=True), ops.rotate(dk, turn, back=True)
    if layer.q_norm is not None and layer.k_norm is not None:
        assert frame.q_scale is not None  # noqa: S101
        assert frame.k_scale is not None  # noqa: S101
        dq = ops.rms_norm_backward(dq, frame.raw_q, frame.q_scale, layer.q_norm)
        dk = ops.rms_norm_backward(dk, frame.raw_k, frame.k_scale, layer.k_norm)
    dqkv = np.concatenate([d.reshape(rows, -1) for d in (dq, dk, dv)], axis=1)
    normed = _normalize(frame.x, frame.attn_scale, layer.attn_norm)
    lowest = number == 0
    dnormed = apply_adapter_backward(
        dqkv, normed, layer.qkv, params, grads, f"{number}.qkv", want_dx=not lowest
    )
    if dnormed is None:
        return dmiddle
    dx = ops.rms_norm_backward(dnormed, frame.x, frame.attn_scale, layer.attn_norm)
    dx += dmiddle
    return dx
