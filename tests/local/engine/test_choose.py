"""The choice of tokens, compared with plain and slow implementations."""

from __future__ import annotations

import numpy as np
import pytest

from tinker_sync.local.engine.sampling import Draws, SamplingSettings, choose, invert_cdf, top


@pytest.mark.parametrize("cells", [1, 63, 64, 65, 1000])
def test_inversion_works_for_every_width(cells: int) -> None:
    rng = np.random.default_rng(cells)
    weights = rng.random((200, cells), dtype=np.float32) * (rng.random((200, cells)) < 0.3)
    weights[:, cells // 2] += 1e-3
    uniforms = rng.random(200)
    found = invert_cdf(weights, uniforms)
    shares = np.cumsum(weights, axis=1, dtype=np.float64) / weights.sum(axis=1, dtype=np.float64)[:, None]
    rows = np.arange(200)
    assert (weights[rows, found] > 0).all()
    assert (shares[rows, found] > uniforms - 1e-6).all()
    assert ((shares - weights / weights.sum(axis=1)[:, None])[rows, found] < uniforms + 1e-6).all()


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_extreme_uniforms_hit_possible_tokens(uniform: float) -> None:
    weights = np.zeros((1, 200), dtype=np.float32)
    weights[0, [70, 130]] = [1e-20, 1.0]
    assert invert_cdf(weights, np.array([uniform]))[0] in ((70,) if uniform == 0 else (130,))


def allowed(logits: np.ndarray, how: SamplingSettings) -> set[int]:
    """Return the tokens that the filters of the settings allow, computed step by step."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if how.top_k > 0:
        order = order[: how.top_k]
    weights = np.exp(logits[order].astype(np.float64) / how.temperature)
    weights /= weights.sum()
    kept, mass = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if mass < how.top_p:
            kept.append(token)
        mass += weight
    return set(kept)


@pytest.mark.parametrize("vocab", [9, 700])
@pytest.mark.parametrize(
    "how",
    [
        SamplingSettings(1.0, 3, 1.0),
        SamplingSettings(0.5, -1, 0.7),
        SamplingSettings(2.0, 6, 0.5),
        SamplingSettings(5.0, -1, 0.99),
        SamplingSettings(1.0, 10_000, 0.9),
        SamplingSettings(1.0, -1, 1e-9),
    ],
    ids=str,
)
def test_filters_admit_the_right_tokens(vocab: int, how: SamplingSettings) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal(vocab).astype(np.float32) * 2
    rows = np.tile(logits, (3000, 1))
    found = choose(rows, [how] * 3000, rng.random(3000).tolist())
    may = allowed(logits, how)
    assert set(found.tokens.tolist()) <= may
    weights = np.array([np.exp(logits[token] / how.temperature) for token in sorted(may)])
    weights /= weights.sum()
    share = np.array([(found.tokens == token).mean() for token in sorted(may)])
    assert (np.abs(share - weights) < 5 * np.sqrt(weights / 3000) + 1e-3).all()


def test_a_nucleus_that_is_reached_exactly_takes_no_more() -> None:
    half = SamplingSettings(1.0, -1, 0.5)
    assert choose(np.zeros((1, 2), np.float32), [half], [0.99]).tokens.tolist() == [0]


def test_rows_with_different_settings_are_independent() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((6, 300)).astype(np.float32)
    settings = [
        SamplingSettings(0.0),
        SamplingSettings(),
        SamplingSettings(0.7),
        SamplingSettings(1.0, 5),
        SamplingSettings(1.0, -1, 0.5),
        SamplingSettings(1e-9),
    ]
    uniforms = rng.random(6).tolist()
    together = choose(logits.copy(), settings, uniforms)
    for row in range(6):
        alone = choose(logits[row : row + 1].copy(), settings[row : row + 1], uniforms[row : row + 1])
        assert alone.tokens[0] == together.tokens[row]
        assert alone.logprobs[0] == together.logprobs[row]
    assert together.tokens[0] == logits[0].argmax()
    assert together.tokens[5] == logits[5].argmax()
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(together.logprobs, expected[np.arange(6), together.tokens], atol=1e-5)


def test_top_orders_equal_values_by_number() -> None:
    cells = np.array([2.0, 5.0, 2.0, 5.0, 2.0, 1.0])
    assert [top(cells, count).tolist() for count in (0, 1, 3, 4, 6)] == [
        [],
        [1],
        [1, 3, 0],
        [1, 3, 0, 2],
        [1, 3, 0, 2, 4, 5],
    ]


def test_draws_are_uniform_and_differ_by_sample() -> None:
    streams = [[draws.next() for _ in range(500)] for draws in (Draws(1, number) for number in range(-1, 5))]
    assert len({tuple(stream) for stream in streams}) == 6
    assert all(abs(np.mean(stream) - 0.5) < 0.06 for stream in streams)
    assert abs(np.corrcoef(streams)[0, 1:]).max() < 0.2
    assert Draws(-5, 0).next() == Draws(-5, 0).next()
