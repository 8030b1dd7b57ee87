"""`forward_custom`, the mean of the loss, and inputs that only custom losses read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tinker_sync
from tinker_sync import Datum, ModelInput
from tinker_sync.losses import DPO, CrossEntropy, dpo_pairs, numpy_loss, with_reference
from tinker_sync.testing import LocalServer
from tinker_sync.types.datum import count_trained

PATIENCE_S = 120.0


def datum(first: int, **inputs: Any) -> Datum:
    return Datum(ModelInput.from_ints([first, 2, 3]), {"target_tokens": [2, 3, 4], **inputs})


@pytest.fixture
def training() -> Any:
    with (
        LocalServer(model="tinker-sync/random", fwdbwd_max_chunk_len=2) as server,
        server.service() as service,
    ):
        yield service.create_lora_training_client("tinker-sync/random", rank=4, seed=1)


def test_a_custom_loss_is_evaluated_and_nothing_is_trained(training: Any) -> None:
    data = [datum(1, weights=[0, 1, 1]), datum(5)]
    theirs = training.forward(data, "cross_entropy").result(PATIENCE_S)
    ours = training.forward_custom(data, CrossEntropy()).result(PATIENCE_S)
    assert ours.metrics["loss:sum"] == pytest.approx(theirs.metrics["loss:sum"], rel=1e-5)
    assert ours.metrics["loss:mean"] == pytest.approx(ours.metrics["loss:sum"] / 5)
    assert "surrogate_loss:sum" not in ours.metrics
    for one, other in zip(ours.loss_fn_outputs, theirs.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(one["logprobs"].to_numpy(), other["logprobs"].to_numpy(), rtol=1e-6)
    # A backward pass would have left gradients for this step.
    training.optim_step(tinker_sync.AdamParams(learning_rate=1.0)).result(PATIENCE_S)
    again = training.forward(data, "cross_entropy").result(PATIENCE_S)
    assert again.metrics["loss:sum"] == theirs.metrics["loss:sum"]


def test_what_the_loss_raises_belongs_to_the_future(training: Any) -> None:
    @numpy_loss
    def broken(data: Any, logprobs: Any) -> Any:
        raise ZeroDivisionError("mine")

    future = training.forward_custom([datum(1)], broken)
    with pytest.raises(ZeroDivisionError, match="mine"):
        future.result(PATIENCE_S)
    assert training.forward([datum(1)], "cross_entropy").result(PATIENCE_S).metrics["loss:sum"] > 0


def test_the_mean_counts_tokens_over_all_chunks(training: Any) -> None:
    data = [datum(1, weights=[0, 0, 1]), datum(5, weights=[0, 0.5, 1]), datum(7)]  # two requests
    metrics = training.forward(data, "cross_entropy").result(PATIENCE_S).metrics
    assert metrics["loss:mean"] == metrics["loss:sum"] / 6
    one = training.forward_backward(data[:1], "cross_entropy").result(PATIENCE_S).metrics
    assert one["loss:mean"] == one["loss:sum"]
    sampled = datum(1, logprobs=[0, -1, -1], advantages=[0, 0.5, -1])
    metrics = training.forward_backward([sampled], "importance_sampling").result(PATIENCE_S).metrics
    assert metrics["loss:mean"] == metrics["loss:sum"] / 2
    metrics = training.forward_backward_custom(data[:1], CrossEntropy()).result(PATIENCE_S).metrics
    assert metrics["loss:mean"] == metrics["loss:sum"]


@pytest.mark.parametrize(
    ("inputs", "count"),
    [
        ({"target_tokens": [2, 3, 4]}, 3),
        ({"target_tokens": [[2, 3], [3, 4], [4, 5]], "weights": [[0, 0], [1, 0], [1, 1]]}, 2),
        ({"target_tokens": [[2], [3], [4]], "weights": [[0], [1], [1]]}, 2),
        ({"target_tokens": [2, 3, 4], "weights": [0, 0, 0]}, 0),
        ({}, 0),
    ],
)
def test_tokens_that_count(inputs: Any, count: int) -> None:
    assert count_trained([Datum(ModelInput.from_ints([1, 2, 3]), inputs)]) == count


def test_the_reference_of_a_custom_loss_is_not_sent(training: Any) -> None:
    pairs = dpo_pairs([datum(1, weights=[0, 1, 1])], [datum(1, weights=[0, 1, 1])])
    referred = with_reference(pairs, training.forward(pairs, "cross_entropy").result(PATIENCE_S))
    loss = training.forward(referred, "cross_entropy").result(PATIENCE_S).metrics["loss:sum"]
    assert training.forward_backward(referred, "cross_entropy").result(PATIENCE_S).metrics["loss:sum"] == loss
    assert training.forward_custom(referred, DPO()).result(PATIENCE_S).metrics["loss:sum"] > 0
    assert "reference_logprobs" in referred[0].loss_fn_inputs
