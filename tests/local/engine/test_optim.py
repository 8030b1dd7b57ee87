"""AdamW matches a scalar implementation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tinker_sync.local.engine.training import AdamSettings, AdamState


def by_hand(weight: float, grads: list[float], settings: AdamSettings) -> float:
    """Return a weight after a step of AdamW for each gradient, computed as in the paper on AdamW."""
    first = second = 0.0
    for step, grad in enumerate(grads, start=1):
        weight -= settings.learning_rate * settings.weight_decay * weight
        first = settings.beta1 * first + (1 - settings.beta1) * grad
        second = settings.beta2 * second + (1 - settings.beta2) * grad**2
        top = first / (1 - settings.beta1**step)
        bottom = math.sqrt(second / (1 - settings.beta2**step)) + settings.eps
        weight -= settings.learning_rate * top / bottom
    return weight


@pytest.mark.parametrize(
    "settings",
    [
        AdamSettings(learning_rate=0.1),
        AdamSettings(learning_rate=0.1, weight_decay=0.3),
        AdamSettings(learning_rate=0.1, beta1=0.5, beta2=0.999, eps=0.1),
        AdamSettings(learning_rate=0.1, beta1=0.0, beta2=0.0),
    ],
)
def test_steps_match_the_scalar_implementation(settings: AdamSettings) -> None:
    start, grads = [1.0, -2.0, 0.5], [[0.5, -1.0, 0.0], [0.1, 3.0, 0.0], [0.0, 0.0, 2.0], [-0.2, 1.0, 1.0]]
    weights = np.array(start)
    state = AdamState.start(weights)
    for row in grads:
        state.step(weights, np.array(row), settings)
    expected = [by_hand(start[i], [row[i] for row in grads], settings) for i in range(3)]
    np.testing.assert_allclose(weights, expected, rtol=1e-12)
    assert state.steps == 4


def test_clipping_uses_and_returns_the_total_norm() -> None:
    settings = AdamSettings(learning_rate=0.1, grad_clip_norm=1.0, beta1=0.0, beta2=0.0, eps=1.0)
    weights = np.zeros(2)
    assert AdamState.start(weights).step(weights, np.array([3.0, 4.0]), settings) == pytest.approx(5.0)
    np.testing.assert_allclose(weights, [-0.1 * 0.6 / 1.6, -0.1 * 0.8 / 1.8], rtol=1e-6)
    small = np.zeros(2)
    AdamState.start(small).step(small, np.array([0.3, 0.4]), settings)
    np.testing.assert_allclose(small, [-0.1 * 0.3 / 1.3, -0.1 * 0.4 / 1.4], rtol=1e-12)


def test_moments_move_weights_without_gradients() -> None:
    weights = np.ones(1)
    state, settings = AdamState.start(weights), AdamSettings(learning_rate=0.1)
    state.step(weights, np.zeros(1), settings)
    assert (weights.tolist(), state.steps) == ([1.0], 1)
    state.step(weights, np.ones(1), settings)
    before = float(weights[0])
    state.step(weights, np.zeros(1), settings)
    assert weights[0] < before


def test_zero_eps_and_zero_gradients_do_not_divide_by_zero() -> None:
    weights = np.ones(2, dtype=np.float32)
    AdamState.start(weights).step(weights, np.array([0.0, 1.0], np.float32), AdamSettings(eps=0.0))
    assert weights[0] == 1.0
    assert weights[1] < 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradients_change_nothing(bad: float) -> None:
    weights = np.ones(2)
    state = AdamState.start(weights)
    with pytest.raises(ValueError, match="gradients: not all"):
        state.step(weights, np.array([1.0, bad]), AdamSettings())
    assert (weights.tolist(), state.steps, state.first.tolist()) == ([1.0, 1.0], 0, [0.0, 0.0])


@pytest.mark.parametrize(
    ("field", "value"),
    [("learning_rate", -1.0), ("eps", math.nan), ("weight_decay", math.inf), ("beta1", 1.0), ("beta2", -0.1)],
)
def test_bad_settings_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field}: must be"):
        AdamSettings(**{field: value})
