"""Torch losses: results, errors, and equality with numpy and traced losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.custom_losses import PATIENCE_S, arrived, data, squares, weights_sent, world
from support.engine_models import VOCAB, busy_run, tiny_weights

from tinker_sync import types
from tinker_sync.errors import InvalidInputError
from tinker_sync.local.engine.losses import Csr, Example
from tinker_sync.local.engine.training import AdapterTrainer, LossOutput
from tinker_sync.losses import PPO, CrossEntropy, ImportanceSampling
from tinker_sync.losses.data import backward_data, forward_data, read_logprobs
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

    def test_loss_of_any_shape_with_one_number(self) -> None:
        found = make_evaluator(lambda data, p: ((p[0].sum() + p[1].sum()).reshape(1), {"a": p[0].sum()}))(
            [], LOGPROBS
        )
        assert (found.loss, found.metrics) == (-3.5, {"a": -3.0})
        assert [each.tolist() for each in found.gradients] == [[1.0, 1.0], [1.0]]

    def test_double_precision_loss(self) -> None:
        found = make_evaluator(lambda data, p: (torch.cat(p).double().sum(), {}))([], LOGPROBS)
        assert [each.dtype for each in found.gradients] == [np.dtype("float32")] * 2

    def test_loss_runs_under_no_grad(self) -> None:
        with world() as (_, trainer), torch.no_grad():
            future = trainer.forward_backward_custom(data(1), torch_squares)
            assert future.result(PATIENCE_S).metrics["loss:sum"] > 0


# ---------------------------------------------------------------------------------------- equal to the engine
class InTheEngine:
    """A trainer of the engine, used without a server and a client.

    `custom` runs the two passes of a custom loss as `forward_backward_custom` does. `built_in` runs a pass
    with a loss of the engine. Both return the loss.
    """

    def __init__(self) -> None:
        self.run: AdapterTrainer = busy_run(tiny_weights())

    def custom(self, given: list[types.Datum], loss: Any) -> float:
        output = self.run.forward(examples(forward_data(given)), "cross_entropy")
        evaluated = make_evaluator(loss)(given, read_logprobs(as_output(output), given))
        self.run.forward_backward(examples(backward_data(given, evaluated.gradients)), "cross_entropy")
        return evaluated.loss

    def built_in(self, given: list[types.Datum], name: str) -> float:
        return self.run.forward_backward(examples(given), name).metrics["loss:sum"]


def examples(given: list[types.Datum]) -> list[Example]:
    return [
        Example(
            np.array(datum.model_input.to_ints()),
            {name: as_input(tensor) for name, tensor in datum.loss_fn_inputs.items()},
        )
        for datum in given
    ]


def as_input(tensor: types.TensorData) -> Any:
    if tensor._crow is None:
        return tensor.to_numpy()
    return Csr(tensor._numpy, tensor._crow, tensor._col, tuple(tensor.shape))  # type: ignore[arg-type]


def as_output(output: LossOutput) -> types.ForwardBackwardOutput:
    records = [{"logprobs": types.TensorData.from_numpy(each)} for each in output.logprobs]
    return types.ForwardBackwardOutput("ArrayRecord", records, dict(output.metrics))


def given_data(layout: str, *, weights: bool = True) -> list[types.Datum]:
    rng = np.random.default_rng(5)
    made = []
    for index in range(4):
        length = 4 + 3 * index
        tokens = rng.integers(0, VOCAB, length + 1)
        inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
        if layout == "tokens":
            inputs["logprobs"] = -np.log(VOCAB) + rng.standard_normal(length) / 3
            inputs["advantages"] = rng.standard_normal(length)
        else:
            dense = rng.integers(1, VOCAB, (length, 6)) * (rng.random((length, 6)) < 0.2)
            shares = (rng.random((length, 6)) + 0.1) * (dense != 0)
            inputs["target_tokens"] = dense
            if layout == "sparse":
                inputs["target_tokens"] = types.TensorData.from_numpy_sparse(dense)
                assert inputs["target_tokens"].is_sparse
            if weights:
                inputs["weights"] = (
                    types.TensorData.from_numpy_sparse(shares) if layout == "sparse" else shares
                )
        made.append(types.Datum(types.ModelInput.from_ints(tokens[:-1].tolist()), inputs))
    return made


def read(datum: types.Datum, name: str) -> Any:
    return datum.loss_fn_inputs[name].to_torch()


def torch_cross_entropy(data: Any, logprobs: Any) -> Any:
    return sum(-(p * read(datum, "weights")).sum() for datum, p in zip(data, logprobs, strict=True)), {}


def torch_importance_sampling(data: Any, logprobs: Any) -> Any:
    pairs = zip(data, logprobs, strict=True)
    return sum(-((p - read(d, "logprobs")).exp() * read(d, "advantages")).sum() for d, p in pairs), {}


def torch_ppo(data: Any, logprobs: Any) -> Any:
    total = 0
    for datum, p in zip(data, logprobs, strict=True):
        ratio, advantages = (p - read(datum, "logprobs")).exp(), read(datum, "advantages")
        total = total - torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
    return total, {}


@pytest.mark.parametrize(
    ("name", "layout", "losses"),
    [
        ("cross_entropy", "dense", (torch_cross_entropy, CrossEntropy())),
        ("cross_entropy", "sparse", (torch_cross_entropy, CrossEntropy())),
        ("importance_sampling", "tokens", (torch_importance_sampling, ImportanceSampling())),
        ("ppo", "tokens", (torch_ppo, PPO())),
    ],
    ids=["dense", "sparse", "importance_sampling", "ppo"],
)
def test_gradients_match_the_engine(name: str, layout: str, losses: Any) -> None:
    given = given_data(layout)
    built_in = InTheEngine()
    expected = built_in.built_in(given, name)
    scale = np.abs(built_in.run.grads.flat).max()
    assert scale > 0.1
    for loss in losses:
        custom = InTheEngine()
        assert custom.custom(given, loss) == pytest.approx(expected, rel=1e-5)
        np.testing.assert_allclose(
            custom.run.grads.flat / scale, built_in.run.grads.flat / scale, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_missing_weights_count_every_token(layout: str) -> None:
    weighted, bare = given_data(layout), given_data(layout, weights=False)
    kept = [datum.loss_fn_inputs["weights"].to_numpy() for datum in weighted]

    def loss(data: Any, logprobs: Any) -> Any:
        assert [tuple(p.shape) for p in logprobs] == [each.shape for each in kept]
        return sum(-(p * torch.tensor(w)).sum() for p, w in zip(logprobs, kept, strict=True)), {}

    built_in, custom = InTheEngine(), InTheEngine()
    built_in.built_in(weighted, "cross_entropy")
    custom.custom(bare, loss)
    scale = np.abs(built_in.run.grads.flat).max()
    np.testing.assert_allclose(
        custom.run.grads.flat / scale, built_in.run.grads.flat / scale, rtol=0, atol=1e-5
    )


# ------------------------------------------------------------------------------------------ handles
def nll(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss, "custom/most:mean": logprobs.max()}


def test_traced_loss_runs_on_each_datum() -> None:
    handle = trace(nll, {"logprobs": 2, "weights": 2}, "session-1")
    given = given_data("sparse")
    built_in, custom = InTheEngine(), InTheEngine()
    expected = built_in.built_in(given, "cross_entropy")
    assert custom.custom(given, handle) == pytest.approx(expected, rel=1e-5)
    scale = np.abs(built_in.run.grads.flat).max()
    np.testing.assert_allclose(
        custom.run.grads.flat / scale, built_in.run.grads.flat / scale, rtol=0, atol=1e-5
    )


def test_traced_metrics_reduce_by_name() -> None:
    handle = trace(nll, {"logprobs": 1, "weights": 1}, "session-1")
    given = [
        types.Datum(types.ModelInput.from_ints([1] * n), {"target_tokens": [1] * n, "weights": [1.0] * n})
        for n in (2, 1)
    ]
    found = make_evaluator(handle)(given, LOGPROBS)
    assert found.metrics == {"custom/nll:sum": 3.5, "custom/most:mean": -0.75}
    assert found.loss == 3.5


def test_traced_loss_must_be_a_scalar() -> None:
    handle = trace(lambda logprobs: (logprobs, {}), {"logprobs": 1}, "session-1")
    given = given_data("tokens")[:1]
    with pytest.raises(InvalidInputError, match=r"a loss of shape \(2,\) for data\[0\]; return a scalar"):
        make_evaluator(handle)(given, LOGPROBS[:1])
