"""The gradients of the engine match finite differences of the loss, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from support.engine_models import LOSS_CONFIGS, SHAPES, VOCAB, busy_run, examples, tiny_weights

from tinker_sync.local.engine import decoder, training
from tinker_sync.local.engine.lora import adapter_targets
from tinker_sync.local.engine.losses import Example, check_example, complete_config, find_rule
from tinker_sync.local.engine.training import AdapterTrainer

STEP = 1e-5


@dataclass
class Differences:
    """Finite differences of a trainer's loss: `slope` is the difference quotient for one parameter."""

    run: AdapterTrainer
    data: list[Example]
    loss_fn: str

    def loss(self) -> float:
        config = LOSS_CONFIGS[self.loss_fn]
        return self.run.forward(self.data, self.loss_fn, config).metrics["loss:sum"]

    def slope(self, place: int) -> float:
        flat, middle = self.run.params.flat, self.run.params.flat[place]
        flat[place] = middle + STEP
        above = self.loss()
        flat[place] = middle - STEP
        below = self.loss()
        flat[place] = middle
        return (above - below) / (2 * STEP)


def compare(
    run: AdapterTrainer,
    data: list[Example],
    loss_fn: str = "cross_entropy",
    *,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    seed: int = 7,
) -> None:
    """Compare the gradients of twelve random parameters of a run with finite differences of the loss."""
    places = np.random.default_rng(seed).integers(0, len(run.params.flat), 12)
    differences = Differences(run, data, loss_fn)
    expected = [differences.slope(int(place)) for place in places]
    np.testing.assert_allclose(run.grads.flat[places], expected, rtol=rtol, atol=atol)


def places_of_every_kind(run: AdapterTrainer, each: int) -> list[int]:
    """Return the positions of `each` random parameters of every matrix of the adapter."""
    rng = np.random.default_rng(5)
    marks = AdapterTrainer(run.weights, run.params.settings).params
    marks.flat[:] = np.arange(len(marks.flat))
    chosen = [rng.choice(array.reshape(-1), each, replace=False) for array in marks.named().values()]
    return np.concatenate(chosen).astype(int).tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_every_matrix(shape: str) -> None:
    run = busy_run(tiny_weights(shape, dtype="float64"))
    data = examples("cross_entropy")
    run.forward_backward(data, "cross_entropy")
    places = places_of_every_kind(run, 2)
    names = {
        name for target in adapter_targets(run.weights.config, run.params.settings) for name in target.names
    }
    assert len(places) == 2 * 2 * len(names) == 60
    differences = Differences(run, data, "cross_entropy")
    expected = [differences.slope(place) for place in places]
    assert max(map(abs, expected)) > 0.1
    np.testing.assert_allclose(run.grads.flat[places], expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("loss_fn", sorted(LOSS_CONFIGS.keys() - {"cispo", "gspo", "stable_reinforce"}))
def test_gradients_of_every_loss(loss_fn: str) -> None:
    run = busy_run(tiny_weights(dtype="float64"))
    data = examples(loss_fn)
    run.forward_backward(data, loss_fn, LOSS_CONFIGS[loss_fn])
    compare(run, data, loss_fn, rtol=1e-4, atol=1e-7, seed=6)


# These losses stop some gradients, which finite differences ignore. So the test uses a linear loss with the
# same
# slopes.
@pytest.mark.parametrize("loss_fn", ["cispo", "gspo", "stable_reinforce"])
def test_gradients_of_losses_that_stop_gradients(loss_fn: str) -> None:
    run, config = busy_run(tiny_weights(dtype="float64")), complete_config(loss_fn, LOSS_CONFIGS[loss_fn])
    data = examples(loss_fn)
    at = run.forward_backward(data, loss_fn, config).logprobs
    held = [
        check_example(one, loss_fn, VOCAB).term(find_rule(loss_fn), p, config).slope[:, 0]
        for one, p in zip(data, at, strict=True)
    ]
    assert any((slope == 0).any() for slope in held) == (loss_fn == "gspo")
    linear = [
        Example(one.tokens, {"target_tokens": one.inputs["target_tokens"], "weights": -slope})
        for one, slope in zip(data, held, strict=True)
    ]
    compare(run, linear, rtol=1e-4, atol=1e-6, seed=9)


def test_gradients_with_several_candidates() -> None:
    rng = np.random.default_rng(8)
    tokens, targets_ = rng.integers(0, VOCAB, 7), rng.integers(0, VOCAB, (7, 3))
    targets_[2] = 4  # one candidate three times
    data = [
        Example(tokens, {"target_tokens": targets_, "weights": rng.random((7, 3))}),
        *examples("cross_entropy", (7, 12)),
    ]
    run = busy_run(tiny_weights(dtype="float64"))
    run.forward_backward(data, "cross_entropy")
    compare(run, data)


def test_gradients_do_not_depend_on_blocks_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    data = examples("cross_entropy", (70, 3, 41, 70))
    run = busy_run(tiny_weights(dtype="float64"))
    at_once = run.forward_backward(data, "cross_entropy")
    whole = run.grads.flat.copy()
    run.grads.flat[:] = 0
    monkeypatch.setattr(decoder, "TRAIN_BLOCK", 16)
    monkeypatch.setattr(training, "BATCH_ROWS", 80)
    monkeypatch.setattr(decoder, "BLOCK_CELLS", 10 * VOCAB)
    monkeypatch.setattr(decoder, "KEPT_CELLS", 0)
    in_pieces = run.forward_backward(data, "cross_entropy")
    assert in_pieces.metrics["loss:sum"] == pytest.approx(at_once.metrics["loss:sum"], rel=1e-12)
    np.testing.assert_allclose(run.grads.flat, whole, rtol=1e-9, atol=1e-12)
