"""Uploaded losses match torch's own results, and calls outside the allowed list are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.engine_models import VOCAB, busy_run, tiny_weights

from tinker_sync.local.engine.custom_graph import compile_custom_loss, compile_rule
from tinker_sync.local.engine.losses import Example, Listed
from tinker_sync.types import CustomLossGraph, CustomLossInput, CustomLossNode

torch = pytest.importorskip("torch")

from support.traced_losses import RANKS, inputs_for, nll, ppo, smoothed  # noqa: E402

from tinker_sync.losses.create import encode_graph, trace  # noqa: E402


def uploaded(fn: Any, ranks: dict[str, int]) -> tuple[list[CustomLossInput], CustomLossGraph]:
    """Return the inputs and the graph of a loss function, as a client uploads them."""
    handle = trace(fn, ranks, "session-1")
    return list(handle.inputs), encode_graph(handle.name, handle.graph)


@pytest.mark.parametrize("fn", RANKS, ids=lambda fn: fn.__name__)
def test_values_and_derivatives_match_torch(fn: Any) -> None:
    rule = compile_rule(*uploaded(fn, RANKS[fn]))
    for seed in range(3):
        given = inputs_for(RANKS[fn], 7, seed)
        leaf = torch.tensor(given["logprobs"], requires_grad=True)
        loss, metrics = fn(leaf, *(torch.tensor(given[name]) for name in list(RANKS[fn])[1:]))
        loss.backward()
        term = rule.compute(given["logprobs"].astype(np.float64), given, {})
        assert term.loss == pytest.approx(float(loss.detach()), rel=1e-6)
        np.testing.assert_allclose(term.slope, leaf.grad.numpy(), rtol=1e-6, atol=1e-7)
        assert term.metrics == pytest.approx(
            {name: float(each.detach()) for name, each in metrics.items()}, rel=1e-6
        )


def data(names: dict[str, str], count: int = 5) -> list[Example]:
    """Make `count` data of different lengths.

    `names` maps the name of each input to that of its array: "old", "advantages" or "weights".
    """
    rng = np.random.default_rng(7)
    made = []
    for index in range(count):
        length = 3 + 4 * index
        tokens = rng.integers(0, VOCAB, length + 1)
        arrays = {
            "old": (-np.log(VOCAB) + rng.standard_normal(length) / 3).astype(np.float32),
            "advantages": rng.standard_normal(length).astype(np.float32),
            "weights": rng.random(length).astype(np.float32),
        }
        inputs = {name: arrays[source] for name, source in names.items()}
        made.append(Example(tokens[:-1], {"target_tokens": tokens[1:], **inputs}))
    return made


@pytest.mark.parametrize(
    ("fn", "built_in", "renamed"),
    [
        (nll, "cross_entropy", {"weights": "weights"}),
        (ppo, "ppo", {"old": "logprobs", "advantages": "advantages"}),
    ],
    ids=["cross_entropy", "ppo"],
)
def test_an_uploaded_loss_matches_the_built_in_one(fn: Any, built_in: str, renamed: dict[str, str]) -> None:
    weights = tiny_weights()
    ours, theirs = busy_run(weights), busy_run(weights)
    known = data({name: {"logprobs": "old"}.get(name, name) for name in renamed.values()})
    mine = data({name: name for name in renamed})
    expected = theirs.forward_backward(known, built_in)
    output = compile_custom_loss(*uploaded(fn, RANKS[fn]))(ours, mine, backward=True)
    assert output.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    scale = np.abs(theirs.grads.flat).max()
    np.testing.assert_allclose(ours.grads.flat / scale, theirs.grads.flat / scale, atol=1e-5)
    assert scale > 0.1
    for one, other in zip(output.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_forward_pass_has_metrics_and_no_gradients() -> None:
    run = busy_run(tiny_weights())
    inputs, graph = uploaded(ppo, RANKS[ppo])
    given = data({"old": "old", "advantages": "advantages"})
    output = compile_custom_loss(inputs, graph)(run, given, backward=False)
    assert not run.grads.flat.any()
    assert set(output.metrics) == {"loss:sum", "custom/clipped/fraction:mean"}
    rule = compile_rule(inputs, graph)
    each = [
        rule.compute(p.astype(np.float64), dict(one.inputs), {}).metrics  # type: ignore[arg-type]
        for p, one in zip(output.logprobs, given, strict=True)
    ]
    mean = sum(one["custom/clipped/fraction:mean"] for one in each) / len(each)
    assert output.metrics["custom/clipped/fraction:mean"] == pytest.approx(mean)
    assert 0 < mean < 1


def test_several_candidates_and_sparse_targets() -> None:
    run, sparse = busy_run(tiny_weights()), busy_run(tiny_weights())
    targets = np.array([[3, 4, 5], [6, 7, 8]])
    tokens = np.array([1, 2])
    whole = compile_custom_loss(*uploaded(smoothed, RANKS[smoothed]))
    dense = whole(run, [Example(tokens, {"target_tokens": targets})], backward=True)
    assert dense.logprobs[0].shape == (2, 3)
    every = Listed(targets, np.ones(targets.shape, bool))
    listed = whole(sparse, [Example(tokens, {"target_tokens": every})], backward=True)
    np.testing.assert_allclose(listed.logprobs[0], dense.logprobs[0], atol=1e-6)
    np.testing.assert_allclose(sparse.grads.flat, run.grads.flat, atol=1e-6)
    with pytest.raises(ValueError, match="takes rank 2, got shape"):
        whole(run, [Example(tokens, {"target_tokens": targets[:, 0]})], backward=True)


def test_extra_inputs_are_ignored_and_bad_ones_refused() -> None:
    run = busy_run(tiny_weights())
    rule = compile_custom_loss(*uploaded(nll, RANKS[nll]))
    tokens, targets = np.array([1, 2]), np.array([2, 3])
    good = {"target_tokens": targets, "weights": np.array([1.0, 2.0]), "reward": np.array(3.0)}
    rule(run, [Example(tokens, good)], backward=True)
    with pytest.raises(ValueError, match=r"data\[0\].weights: custom needs it"):
        rule(run, [Example(tokens, {"target_tokens": targets})], backward=True)
    bad = {**good, "weights": np.ones((1, 2))}
    with pytest.raises(ValueError, match=r"data\[1\].weights: the loss takes rank 1, got shape \(1, 2\)"):
        rule(run, [Example(tokens, good), Example(tokens, bad)], backward=True)
    with pytest.raises(ValueError, match=r"custom loss: graph.nodes\[2\] \(operator.mul\): .*size"):
        rule(run, [Example(tokens, {**good, "weights": np.ones(3)})], backward=True)


def test_non_finite_values_leave_no_gradients() -> None:
    def logarithm(logprobs: Any) -> Any:
        return torch.log(logprobs).sum(), {}

    run = busy_run(tiny_weights())
    rule = compile_custom_loss(*uploaded(logarithm, {"logprobs": 1}))
    with pytest.raises(ValueError, match="not finite"):
        rule(run, [Example(np.array([1]), {"target_tokens": np.array([2])})], backward=True)
    assert not run.grads.flat.any()

    def kinked(logprobs: Any) -> Any:
        return torch.sqrt(logprobs * 0).sum(), {}

    rule = compile_custom_loss(*uploaded(kinked, {"logprobs": 1}))
    with pytest.raises(ValueError, match="one of its derivatives is not finite"):
        rule(run, [Example(np.array([1]), {"target_tokens": np.array([2])})], backward=True)
    assert not run.grads.flat.any()


def test_losses_and_metrics_must_be_scalars() -> None:
    run = busy_run(tiny_weights())
    example = [Example(np.array([1]), {"target_tokens": np.array([2])})]
    rule = compile_custom_loss(*uploaded(lambda logprobs: (logprobs, {}), {"logprobs": 1}))
    with pytest.raises(ValueError, match=r"its value must be a scalar tensor, got shape \(1,\)"):
        rule(run, example, backward=True)
    rule = compile_custom_loss(
        *uploaded(lambda logprobs: (logprobs.sum(), {"custom/p:sum": logprobs}), {"logprobs": 1})
    )
    with pytest.raises(ValueError, match=r"metric custom/p:sum must be a scalar tensor, got shape \(1,\)"):
        rule(run, example, backward=True)


# ------------------------------------------------------------------------------------------ refusals
def graph_of(op: str, target: str, args: list[Any] | None = None, **kwargs: Any) -> CustomLossGraph:
    """Make the graph of a loss with a single call, of `target`."""
    return CustomLossGraph(
        nodes=[
            CustomLossNode(op="placeholder", name="logprobs", target="logprobs"),
            CustomLossNode(
                op=op,  # type: ignore[arg-type]
                name="x",
                target=target,
                args=[{"ref": "logprobs"}] if args is None else args,
                kwargs=kwargs,
            ),
            CustomLossNode(
                op="output", name="output", target="output", args=[{"tuple": [{"ref": "x"}, {"dict": {}}]}]
            ),
        ]
    )


LOGPROBS = [CustomLossInput(name="logprobs", rank=1)]


@pytest.mark.parametrize(
    ("op", "target"),
    [
        ("call_function", "torch.load"), ("call_function", "torch.save"),
        ("call_function", "torch.rand_like"), ("call_function", "torch.nn.functional.dropout"),
        ("call_function", "torch.utils.cpp_extension.load"), ("call_function", "torch.ops.aten.add"),
        ("call_function", "torch.hub.load"), ("call_function", "torch.nn.functional.torch.exp"),
        ("call_function", "os.system"), ("call_function", "builtins.eval"), ("call_function", "eval"),
        ("call_function", "operator.attrgetter"), ("call_function", "operator.methodcaller"),
        ("call_function", "operator.setitem"), ("call_function", "math.factorial"), ("call_function", ""),
        ("call_method", "backward"), ("call_method", "item"), ("call_method", "numpy"),
        ("call_method", "tolist"), ("call_method", "uniform_"), ("call_method", "register_hook"),
        ("call_method", "apply_"), ("call_method", "__reduce__"), ("call_method", "cuda"),
        ("call_method", "no_such_method"), ("call_module", "linear"), ("get_attr", "weight"),
    ],
)  # fmt: skip
def test_calls_outside_the_list_are_refused_at_upload(op: str, target: str) -> None:
    with pytest.raises(ValueError, match=r"graph.nodes\[1\] .*not computed by this server"):
        compile_custom_loss(LOGPROBS, graph_of(op, target))


@pytest.mark.parametrize(
    "name", ["__class__", "data", "grad", "grad_fn", "storage", "__dict__", "shape.__class__"]
)
def test_attributes_outside_the_list_are_refused(name: str) -> None:
    rule = compile_rule(LOGPROBS, graph_of("call_function", "getattr", [{"ref": "logprobs"}, name]))
    with pytest.raises(ValueError, match=r"the attribute .* is not known to this server"):
        rule.compute(np.array([-1.0]), {}, {})


@pytest.mark.parametrize(
    "argument",
    [
        {"unknown": 1},
        {"ref": 3},
        {"ref": "a", "tuple": []},
        {"tuple": 3},
        {"slice": [1, 2]},
        {"float": "1.5"},
        {"dtype": "qint8"},
        {"dtype": "nn"},
        {"device": "cuda"},
        {"layout": "sparse_coo"},
        {"memory_format": "x"},
        {"dict": []},
    ],
    ids=str,
)
def test_unknown_forms_of_arguments_are_refused(argument: Any) -> None:
    with pytest.raises(ValueError, match=r"graph.nodes\[1\] .*(unknown form|not known)"):
        compile_custom_loss(LOGPROBS, graph_of("call_function", "torch.exp", [{"ref": "logprobs"}, argument]))


@pytest.mark.parametrize(
    "pair",
    [
        {"ref": "logprobs"},
        {"tuple": [{"ref": "logprobs"}]},
        {"tuple": [{"ref": "logprobs"}, {"ref": "logprobs"}]},
        {"tuple": [{"ref": "logprobs"}, {"dict": []}]},
        {"tuple": [{"ref": "logprobs"}, {"dict": {"custom/a:sum": {"ref": "later"}}}]},
    ],
    ids=str,
)
def test_outputs_other_than_a_loss_and_metrics_are_refused(pair: Any) -> None:
    nodes = [
        CustomLossNode(op="placeholder", name="logprobs", target="logprobs"),
        CustomLossNode(op="output", name="output", target="output", args=[pair]),
    ]
    with pytest.raises(ValueError, match=r"graph.nodes\[1\] .*(a loss and a dict|not known|no earlier node)"):
        compile_custom_loss(LOGPROBS, CustomLossGraph(nodes=nodes))
