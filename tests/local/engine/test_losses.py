"""Losses match their formulas and derivatives, and bad inputs are refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from support.engine_models import VOCAB, example

from tinker_sync.errors import InvalidInputError
from tinker_sync.local.engine.losses import (
    LOSSES,
    Example,
    Listed,
    Term,
    check_example,
    complete_config,
    find_rule,
)
from tinker_sync.types import Datum, ForwardBackwardInput, ModelInput

P = np.array([-1.0, -2.0, -0.5, -3.0])
Q = np.array([-1.5, -1.0, -0.5, -2.5])
A = np.array([2.0, 1.0, -1.0, -0.5])
R = np.exp(P - Q)  # about 1.65, 0.37, 1, 0.61
SAMPLED = {"logprobs": Q, "advantages": A}


def term(loss_fn: str, inputs: dict[str, Any] | None = None, **config: float) -> Term:
    return find_rule(loss_fn).compute(P, inputs or SAMPLED, complete_config(loss_fn, config))


def test_cross_entropy_matches_its_formula() -> None:
    weights = np.array([0.0, 1.0, 2.0, -1.0])
    assert term("cross_entropy", {"weights": weights}).loss == pytest.approx(2.0 + 1.0 - 3.0)
    assert term("cross_entropy", {"weights": weights}).slope.tolist() == (-weights).tolist()
    assert find_rule("cross_entropy").compute(P, {}, {}).loss == pytest.approx(6.5)


def test_importance_sampling_matches_its_formula() -> None:
    found = term("importance_sampling")
    assert found.loss == pytest.approx(-(R * A).sum())
    np.testing.assert_allclose(found.slope, -R * A)


def test_ppo_stops_the_gradient_of_clipped_tokens() -> None:
    found = term("ppo")
    assert found.loss == pytest.approx(-(1.2 * 2.0 + R[1] * 1.0 - 1.0 - 0.8 * 0.5))
    # Clipped: high ratios with a positive advantage, low ratios with a negative one.
    np.testing.assert_allclose(found.slope, [0.0, -R[1], 1.0, 0.0])


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    held = np.array([1.5, 0.5, 1.0, R[3]])
    found = term("cispo", clip_low_threshold=0.5, clip_high_threshold=1.5)
    assert found.loss == pytest.approx(-(held * P * A).sum())
    np.testing.assert_allclose(found.slope, -held * A)


def test_dro_matches_its_formula() -> None:
    found = term("dro", beta=0.3)
    assert found.loss == pytest.approx(-(P * A - 0.15 * (P - Q) ** 2).sum())
    np.testing.assert_allclose(found.slope, -(A - 0.3 * (P - Q)))


def test_gspo_uses_one_ratio_for_the_sequence() -> None:
    mask = np.array([0.0, 1.0, 1.0, 1.0])
    ratio = math.exp((-1.0 + 0.0 - 0.5) / 3)
    found = term(
        "gspo", SAMPLED | {"sequence_ratio_mask": mask}, clip_low_threshold=0.8, clip_high_threshold=1.2
    )
    assert ratio == pytest.approx(0.6065, abs=1e-4)
    # Below the threshold, positive advantages use the ratio, negative ones the threshold.
    assert found.loss == pytest.approx(-(ratio * 2.0 + ratio * 1.0 - 0.8 - 0.4))
    np.testing.assert_allclose(found.slope, [-ratio * 2.0, -ratio, 0.0, 0.0])


@pytest.mark.parametrize(
    ("loss_fn", "config", "complaint"),
    [
        ("gspo", {"clip_low_threshold": 0.8}, "clip_high_threshold: gspo needs it"),
        ("gspo", {}, "clip_low_threshold: gspo needs it"),
        ("ppo", {"beta": 0.1}, r"loss_fn_config\.beta: ppo knows clip_low_threshold, clip_high_threshold"),
        ("cross_entropy", {"beta": 0.1}, "cross_entropy knows no settings"),
        ("dro", {"beta": math.nan}, "beta: must be a finite number, got nan"),
        ("dro", {"beta": "0.1"}, "beta: must be a finite number, got '0.1'"),
        ("ppo", {"clip_low_threshold": 1.3}, "clip_low_threshold: 1.3 is above"),
        ("sft", {}, "'sft' is unknown"),
    ],
)
def test_bad_configs_are_refused(loss_fn: str, config: dict[str, float], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        complete_config(loss_fn, config)


def changed(loss_fn: str, **inputs: Any) -> Example:
    good = example(np.random.default_rng(0), 4, loss_fn)
    merged = {**good.inputs, **inputs}
    return Example(good.tokens, {name: value for name, value in merged.items() if value is not None})


F4 = np.ones(4, dtype=np.float32)
T4 = np.arange(4)


@pytest.mark.parametrize(
    ("loss_fn", "inputs", "complaint"),
    [
        ("cross_entropy", {"target_tokens": None}, "target_tokens: cross_entropy needs it"),
        ("ppo", {"logprobs": None}, "logprobs: ppo needs it"),
        ("cispo", {"advantages": None}, "advantages: cispo needs it"),
        ("gspo", {"sequence_ratio_mask": None}, "sequence_ratio_mask: gspo needs it"),
        ("gspo", {"sequence_ratio_mask": 0 * F4}, "sequence_ratio_mask: marks no token"),
        ("dro", {"weights": F4}, "weights: dro takes only target_tokens, logprobs, advantages"),
        ("ppo", {"logprobs": F4[:3]}, r"logprobs: shape \(3,\) differs from that of target_tokens, \(4,\)"),
        ("ppo", {"advantages": F4 * np.nan}, "advantages: not all values are finite"),
        ("ppo", {"advantages": F4 > 0}, "advantages: must be numbers, got bool"),
        ("ppo", {"target_tokens": T4[:, None]}, r"target_tokens: ppo takes rank 1, got shape \(4, 1\)"),
        ("cross_entropy", {"target_tokens": T4[:3]}, "target_tokens: 3 positions, but model_input has 4"),
        ("cross_entropy", {"target_tokens": T4 + VOCAB}, f"target_tokens: .* outside of 0 … {VOCAB - 1}"),
        ("cross_entropy", {"target_tokens": T4 - 1}, "target_tokens: a token id lies outside"),
        (
            "cross_entropy",
            {"target_tokens": np.array([[0, 1], [2, VOCAB], [-1, 0], [0, 0]])},
            rf"target_tokens: .* outside of 0 … {VOCAB - 1}: {VOCAB} at \[1\]\[1\]$",
        ),
        ("cross_entropy", {"target_tokens": F4}, "target_tokens: token ids must be integers, got float32"),
        ("cross_entropy", {"target_tokens": T4[:, None], "weights": None}, "weights: targets of rank 2"),
        ("cross_entropy", {"target_tokens": T4[:, None]}, r"weights: shape \(4,\) differs"),
    ],
)
def test_bad_inputs_are_refused(loss_fn: str, inputs: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=rf"^data\[2\]\.{complaint}"):
        check_example(changed(loss_fn, **inputs), loss_fn, VOCAB, "data[2].")


def sparse_of(dense: np.ndarray[Any, Any]) -> Listed:
    return Listed(dense, dense != 0)


def test_sparse_targets_match_dense_ones_with_padding_of_zero() -> None:
    targets = np.array([[3, 5], [0, 7], [2, 0], [0, 0]])
    weights = np.array([[0.5, 0.5], [1.0, 2.0], [3.0, 0.0], [0.0, 0.0]])  # one token 0 has a weight
    tokens = T4
    both = [
        check_example(Example(tokens, {"target_tokens": target, "weights": weight}), "cross_entropy", VOCAB)
        for target, weight in ((targets, weights), (sparse_of(targets), sparse_of(weights)))
    ]
    p = -np.arange(1.0, 9.0).reshape(4, 2)
    rule = find_rule("cross_entropy")
    dense, sparse = (one.term(rule, p, {}) for one in both)
    assert dense.loss == sparse.loss == pytest.approx(-(p * weights).sum())
    assert dense.slope.tolist() == sparse.slope.tolist()
    shown = both[1].output(p)
    assert shown.dtype == np.float32
    assert shown.tolist() == [[-1, -2], [-3, -4], [-5, 0], [0, 0]]
    assert both[0].output(p).tolist() == p.tolist()


def test_the_client_misses_the_inputs_that_the_engine_needs() -> None:
    bare = Datum(ModelInput.from_ints([1]), {"other": [1.0]})
    for name, rule in LOSSES.items():
        found_here = {"logprobs"} if name == "stable_reinforce" else set()  # in the server's own records
        with pytest.raises(InvalidInputError) as refused:
            ForwardBackwardInput([bare], name).validate()
        missed = {each for each in rule.needs if f"[{each!r}]: is missing" in str(refused.value)}
        assert missed == set(rule.needs) - found_here, name
