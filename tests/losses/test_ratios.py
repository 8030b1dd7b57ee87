"""`divergence`: its figures against loops over single numbers, the tokens that count, and its advice."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinker_sync
from tinker_sync import losses
from tinker_sync.errors import InvalidInputError
from tinker_sync.losses import ratios
from tinker_sync.testing import LocalServer
from tinker_sync.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SamplingParams,
    TensorData,
)

CASES = int(os.environ.get("EXAMPLES", "30"))
LOW, HIGH = 0.8, 1.2
MEANS = (
    "kl_sampler_trainer_k1", "kl_sampler_trainer_k3", "kl_trainer_sampler_k1", "kl_trainer_sampler_k3",
    "ratio_mean", "below", "above", "clipped",
)  # fmt: skip


def one(p: Any, q: Any, **inputs: Any) -> tuple[Datum, dict[str, TensorData]]:
    tokens = list(range(len(q)))
    datum = Datum(ModelInput.from_ints(tokens), {"target_tokens": tokens, "logprobs": q, **inputs})
    return datum, {"logprobs": TensorData(p, "float32", [len(p)])}


def compare(*pairs: tuple[Datum, dict[str, TensorData]], **options: float) -> losses.Divergence:
    output = ForwardBackwardOutput("ArrayRecord", [record for _, record in pairs])
    return losses.divergence([datum for datum, _ in pairs], output, **options)


def random_pairs(seed: int) -> list[tuple[Datum, dict[str, TensorData]]]:
    """Return data of several lengths, some without a token that counts, with ratios near 1 or far from it."""
    rng = np.random.default_rng(seed)
    spread = 10.0 ** rng.uniform(-4, 1)
    pairs = []
    for _ in range(int(rng.integers(1, 6))):
        length = int(rng.integers(1, 9))
        q = -rng.exponential(1.0, length).astype(np.float32)
        p = (q + rng.normal(0, spread, length)).astype(np.float32)
        advantage = np.full(length, rng.normal(), dtype=np.float32)
        weights = (rng.random(length) < rng.choice([0.0, 0.7, 1.0])).astype(np.float32)
        pairs.append(one(p, q, advantages=advantage, weights=weights))
    return pairs


# ------------------------------------------------------------------------------------- the oracle, a loop


def loop(items: list[tuple[Any, float]], exp: Callable[[Any], Any]) -> dict[str, float]:
    """Return the figures of (log ratio, advantage) pairs, added up one number after the other."""
    sums = dict.fromkeys(MEANS, 0.0)
    found, squares = [], 0.0
    for log_ratio, advantage in items:
        ratio = exp(log_ratio)
        below, above = bool(ratio < LOW), bool(ratio > HIGH)
        values = (
            -log_ratio,
            ratio - 1 - log_ratio,
            ratio * log_ratio,
            ratio * log_ratio - (ratio - 1),
            ratio,
            below,
            above,
            (above and advantage > 0) or (below and advantage < 0),
        )
        for name, value in zip(MEANS, values, strict=True):
            sums[name] += value
        found.append(ratio)
        squares += ratio * ratio
    count = len(items)
    return {
        **{name: float(total) / count for name, total in sums.items()},
        "ratio_min": float(min(found)),
        "ratio_max": float(max(found)),
        "effective_share": float(sums["ratio_mean"] ** 2 / squares / count),
    }


def as_items(pair: tuple[Datum, dict[str, TensorData]], number: Callable[[Any], Any]) -> list[Any]:
    datum, record = pair
    inputs = {name: tensor.tolist() for name, tensor in datum.loss_fn_inputs.items()}
    rows = zip(
        record["logprobs"].tolist(), inputs["logprobs"], inputs["advantages"], inputs["weights"], strict=True
    )
    return [(number(p) - number(q), advantage) for p, q, advantage, weight in rows if weight]


def kinds() -> list[Any]:
    numbers: list[Any] = [pytest.param(float, math.exp, id="float")]
    if importlib.util.find_spec("torch") is not None:
        import torch

        numbers.append(pytest.param(lambda x: torch.tensor(x, dtype=torch.float64), torch.exp, id="torch"))
    return numbers


@pytest.mark.parametrize(("number", "exp"), kinds())
@pytest.mark.parametrize("block", [1, 1 << 17])
def test_the_figures_are_those_of_a_loop(
    number: Callable[[Any], Any], exp: Callable[[Any], Any], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ratios, "_BLOCK", block)
    compared = 0
    for seed in range(CASES):
        pairs = random_pairs(seed)
        each = [as_items(pair, number) for pair in pairs]
        found = compare(*pairs)
        every = [item for items in each for item in items]
        whole = [(sum(log for log, _ in items), items[0][1]) for items in each if items]
        for items, figures in ((every, found.tokens), (whole, found.sequences)):
            assert figures.count == len(items)
            for name, value in (loop(items, exp) if items else {}).items():
                assert getattr(figures, name) == pytest.approx(value, rel=1e-6, abs=1e-12), (seed, name)
            ordered = np.array(sorted(float(exp(log)) for log, _ in items) or [math.nan])
            for at, value in figures.ratio_quantiles.items():
                assert value == pytest.approx(float(np.quantile(ordered, at)), rel=1e-6, nan_ok=True)
        assert found.by_sequence.tokens.tolist() == [len(items) for items in each]
        for index, items in enumerate(each):
            assert found.by_sequence.log_ratio[index] == pytest.approx(float(sum(log for log, _ in items)))
            values = loop(items, exp) if items else dict.fromkeys((*MEANS, "effective_share"), math.nan)
            for name, value in values.items():
                got = getattr(found.by_sequence, name)[index]
                assert got == pytest.approx(value, rel=1e-6, abs=1e-12, nan_ok=True), (seed, index, name)
                compared += 1
    assert compared > 10 * CASES


def test_small_differences_keep_their_digits() -> None:
    """The KL of models that are nearly equal is far below the rounding of `r - 1`."""
    q = np.full(4, -1.0, dtype=np.float32)
    p = np.nextafter(q, np.float32(0))
    apart = float(p[0]) - float(q[0])
    found = compare(one(p, q)).tokens
    assert found.kl_sampler_trainer_k3 == pytest.approx(apart**2 / 2, rel=1e-6)
    assert found.kl_trainer_sampler_k3 == pytest.approx(apart**2 / 2, rel=1e-6)


def test_the_estimates_are_those_of_the_divergence_between_two_distributions() -> None:
    rng = np.random.default_rng(3)
    sampler, trainer = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    drawn = rng.choice(3, 200_000, p=sampler)
    found = compare(one(np.log(trainer)[drawn], np.log(sampler)[drawn])).tokens
    there = float((sampler * np.log(sampler / trainer)).sum())
    back = float((trainer * np.log(trainer / sampler)).sum())
    assert found.kl_sampler_trainer_k1 == pytest.approx(there, abs=2e-3)
    assert found.kl_sampler_trainer_k3 == pytest.approx(there, abs=2e-3)
    assert found.kl_trainer_sampler_k1 == pytest.approx(back, abs=2e-3)
    assert found.kl_trainer_sampler_k3 == pytest.approx(back, abs=2e-3)
    assert found.ratio_mean == pytest.approx(1.0, abs=2e-3)


# ------------------------------------------------------------------------------------------- what counts


@pytest.mark.parametrize(
    ("inputs", "counted"),
    [
        ({}, [1, 2, 3]),
        ({"advantages": [0.0, 0.0, 0.0, 2.0]}, [1, 2, 3]),
        ({"advantages": [1.0, 1.0, 1.0, 1.0]}, [0, 1, 2, 3]),
        ({"weights": [1, 0, 0, 1]}, [0, 3]),
        ({"mask": [0.0, 1.0, 0.0, 0.0], "advantages": [1.0] * 4}, [1]),
        ({"sequence_ratio_mask": [0, 0, 1, 1]}, [2, 3]),
        ({"weights": [0, 0, 0, 0]}, []),
    ],
)
def test_which_tokens_count(inputs: dict[str, Any], counted: list[int]) -> None:
    p, q = np.array([-1.0, -2.0, -3.0, -4.0]), np.array([0.0, -1.0, -1.0, -1.0])
    found = compare(one(p, q, **inputs))
    assert found.by_sequence.tokens.tolist() == [len(counted)]
    assert found.by_sequence.log_ratio.tolist() == [float((p - q)[counted].sum())]


def test_provenance_names_the_sampled_tokens() -> None:
    datum, record = one([-1.0, -2.0, -3.0], [-1.0, 0.0, -1.0])
    prompt = PromptProvenanceSpan(sequence_id="s", length=1)
    sampled = SampledProvenanceSpan(sequence_id="s", length=2)
    marked = datum.with_provenance(model_input=[prompt, sampled], loss_fn_inputs=[prompt, sampled])
    assert compare((marked, record)).by_sequence.log_ratio.tolist() == [-4.0]


def test_tokens_that_are_not_finite_are_left_out_and_named() -> None:
    found = compare(one([-1.0, -math.inf, math.nan], [-1.0, -1.0, -1.0]), one([math.nan], [-1.0]))
    assert (found.not_finite, found.tokens.count, found.sequences.count) == (3, 1, 1)
    assert found.tokens.kl_sampler_trainer_k3 == 0.0
    assert "3 tokens" in found.advice[0]


def test_a_ratio_beyond_all_bounds_leaves_the_other_figures_finite() -> None:
    found = compare(one([-1.0, -1.0], [-1.0, -900.0]), one([-900.0], [-1.0]))
    assert all(math.isfinite(value) for value in found.metrics.values())
    assert found.sequences.effective_share == pytest.approx(0.5)
    assert found.by_sequence.effective_share.tolist() == pytest.approx([0.5, 1.0])


def test_a_batch_without_tokens_has_figures_that_are_not_numbers() -> None:
    for found in (compare(), compare(one([-1.0], [0.0]))):
        assert found.tokens.count == 0
        assert math.isnan(found.tokens.ratio_mean)
        assert found.advice == []
        assert str(found)


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("inputs", "record", "complaint"),
    [
        ({"logprobs": None}, {}, r"data\[0\].loss_fn_inputs\['logprobs'\]: is missing; data.from_samples"),
        ({"target_tokens": np.ones((2, 3))}, {}, r"\['target_tokens'\]: has shape \(2, 3\); .* one target"),
        ({}, {"logprobs": None}, r"outputs\[0\]: has no logprobs"),
        (
            {},
            {"logprobs": [-1.0]},
            r"outputs\[0\]\['logprobs'\]: has shape \(1,\), target_tokens have \(2,\)",
        ),
        ({"logprobs": [-1.0]}, {}, r"data\[0\].loss_fn_inputs\['logprobs'\]: has shape \(1,\)"),
        ({"advantages": [1.0]}, {}, r"\['advantages'\]: has shape \(1,\), target_tokens have \(2,\)"),
        ({"mask": [1.0]}, {}, r"\['mask'\]: has shape \(1,\)"),
    ],
)
def test_what_is_missing_is_named(inputs: dict[str, Any], record: dict[str, Any], complaint: str) -> None:
    given = {"target_tokens": [1, 2], "logprobs": [-1.0, -1.0], **inputs}
    datum = Datum(ModelInput.from_ints([1, 2]), {k: v for k, v in given.items() if v is not None})
    values = {"logprobs": [-1.0, -1.0], **record}
    tensors = {name: TensorData(each, "float32", [len(each)]) for name, each in values.items() if each}
    with pytest.raises(InvalidInputError, match=complaint):
        losses.divergence([datum], ForwardBackwardOutput("x", [tensors]))


def test_wrong_arguments_are_refused() -> None:
    datum, record = one([-1.0], [-1.0])
    with pytest.raises(InvalidInputError, match=r"clip_low=1\.5, clip_high=1\.2"):
        compare((datum, record), clip_low=1.5)
    with pytest.raises(InvalidInputError, match="2 outputs for 1 data"):
        losses.divergence([datum], ForwardBackwardOutput("x", [record, record]))
    with pytest.raises(InvalidInputError, match=r"got list; give future.result\(\)"):
        losses.divergence([datum], [record])  # type: ignore[arg-type]  # on purpose


# ------------------------------------------------------------------------------------- on a server, recorded


def test_stale_samples_diverge_and_the_explanation_says_so(tmp_path: Path) -> None:
    prompt = ModelInput.from_ints([40, 41, 42])
    with LocalServer(model="tinker-sync/tiny") as server, server.service() as service:
        training = service.create_lora_training_client("tinker-sync/tiny", rank=4, seed=1)
        sampling = training.save_weights_and_get_sampling_client()
        drawn = sampling.sample(prompt, 4, SamplingParams(max_tokens=8, seed=3)).result()
        batch = tinker_sync.data.from_samples(prompt, drawn, [1.0, 1.0, -1.0, -1.0])
        kl = []
        with service.explain() as recording, service.recorder(tmp_path) as recorder:
            for step in range(3):
                passed = training.forward_backward(batch, "importance_sampling")
                training.optim_step(AdamParams(learning_rate=5e-2))
                found = losses.divergence(batch, passed.result())
                recorder.log(step, passed, found)
                kl.append(found.tokens.kl_sampler_trainer_k3)
                if not step:
                    assert found.advice == []
                    assert not [line for line in recording.advice if "sampler" in line]
    assert kl[0] < 1e-8 < 0.01 < kl[2]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["divergence/kl_sampler_trainer_k3"] for line in lines] == kl
    assert lines[2]["divergence/count"] == found.tokens.count
    assert "divergence/sequence/ratio_p99" in lines[0]
    assert recording.advice[0].startswith("step 2, and 2 of 3 steps")
    assert "the sampler is not the trainer" in str(recording)
