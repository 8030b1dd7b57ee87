"""The operations between a layer's matrix products, forward and backward: norm, rotation, activation.

Pure functions on float32 (or float64) arrays. `dx` and `dy` are the gradients of the loss by `x` and `y`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tinker_sync.local.engine._arrays import Array
from tinker_sync.local.engine.model import ModelConfig


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
