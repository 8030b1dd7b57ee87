"""Trainers accumulate gradients, take steps, share base weights, and survive bad calls."""

from __future__ import annotations

import copy
import math
import sys

import numpy as np
import pytest
from support.engine_models import busy_run, examples, tiny_weights

from tinker_sync.local.engine.custom_graph import compile_custom_loss
from tinker_sync.local.engine.lora import LoraSettings
from tinker_sync.local.engine.losses import Example
from tinker_sync.local.engine.training import AdamState, AdapterTrainer
from tinker_sync.types import AdamParams, CustomLossGraph


def test_gradients_accumulate_until_a_step_clears_them() -> None:
    data = examples("cross_entropy")
    once, twice = (busy_run(tiny_weights(dtype="float64")) for _ in range(2))
    once.forward_backward(data, "cross_entropy")
    twice.forward_backward(data[:2], "cross_entropy")
    twice.forward_backward(data[2:], "cross_entropy")
    np.testing.assert_allclose(twice.grads.flat, once.grads.flat, rtol=1e-10, atol=1e-14)
    assert twice.optim_step(AdamParams()) == pytest.approx(float(np.linalg.norm(once.grads.flat)))
    assert not twice.grads.flat.any()
    assert twice.optim_step(AdamParams()) == 0.0
    assert twice.optimizer.steps == 2


def test_forward_gives_the_same_output_without_gradients() -> None:
    run, data = busy_run(tiny_weights()), examples("ppo")
    scored = run.forward(data, "ppo")
    assert not run.grads.flat.any()
    learned = run.forward_backward(data, "ppo")
    assert scored.metrics == learned.metrics
    for one, two in zip(scored.logprobs, learned.logprobs, strict=True):
        assert one.tolist() == two.tolist()


def test_outputs_follow_the_order_of_the_data() -> None:
    run, data = busy_run(tiny_weights()), examples("cross_entropy", (3, 20, 9, 20, 1))
    together = run.forward(data, "cross_entropy")
    alone = [run.forward([one], "cross_entropy") for one in data]
    assert [len(p) for p in together.logprobs] == [3, 20, 9, 20, 1]
    for one, two in zip(together.logprobs, alone, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, two.logprobs[0], rtol=1e-5, atol=1e-6)
    total = sum(one.metrics["loss:sum"] for one in alone)
    assert together.metrics["loss:sum"] == pytest.approx(total, rel=1e-6)


def test_a_new_adapter_has_no_effect() -> None:
    weights = tiny_weights()
    run = AdapterTrainer(weights, LoraSettings(rank=4))
    named = run.params.named()
    assert not any(array.any() for name, array in named.items() if name.endswith("lora_B"))
    a = named["model.layers.1.mlp.down_proj.lora_A"]
    assert a.shape == (4, 20)
    assert 0.8 / np.sqrt(20) < np.abs(a).max() <= 1 / np.sqrt(20)
    other = AdapterTrainer(weights, LoraSettings(rank=1, seed=9))
    data = examples("cross_entropy")
    assert run.forward(data, "cross_entropy").metrics == other.forward(data, "cross_entropy").metrics


def test_a_restored_trainer_continues_identically() -> None:
    weights, settings = tiny_weights(), AdamParams(learning_rate=0.01)
    data = examples("cross_entropy")
    one = AdapterTrainer(weights, LoraSettings(rank=2))
    one.forward_backward(data, "cross_entropy")
    one.optim_step(settings)
    two, fresh = (AdapterTrainer(weights, LoraSettings(rank=2, seed=5)) for _ in range(2))
    two.forward_backward(data, "cross_entropy")
    two.restore(one.params.flat.copy(), copy.deepcopy(one.optimizer))
    fresh.restore(one.params.flat)
    for run in (one, two, fresh):
        run.forward_backward(data, "cross_entropy")
        run.optim_step(settings)
    assert one.params.flat.tobytes() == two.params.flat.tobytes()
    assert one.params.flat.tobytes() != fresh.params.flat.tobytes()
    assert (one.optimizer.steps, two.optimizer.steps, fresh.optimizer.steps) == (2, 2, 1)
    with pytest.raises(ValueError, match="flat: expected shape"):
        two.restore(np.zeros(3))
    assert one.params.flat.tobytes() == two.params.flat.tobytes()


