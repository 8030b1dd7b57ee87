"""Sampling matches a decoder without cache, and requests do not affect each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.engine_models import SHAPES, VOCAB, busy_params, tiny_weights

from tinker_sync.local.engine import decoder
from tinker_sync.local.engine.decoder import PackedSpan, Tape, packed_states
from tinker_sync.local.engine.lora import AdapterRoute, LoraParams, LoraSettings
from tinker_sync.local.engine.model import Weights
from tinker_sync.local.engine.sampling import (
    Sampler,
    SampleResult,
    SampleSpec,
    SamplingSettings,
    choose,
    invert_cdf,
)

WEIGHTS = tiny_weights()
ADAPTERS = [busy_params(WEIGHTS, LoraSettings(rank=2), seed=seed).snapshot() for seed in (1, 2)]


Ints = np.ndarray[Any, Any]


def prompt(length: int, seed: int = 0) -> Ints:
    return np.random.default_rng(seed).integers(0, VOCAB, length)


def spec(length: int = 7, **changes: Any) -> SampleSpec:
    return SampleSpec(**{"prompt": prompt(length), "seed": 3, "max_tokens": 5} | changes)


def logprobs_of(
    weights: Weights, params: LoraParams | None, tokens: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Compute the log-probabilities at every position, without cache."""
    tape = Tape([PackedSpan(0, 1, len(tokens))], recording=False)
    hidden = packed_states(weights, tokens, np.arange(len(tokens)), params, tape)
    return decoder.log_softmax(decoder.logits(weights, hidden, [AdapterRoute(params)]))


def same(one: SampleResult, two: SampleResult, rounding: float = 1e-4) -> bool:
    return all(
        a.tokens.tobytes() == b.tokens.tobytes() and np.abs(a.logprobs - b.logprobs).max() <= rounding
        for a, b in zip(one.samples, two.samples, strict=True)
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [1, 15, 16, 61])
def test_greedy_sampling_matches_a_decoder_without_cache(shape: str, length: int) -> None:
    weights = tiny_weights(shape)
    params = busy_params(weights, LoraSettings(rank=2)).snapshot()
    result = Sampler(weights).run([spec(length, params=params, temperature=0, max_tokens=40)])[0].samples[0]
    tokens = np.concatenate([prompt(length), result.tokens])
    expected = logprobs_of(weights, params, tokens)[length - 1 : -1]
    assert result.tokens.tolist() == expected.argmax(axis=1).tolist()
    np.testing.assert_allclose(result.logprobs, expected.max(axis=1), atol=2e-5)
    assert (len(result.tokens), result.stop_reason) == (40, "length")
    assert len(set(result.tokens.tolist())) >= 3


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.3}, {"temperature": 2.0, "top_k": 3}, {"top_p": 0.4}], ids=str
)
def test_logprobs_do_not_depend_on_the_settings(how: dict[str, Any]) -> None:
    for sample in Sampler(WEIGHTS).run([spec(num_samples=3, **how)])[0].samples:
        tokens = np.concatenate([prompt(7), sample.tokens])
        expected = logprobs_of(WEIGHTS, None, tokens)[6:-1]
        np.testing.assert_allclose(sample.logprobs, expected[np.arange(5), sample.tokens], atol=2e-5)


