"""Torch losses: requests, results and errors; `test_embedded` compares what they train with the server's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.custom_losses import PATIENCE_S, arrived, data, squares, weights_sent, world

from tinker_sync import types
from tinker_sync.errors import InvalidInputError
from tinker_sync.losses.evaluate import make_evaluator

torch = pytest.importorskip("torch")

from tinker_sync.losses.create import trace  # noqa: E402

LOGPROBS = [np.array([-1.0, -2.0]), np.array([-0.5])]


def torch_squares(data: Any, logprobs: Any) -> Any:
    loss = sum((each * each).sum() for each in logprobs)
    return loss, {"squares:mean": loss.detach() / len(data)}


def test_requests_match_those_of_numpy() -> None:
    outputs = []
    for loss in (torch_squares, squares):
        with world() as (stub, trainer):
            outputs.append(trainer.forward_backward_custom(data(2), loss).result(PATIENCE_S))
            assert arrived(stub) == ["1 forward", "2 backward"]
            assert weights_sent(stub, 2) == [pytest.approx([0.02, 0.04]), pytest.approx([0.04, 0.06])]
    one, other = outputs
    assert {type(value) for value in one.metrics.values()} == {float}
    assert one.metrics == pytest.approx(other.metrics, rel=1e-6)


class TestResults:
    @pytest.mark.parametrize(
        ("loss", "complaint"),
        [
            (lambda data, p: p[0].sum(), r"<lambda> returned a Tensor; a torch loss returns \(loss"),
            (
                lambda data, p: (p[0].sum(), {}, []),
                "a tuple of 3; .*Mark a numpy loss, .* with tinker_sync.losses.numpy_loss",
            ),
            (
                lambda data, p: (p[0] * 2, {}),
                r"a Tensor of shape \(2,\) as its loss; return a tensor of one number",
            ),
            (lambda data, p: (1.0, {}), "a float as its loss"),
            (lambda data, p: (torch.log(p[0] - 9).sum() + p[1].sum(), {}), "a loss of nan; look for"),
            (
                lambda data, p: (torch.tensor(1.0), {}),
                "does not depend on the log-probabilities, so there is no",
            ),
            (
                lambda data, p: (p[0].detach().sum(), {}),
                r"without detach\(\), item\(\) or numpy\(\) on the way",
            ),
            (lambda data, p: (p[0].sum(), {}), r"no gradient for data\[1\]; leave the datum out, or add 0.0"),
            (
                lambda data, p: (torch.sqrt(p[0] + 1).nansum() + p[1].sum(), {}),
                r"derivative by logprobs\[0\]\[0\]: inf is not a finite float32",
            ),
            (lambda data, p: (p[0].sum() + p[1].sum(), None), "None as metrics"),
            (
                lambda data, p: (p[0].sum() + p[1].sum(), {"a": p[0]}),
                r"metrics\['a'\]: has shape \(2,\); reduce it to one number",
            ),
        ],
    )
    def test_wrong_results_are_explained(self, loss: Any, complaint: str) -> None:
        with pytest.raises(InvalidInputError, match=complaint):
            make_evaluator(loss)([], [each.copy() for each in LOGPROBS])

    def test_loss_runs_under_no_grad(self) -> None:
        with world() as (_, trainer), torch.no_grad():
            future = trainer.forward_backward_custom(data(1), torch_squares)
            assert future.result(PATIENCE_S).metrics["loss:sum"] > 0


# ------------------------------------------------------------------------------------------ handles
def nll(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss, "custom/most:mean": logprobs.max()}


def test_traced_metrics_reduce_by_name() -> None:
    handle = trace(nll, {"logprobs": 1, "weights": 1}, "session-1")
    given = [
        types.Datum(types.ModelInput.from_ints([1] * n), {"target_tokens": [1] * n, "weights": [1.0] * n})
        for n in (2, 1)
    ]
    found = make_evaluator(handle)(given, LOGPROBS)
    assert found.metrics == {"custom/nll:sum": 3.5, "custom/most:mean": -0.75}
    assert found.loss == 3.5
