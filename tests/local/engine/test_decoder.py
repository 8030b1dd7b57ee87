"""The operations of a layer match their definitions."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest

from tinker_sync.local.engine.decoder import (
    frequencies,
    rms_norm,
    rms_norm_backward,
    rotate,
    rotation,
    swiglu,
    swiglu_backward,
)
from tinker_sync.local.engine.model import ModelConfig, RopeScaling

CONFIG = ModelConfig(
    vocab_size=9, hidden_size=8, layers=1, heads=2, kv_heads=1, head_dim=16, mlp_size=8, rope_theta=10000.0
)
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=256)


def test_frequencies_are_powers_of_theta() -> None:
    np.testing.assert_allclose(frequencies(CONFIG), [10000.0 ** (-i / 8) for i in range(8)], rtol=1e-6)


def test_llama_3_scales_low_frequencies() -> None:
    plain, scaled = frequencies(CONFIG), frequencies(attrs.evolve(CONFIG, rope_scaling=SCALING))
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        turns = 256 * before / (2 * math.pi)
        if turns >= 4:
            assert after == pytest.approx(before)
        elif turns <= 1:
            assert after == pytest.approx(before / 8)
        else:
            share = (turns - 1) / 3
            assert after == pytest.approx(share * before + (1 - share) * before / 8)
    ratios = (scaled / plain).round(4).tolist()
    assert ratios[0] == 1.0
    assert ratios[-1] == 0.125
    assert any(0.125 < ratio < 1 for ratio in ratios)


def test_rotated_products_depend_on_distance_only() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 16))

    def product(at: int, other: int) -> float:
        turns = [rotation(CONFIG, np.array([place]), np.dtype(np.float64)) for place in (at, other)]
        return float((rotate(q, turns[0]) * rotate(k, turns[1])).sum())

    assert product(5, 3) == pytest.approx(product(105, 103), abs=1e-4)
    assert product(5, 3) != pytest.approx(product(5, 4), abs=1e-2)
    turn = rotation(CONFIG, np.array([77]), np.dtype(np.float64))
    np.testing.assert_allclose(rotate(rotate(q, turn), turn, back=True), q, rtol=1e-12)


def test_the_norm_and_its_gradient() -> None:
    rng = np.random.default_rng(1)
    x, dy, weight, move = rng.standard_normal((4, 3, 8))
    weight = weight[0]
    y, scale = rms_norm(x, weight, 1e-5)
    np.testing.assert_allclose(y, x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * weight, rtol=1e-12)
    above, below = ((rms_norm(x + s * 1e-6 * move, weight, 1e-5)[0] * dy).sum() for s in (1, -1))
    dx = rms_norm_backward(dy, x, scale, weight)
    assert (dx * move).sum() == pytest.approx((above - below) / 2e-6, rel=1e-6)


def test_the_activation_and_its_gradient() -> None:
    rng = np.random.default_rng(2)
    x, move = rng.standard_normal((2, 3, 8))
    dy = rng.standard_normal((3, 4))
    gate, up = x[:, :4], x[:, 4:]
    np.testing.assert_allclose(swiglu(x), gate / (1 + np.exp(-gate)) * up, rtol=1e-12)
    above, below = ((swiglu(x + s * 1e-6 * move) * dy).sum() for s in (1, -1))
    assert (swiglu_backward(dy, x) * move).sum() == pytest.approx((above - below) / 2e-6, rel=1e-6)
    extreme = np.array([[-1e4, 1e4, 1.0, 1.0]], dtype=np.float32)
    assert swiglu(extreme).tolist() == [[0.0, 1e4]]
