"""Trainers accumulate gradients, take steps, share base weights, and survive bad calls."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from support.engine_models import LOSS_CONFIGS, busy_run, example, examples, tiny_weights

from tinker_sync.local.engine.lora import ALPHA, LoraParams, LoraSettings
from tinker_sync.local.engine.losses import Example
from tinker_sync.local.engine.training import AdamSettings, AdapterTrainer


def test_gradients_accumulate_until_a_step_clears_them() -> None:
    data = examples("cross_entropy")
    once, twice = (busy_run(tiny_weights(dtype="float64")) for _ in range(2))
    once.forward_backward(data, "cross_entropy")
    twice.forward_backward(data[:2], "cross_entropy")
    twice.forward_backward(data[2:], "cross_entropy")
    np.testing.assert_allclose(twice.grads.flat, once.grads.flat, rtol=1e-10, atol=1e-14)
    assert twice.optim_step(AdamSettings()) == pytest.approx(float(np.linalg.norm(once.grads.flat)))
    assert not twice.grads.flat.any()
    assert twice.optim_step(AdamSettings()) == 0.0
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


def test_empty_data_gives_zero_loss() -> None:
    assert busy_run(tiny_weights()).forward_backward([], "cross_entropy").metrics == {"loss:sum": 0.0}


def test_equal_seeds_give_equal_adapters() -> None:
    weights = tiny_weights()
    runs = [AdapterTrainer(weights, LoraSettings(rank=4, seed=seed)) for seed in (1, 1, 2)]
    for run in runs:
        for _ in range(3):
            run.forward_backward(examples("cross_entropy"), "cross_entropy")
            run.optim_step(AdamSettings(learning_rate=0.01))
    assert runs[0].params.flat.tobytes() == runs[1].params.flat.tobytes()
    assert runs[0].params.flat.tobytes() != runs[2].params.flat.tobytes()


def test_trainers_share_read_only_weights() -> None:
    weights = tiny_weights()
    before = [array.copy() for array in weights.arrays()]
    one, two = (AdapterTrainer(weights, LoraSettings(rank=2, seed=seed)) for seed in (1, 2))
    untouched = two.params.flat.copy()
    one.forward_backward(examples("cross_entropy"), "cross_entropy")
    one.optim_step(AdamSettings(learning_rate=0.1))
    assert two.params.flat.tobytes() == untouched.tobytes()
    for array, old in zip(weights.arrays(), before, strict=True):
        assert array.tobytes() == old.tobytes()
    with pytest.raises(ValueError, match="read-only"):
        weights.embedding[0] = 1


@pytest.mark.parametrize("loss_fn", sorted(LOSS_CONFIGS))
def test_every_loss_can_be_trained(loss_fn: str) -> None:
    run = AdapterTrainer(tiny_weights(), LoraSettings(rank=4))
    rng = np.random.default_rng(0)
    data = [example(rng, 8, loss_fn) for _ in range(3)]
    if loss_fn != "cross_entropy":  # use this model's own logprobs: every ratio is one
        now = run.forward(data, loss_fn, LOSS_CONFIGS[loss_fn]).logprobs
        data = [
            Example(one.tokens, {**one.inputs, "logprobs": p, "advantages": np.ones(8, np.float32)})
            for one, p in zip(data, now, strict=True)
        ]
    before = run.forward(data, loss_fn, LOSS_CONFIGS[loss_fn])
    for _ in range(3):
        run.forward_backward(data, loss_fn, LOSS_CONFIGS[loss_fn])
        run.optim_step(AdamSettings(learning_rate=0.003))
    after = run.forward(data, loss_fn, LOSS_CONFIGS[loss_fn])
    assert sum(p.sum() for p in after.logprobs) > sum(p.sum() for p in before.logprobs)


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


def test_named_views_cover_every_number_once() -> None:
    params = LoraParams.zeros(tiny_weights().config, LoraSettings(rank=3))
    for array in params.named().values():
        array += 1
    assert (params.flat == 1).all()
    assert LoraSettings(rank=3).scale == ALPHA / 3


def test_a_restored_trainer_continues_identically() -> None:
    weights, settings = tiny_weights(), AdamSettings(learning_rate=0.01)
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


def test_a_non_finite_adapter_has_no_snapshot() -> None:
    run = busy_run(tiny_weights())
    run.params.flat[7] = np.inf
    with pytest.raises(ValueError, match="adapter: not all of its numbers are finite"):
        run.params.snapshot()


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