def test_a_bad_datum_changes_nothing() -> None:
    run = busy_run(tiny_weights())
    data = examples("cross_entropy")
    bad = Example(data[0].tokens + 100, data[0].inputs)
    with pytest.raises(ValueError, match=r"^data\[4\]\.model_input: a token id lies outside"):
        run.forward_backward([*data, bad], "cross_entropy")
    assert not run.grads.flat.any()


def test_infinite_ratios_are_refused_and_keep_earlier_gradients() -> None:
    run = busy_run(tiny_weights())
    run.forward_backward(examples("ppo"), "ppo")
    before = run.grads.flat.copy()
    far = examples("importance_sampling", (5,))[0]
    far = Example(far.tokens, {**far.inputs, "logprobs": np.full(5, -500.0), "advantages": np.ones(5)})
    with pytest.raises(ValueError, match="too far from the model's"):
        run.forward_backward([far], "importance_sampling")
    assert run.grads.flat.tobytes() == before.tobytes()


def by_hand(weight: float, grads: list[float], settings: AdamParams) -> float:
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
        AdamParams(learning_rate=0.1),
        AdamParams(learning_rate=0.1, weight_decay=0.3),
        AdamParams(learning_rate=0.1, beta1=0.5, beta2=0.999, eps=0.1),
        AdamParams(learning_rate=0.1, beta1=0.0, beta2=0.0),
    ],
)
def test_steps_match_the_scalar_implementation(settings: AdamParams) -> None:
    start, grads = [1.0, -2.0, 0.5], [[0.5, -1.0, 0.0], [0.1, 3.0, 0.0], [0.0, 0.0, 2.0], [-0.2, 1.0, 1.0]]
    weights = np.array(start)
    state = AdamState.start(weights)
    for row in grads:
        state.step(weights, np.array(row), settings)
    expected = [by_hand(start[i], [row[i] for row in grads], settings) for i in range(3)]
    np.testing.assert_allclose(weights, expected, rtol=1e-12)
    assert state.steps == 4


def test_clipping_uses_and_returns_the_total_norm() -> None:
    settings = AdamParams(learning_rate=0.1, grad_clip_norm=1.0, beta1=0.0, beta2=0.0, eps=1.0)
    weights = np.zeros(2)
    assert AdamState.start(weights).step(weights, np.array([3.0, 4.0]), settings) == pytest.approx(5.0)
    np.testing.assert_allclose(weights, [-0.1 * 0.6 / 1.6, -0.1 * 0.8 / 1.8], rtol=1e-6)
    small = np.zeros(2)
    AdamState.start(small).step(small, np.array([0.3, 0.4]), settings)
    np.testing.assert_allclose(small, [-0.1 * 0.3 / 1.3, -0.1 * 0.4 / 1.4], rtol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradients_change_nothing(bad: float) -> None:
    weights = np.ones(2)
    state = AdamState.start(weights)
    with pytest.raises(ValueError, match="gradients: not all"):
        state.step(weights, np.array([1.0, bad]), AdamParams())
    assert (weights.tolist(), state.steps, state.first.tolist()) == ([1.0, 1.0], 0, [0.0, 0.0])


@pytest.mark.parametrize(
    ("field", "value"),
    [("learning_rate", -1.0), ("eps", math.nan), ("weight_decay", math.inf), ("beta1", 1.0), ("beta2", -0.1)],
)
def test_bad_settings_are_refused(field: str, value: float) -> None:
    state = AdamState.start(np.ones(2))
    with pytest.raises(ValueError, match=f"^{field}: must be"):
        state.step(np.ones(2), np.ones(2), AdamParams(**{field: value}))


def test_a_non_finite_adapter_has_no_snapshot() -> None:
    run = busy_run(tiny_weights())
    run.params.flat[7] = np.inf
    with pytest.raises(ValueError, match="adapter: not all of its numbers are finite"):
        run.params.snapshot()


def test_too_long_sequences_are_refused() -> None:
    run = busy_run(tiny_weights())
    object.__setattr__(run.weights.config, "max_positions", 8)
    with pytest.raises(ValueError, match=r"^data\[1\]\.model_input: 9 tokens, the model takes 8"):
        run.forward(examples("cross_entropy", (8, 9)), "cross_entropy")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"rank": 0}, "rank: must be at least 1"),
        ({"rank": 1, "train_attn": False, "train_mlp": False, "train_unembed": False}, "at least one must"),
    ],
)
def test_bad_adapter_settings_are_refused(settings: dict[str, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        LoraSettings(**settings)


def test_the_error_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match=r"need torch on this server: pip install torch"):
        compile_custom_loss([], CustomLossGraph(nodes=[]))