def mixed_specs() -> list[SampleSpec]:
    rng = np.random.default_rng(4)
    return [
        spec(
            int(length),
            prompt=prompt(int(length), seed=number % 4),
            seed=number,
            params=(None, *ADAPTERS)[number % 3],
            max_tokens=3 + 11 * (number % 5),
            temperature=(1.0, 0.0, 0.7)[number % 3],
            top_k=(-1, 4)[number % 2],
            top_p=(1.0, 0.8)[number % 4 // 2],
            num_samples=1 + number % 3,
        )
        for number, length in enumerate(rng.integers(1, 90, 14))
    ]


def test_requests_do_not_affect_each_other() -> None:
    specs = mixed_specs()
    alone = [Sampler(WEIGHTS).run([one])[0] for one in specs]
    together = Sampler(WEIGHTS).run(specs)
    crowded = Sampler(WEIGHTS, max_rows=3).run(specs[::-1])[::-1]
    for one, two, three in zip(alone, together, crowded, strict=True):
        assert same(one, two)
        assert same(one, three)


def test_requests_join_and_leave_at_any_step() -> None:
    specs = mixed_specs()
    sampler, results, tickets = Sampler(WEIGHTS), {}, []
    for one in specs:
        tickets.append(sampler.add(one))
        results.update(sampler.step())
    dropped = sampler.add(spec(40, max_tokens=500))
    results.update(sampler.step())
    sampler.cancel(dropped)
    sampler.cancel(dropped)
    waiting = sampler.add(spec())
    sampler.cancel(waiting)
    while sampler.busy:
        results.update(sampler.step())
    assert set(results) == set(tickets)
    for ticket, one in zip(tickets, specs, strict=True):
        assert same(results[ticket], Sampler(WEIGHTS).run([one])[0])
    assert sampler.step() == []


def test_equal_seeds_repeat_and_samples_differ() -> None:
    long = {"max_tokens": 30, "num_samples": 4}
    one, two, other = (Sampler(WEIGHTS).run([spec(seed=seed, **long)])[0] for seed in (1, 1, 2))
    assert same(one, two, rounding=0)
    assert not same(one, other)
    assert len({sample.tokens.tobytes() for sample in one.samples}) == 4
    fewer = Sampler(WEIGHTS).run([spec(seed=1, max_tokens=30, num_samples=2)])[0]
    assert [sample.tokens.tobytes() for sample in fewer.samples] == [
        sample.tokens.tobytes() for sample in one.samples[:2]
    ]
    assert not same(Sampler(WEIGHTS).run([spec(seed=-1)])[0], Sampler(WEIGHTS).run([spec(seed=2**64 - 2)])[0])


def test_frequencies_match_the_probabilities() -> None:
    expected = np.exp(logprobs_of(WEIGHTS, None, prompt(7))[-1])
    samples = Sampler(WEIGHTS, max_rows=4000).run([spec(max_tokens=1, num_samples=4000)])[0].samples
    counts = np.bincount([sample.tokens[0] for sample in samples], minlength=VOCAB)
    spread = np.sqrt(expected * (1 - expected) / 4000)
    assert (np.abs(counts / 4000 - expected) < 5 * spread + 1e-3).all()


def test_samples_stop_at_a_token_or_a_text() -> None:
    free = Sampler(WEIGHTS).run([spec(max_tokens=30)])[0].samples[0].tokens.tolist()
    stop = free[4]
    place = free.index(stop)
    by_token = Sampler(WEIGHTS).run([spec(max_tokens=30, stop_tokens=frozenset({stop}))])[0].samples[0]
    assert (by_token.tokens.tolist(), by_token.stop_reason) == (free[: place + 1], "stop")
    text = "".join(chr(97 + token) for token in free)
    wanted = text[6:9]
    end = text.index(wanted) + 3
    sampler = Sampler(WEIGHTS, decode=lambda tokens: "".join(chr(97 + token) for token in tokens))
    by_text = sampler.run([spec(max_tokens=30, stop_texts=("not in the text", wanted))])[0].samples[0]
    assert (by_text.tokens.tolist(), by_text.stop_reason) == (free[:end], "stop")


def test_a_stop_at_the_last_token_is_reported() -> None:
    free = Sampler(WEIGHTS).run([spec(max_tokens=1)])[0].samples[0].tokens
    last = Sampler(WEIGHTS).run([spec(max_tokens=1, stop_tokens=frozenset(free.tolist()))])[0].samples[0]
    assert last.stop_reason == "stop"


def test_prompt_scores_match_the_model() -> None:
    expected = logprobs_of(WEIGHTS, ADAPTERS[0], prompt(40))
    targets = np.tile([[3, -1, 5]], (39, 1))
    asked = spec(
        40,
        params=ADAPTERS[0],
        prompt_logprobs=True,
        topk_prompt_logprobs=3,
        target_prompt_logprobs=targets,
        max_tokens=1,
    )
    scores = Sampler(WEIGHTS).run([asked])[0].prompt
    assert np.isnan(scores.logprobs[0])
    np.testing.assert_allclose(scores.logprobs[1:], expected[np.arange(39), prompt(40)[1:]], atol=2e-5)
    assert (scores.topk.token_ids.shape, scores.topk.token_ids.dtype) == ((40, 3), np.int32)
    assert np.isnan(scores.topk.logprobs[0]).all()
    assert scores.topk.token_ids[1:].tolist() == np.argsort(-expected[:-1], kind="stable")[:, :3].tolist()
    np.testing.assert_allclose(scores.topk.logprobs[1:], -np.sort(-expected[:-1])[:, :3], atol=2e-5)
    np.testing.assert_allclose(scores.target_logprobs[:, [0, 2]], expected[:-1][:, [3, 5]], atol=2e-5)
    assert not scores.target_logprobs[:, 1].any()
    assert scores.alt_tokens is None


def test_last_n_limits_the_prompt_scores() -> None:
    whole, part = (
        Sampler(WEIGHTS).run(
            [spec(40, prompt_logprobs=True, prompt_logprobs_last_n=n, topk_prompt_logprobs=2)]
        )[0]
        for n in (None, 5)
    )
    assert np.isnan(part.prompt.logprobs).tolist() == [True] * 35 + [False] * 5
    np.testing.assert_allclose(part.prompt.logprobs[35:], whole.prompt.logprobs[35:], atol=2e-5)
    assert np.isnan(part.prompt.topk.logprobs[:, 0]).tolist() == [True] * 35 + [False] * 5
    assert same(whole, part)


def test_a_single_token_has_no_scores() -> None:
    result = Sampler(WEIGHTS).run([spec(1, prompt_logprobs=True, prompt_alt_tokens=2)])[0].prompt
    assert result.logprobs is not None
    assert np.isnan(result.logprobs).tolist() == [True]
    assert result.alt_tokens.shape == (0, 2)


def test_alternatives_use_the_request_temperature() -> None:
    expected = logprobs_of(WEIGHTS, None, prompt(4))[:-1] / 0.5
    expected = np.exp(expected) / np.exp(expected).sum(axis=1, keepdims=True)
    asked = spec(4, prompt_alt_tokens=3000, temperature=0.5, max_tokens=1)
    scores = Sampler(WEIGHTS).run([asked])[0].prompt
    for row in range(3):
        share = np.bincount(scores.alt_tokens[row], minlength=VOCAB) / 3000
        assert (np.abs(share - expected[row]) < 5 * np.sqrt(expected[row] / 3000) + 1e-3).all()
    own = logprobs_of(WEIGHTS, None, prompt(4))
    np.testing.assert_allclose(scores.alt_logprobs[2], own[2, scores.alt_tokens[2]], atol=2e-5)
    again = Sampler(WEIGHTS).run([asked])[0].prompt
    assert scores.alt_tokens.tolist() == again.alt_tokens.tolist()
    greedy = Sampler(WEIGHTS).run([spec(4, prompt_alt_tokens=2, temperature=0)])[0].prompt
    assert greedy.alt_tokens[:, 1].tolist() == own[:-1].argmax(axis=1).tolist()


# ------------------------------------------------------------------------------------------------ prefixes
def hits(sampler: Sampler, **changes: Any) -> int:
    return sampler.run([spec(**changes)])[0].prompt_cache_hit_tokens


def test_cached_prompts_give_the_same_samples() -> None:
    sampler = Sampler(WEIGHTS)
    first = sampler.run([spec(50, max_tokens=20)])[0]
    again = sampler.run([spec(50, max_tokens=20)])[0]
    assert (first.prompt_cache_hit_tokens, again.prompt_cache_hit_tokens) == (0, 49)
    assert same(first, again)
    longer = spec(
        prompt=np.concatenate([prompt(50)[:40], [(prompt(50)[40] + 1) % VOCAB], prompt(30)]), max_tokens=20
    )
    reused = sampler.run([longer])[0]
    assert reused.prompt_cache_hit_tokens == 40
    assert same(reused, Sampler(WEIGHTS).run([longer])[0])


def test_scored_positions_are_always_computed() -> None:
    sampler = Sampler(WEIGHTS)
    assert hits(sampler, length=48) == 0
    assert hits(sampler, length=48) == 47
    assert hits(sampler, length=48, prompt_logprobs=True) == 0
    assert hits(sampler, length=48, prompt_logprobs=True, prompt_logprobs_last_n=20) == 27
    assert hits(sampler, length=48, prompt_alt_tokens=1) == 0


def test_adapters_have_separate_prefixes() -> None:
    sampler = Sampler(WEIGHTS)
    assert hits(sampler, length=40, params=ADAPTERS[0]) == 0
    assert hits(sampler, length=40, params=ADAPTERS[1]) == 0
    assert hits(sampler, length=40) == 0
    assert hits(sampler, length=40, params=ADAPTERS[0]) == 39
    sampler.forget(ADAPTERS[0])
    assert hits(sampler, length=40, params=ADAPTERS[0]) == 0
    assert hits(sampler, length=40, params=ADAPTERS[1]) == 39


def test_equal_prompts_are_computed_once() -> None:
    sampler = Sampler(WEIGHTS)
    many = [spec(40, seed=seed, params=ADAPTERS[seed % 2]) for seed in range(6)]
    results = sampler.run(many)
    assert [result.prompt_cache_hit_tokens for result in results] == [0, 0, 39, 39, 39, 39]
    uncached = Sampler(WEIGHTS, prefix_positions=0)
    for one, two in zip(results, uncached.run(many), strict=True):
        assert two.prompt_cache_hit_tokens == 0
        assert same(one, two)


def test_the_latest_prompts_are_cached() -> None:
    sampler = Sampler(WEIGHTS, prefix_positions=80)
    a, b, c = (np.concatenate([[first], prompt(39)]) for first in range(3))
    assert [hits(sampler, prompt=one) for one in (a, b, a, c, a, b)] == [0, 0, 39, 0, 39, 0]
    assert hits(sampler, length=100) == 0
    assert hits(sampler, length=100) == 0  # too long for the cache


# ----------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"prompt": np.zeros(0, dtype=np.int64)}, "prompt: must be at least one token"),
        ({"prompt": np.array([VOCAB])}, f"prompt: a token id lies outside of 0 … {VOCAB - 1}"),
        ({"prompt": np.array([0, 1, -2, VOCAB])}, rf"0 … {VOCAB - 1}: -2 at \[2\]$"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"max_tokens": 32768}, "max_tokens: 7 of the prompt and 32768 more, the model takes 32768"),
        ({"top_k": 0}, r"top_k: must be -1 \(off\) or"),
        ({"stop_texts": ("a", "")}, "stop: an empty text"),
        ({"stop_texts": ("a",)}, "stop: texts need a tokenizer"),
        ({"topk_logprobs": VOCAB + 1}, f"topk_logprobs: must be 0 … {VOCAB}"),
        ({"target_prompt_logprobs": np.full((6, 1), -1)}, "target_prompt_logprobs: at least one id"),
        ({"target_prompt_logprobs": np.full((6, 1), VOCAB)}, "target_prompt_logprobs: at least one id"),
    ],
)
def test_bad_requests_are_refused(changes: dict[str, Any], complaint: str) -> None:
    sampler = Sampler(WEIGHTS)
    with pytest.raises(ValueError, match=complaint):
        sampler.add(spec(**changes))
    assert not sampler.busy


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
