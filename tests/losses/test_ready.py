"""Ready-made losses: formulas, derivatives by finite differences, estimates, and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.custom_losses import log_sigmoid

from tinker_sync import losses
from tinker_sync.errors import InvalidInputError
from tinker_sync.losses import (
    DPO,
    CrossEntropy,
    Distance,
    EntropyBonus,
    KLToReference,
    LabelSmoothing,
    WeightedSum,
)
from tinker_sync.types import Datum, ForwardBackwardOutput, ModelInput, TensorData

PROMPT = ModelInput.from_ints([1, 2, 3, 4])


def one(**inputs: Any) -> Datum:
    """Return a datum of four tokens, with these inputs besides its targets."""
    return Datum(PROMPT, {"target_tokens": [5, 6, 7, 8], **inputs})


def several(rng: np.random.Generator, *, sparse: bool = False, **inputs: Any) -> Datum:
    """Return a datum of four tokens with up to three candidates each, and with these inputs."""
    if not sparse:
        return Datum(PROMPT, {"target_tokens": rng.integers(1, 9, (4, 3)), **inputs})
    targets = TensorData([1, 2, 3, 4, 5], "int64", [4, 3], [0, 3, 4, 4, 5], [0, 1, 2, 0, 2])
    return Datum(PROMPT, {"target_tokens": targets, **inputs})


def batch(shape: str) -> tuple[list[Datum], list[Any]]:
    """Return four data that have the inputs of every loss, and their log-probabilities.

    With the shape "tokens" a token has one target, otherwise several candidates.
    """
    rng = np.random.default_rng(11)
    size = (4, 3) if shape != "tokens" else (4,)
    data, logprobs = [], []
    for index in range(4):
        inputs: dict[str, Any] = {
            "logprobs": -rng.random(size) * 2,
            "advantages": rng.standard_normal(size),
            "reference_logprobs": -rng.random(size) * 2,
        }
        if index % 2:
            inputs["weights"] = np.where(rng.random(size) < 0.3, 0, rng.random(size))
        data.append(one(**inputs) if shape == "tokens" else several(rng, sparse=index == 2, **inputs))
        logprobs.append(-rng.random(size) * 2 - 0.05)
    return data, logprobs


TOKENS = [
    CrossEntropy(),
    losses.ImportanceSampling(),
    losses.PPO(),
    losses.PPO(clip_low=0.5, clip_high=1.5),
    KLToReference(),
    KLToReference("k2"),
    Distance("l1"),
    Distance("l2"),
    Distance("elastic", share=0.3),
    Distance("l1", reference=None),
    EntropyBonus(),
    DPO(),
    DPO(beta=2.0, label_smoothing=0.2),
    DPO(reference=None),
    WeightedSum({"main": (1.0, losses.PPO()), "kl": (0.3, KLToReference()), "bonus": (-0.2, EntropyBonus())}),
]
CANDIDATES = [
    CrossEntropy(),
    KLToReference("listed"),
    Distance(),
    EntropyBonus("listed"),
    LabelSmoothing(0.3),
    DPO(),
    WeightedSum({"soft": (2.0, LabelSmoothing()), "bonus": (0.5, EntropyBonus("listed"))}),
]


@pytest.mark.parametrize(
    ("loss", "shape"),
    [*((loss, "tokens") for loss in TOKENS), *((loss, "candidates") for loss in CANDIDATES)],
    ids=str,
)
def test_gradients_match_finite_differences(loss: Any, shape: str) -> None:
    data, logprobs = batch(shape)
    _, metrics, gradients = loss(data, logprobs)
    assert all(np.isfinite(value) for value in metrics.values())
    step = 1e-6
    for index, (p, gradient) in enumerate(zip(logprobs, gradients, strict=True)):
        assert gradient.shape == p.shape
        for cell in np.ndindex(p.shape):
            moved = [each.copy() for each in logprobs]
            moved[index][cell] += step
            above = loss(data, moved)[0]
            moved[index][cell] -= 2 * step
            below = loss(data, moved)[0]
            assert gradient[cell] == pytest.approx((above - below) / (2 * step), abs=2e-8, rel=1e-6)
    assert max(float(np.abs(gradient).max()) for gradient in gradients) > 0.01


# ------------------------------------------------------------------------------------------ formulas
P = np.array([-1.0, -2.0, -0.5, -3.0])
Q = np.array([-1.5, -1.0, -0.5, -2.5])
W = np.array([0.0, 1.0, 2.0, 0.5])


def test_cross_entropy_with_and_without_weights() -> None:
    assert CrossEntropy()([one(), one(weights=W)], [P, P])[:2] == (
        6.5 + 4.5,
        {"cross_entropy:mean": 11.0 / 7},
    )


def test_importance_sampling_and_ppo() -> None:
    advantages = np.array([2.0, 1.0, -1.0, -0.5])
    datum = one(logprobs=Q, advantages=advantages)
    ratio = np.exp(P - Q)
    loss, metrics, _ = losses.ImportanceSampling()([datum], [P])
    assert loss == pytest.approx(-(ratio * advantages).sum(), rel=1e-6)
    assert metrics == {"importance_sampling:mean": pytest.approx(loss / 4)}
    expected = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages).sum()
    assert losses.PPO()([datum], [P])[0] == pytest.approx(expected, rel=1e-6)


def test_kl() -> None:
    datum = one(reference_logprobs=Q, weights=W)
    assert KLToReference("k2")([datum], [P])[0] == pytest.approx((W * (P - Q) ** 2 / 2).sum())
    k3 = (W * (np.exp(Q - P) - 1 - (Q - P))).sum()
    assert KLToReference()([datum], [P])[:2] == (pytest.approx(k3), {"kl:mean": pytest.approx(k3 / 3)})
    assert KLToReference()([datum], [Q])[0] == 0
    other = one(teacher=Q)
    assert KLToReference("k2", reference="teacher")([other], [P])[0] == pytest.approx(
        ((P - Q) ** 2 / 2).sum()
    )


def test_entropy() -> None:
    loss, metrics, _ = EntropyBonus()([one(weights=[0.0, 1.0, 1.0, 0.0])], [P])
    assert (loss, metrics) == (pytest.approx((4 + 0.25) / 2), {"entropy:mean": pytest.approx(1.25)})


def test_label_smoothing() -> None:
    rng = np.random.default_rng(3)
    p = -rng.random((4, 3))
    dense = several(rng)
    expected = -(0.9 * p[:, 0] + 0.1 * p.mean(axis=1)).sum()
    assert LabelSmoothing(0.1)([dense], [p])[:2] == (
        pytest.approx(expected),
        {"label_smoothing:mean": pytest.approx(expected / 4)},
    )
    # Rows with three, one, zero and one listed tokens; the last one lacks the right token.
    sparse = several(rng, sparse=True)
    expected = -(0.9 * p[0, 0] + 0.1 * p[0].mean()) - p[1, 0]
    assert LabelSmoothing(0.1)([sparse], [p])[0] == pytest.approx(expected)
    weights = np.zeros((4, 3))
    weights[1] = [0.5, 0.5, 0.0]
    weighted = several(rng, weights=weights)
    expected = -0.5 * (0.9 * p[1, 0] + 0.1 * p[1, :2].mean())
    assert LabelSmoothing(0.1)([weighted], [p])[0] == pytest.approx(expected)
    assert LabelSmoothing(0.0)([dense], [p])[0] == pytest.approx(-p[:, 0].sum())


def test_dpo() -> None:
    weights = np.array([0.0, 1.0, 1.0, 1.0])
    chosen = [one(reference_logprobs=Q, weights=weights), one(reference_logprobs=P, weights=weights)]
    rejected = [one(reference_logprobs=P, weights=weights), one(reference_logprobs=Q, weights=weights)]
    data = losses.dpo_pairs(chosen, rejected)
    loss, metrics, _ = DPO(beta=0.5)(data, [P, Q, Q, P])
    s = float((weights * (P - Q)).sum())
    first, second = 0.5 * (s + s), 0.5 * (-s - s)
    assert first < 0 < second
    assert loss == pytest.approx(-log_sigmoid(first) - log_sigmoid(second))
    assert metrics == pytest.approx(
        {
            "dpo:mean": loss / 2,
            "dpo_margin:mean": 0.0,
            "dpo_accuracy:mean": 0.5,
            "dpo_chosen:mean": 0.0,
            "dpo_rejected:mean": 0.0,
        },
        abs=1e-12,
    )
    smoothed = DPO(beta=0.5, label_smoothing=0.1)(data[:2], [P, Q])[0]
    assert smoothed == pytest.approx(-0.9 * log_sigmoid(first) - 0.1 * log_sigmoid(-first))
    free = DPO(beta=0.5, reference=None)(data[:2], [P, Q])[0]
    assert free == pytest.approx(-log_sigmoid(0.5 * s))


def test_weighted_sum_has_every_metric() -> None:
    datum = one(reference_logprobs=Q, weights=W)
    both = WeightedSum({"nll": (2.0, CrossEntropy()), "near": (-0.5, KLToReference("k2"))})
    loss, metrics, gradients = both([datum], [P])
    nll, kl = CrossEntropy()([datum], [P]), KLToReference("k2")([datum], [P])
    assert loss == pytest.approx(2 * nll[0] - 0.5 * kl[0])
    np.testing.assert_allclose(gradients[0], 2 * nll[2][0] - 0.5 * kl[2][0])
    assert metrics == {
        "nll:sum": pytest.approx(nll[0]),
        "nll:gradient_norm": pytest.approx(2 * np.linalg.norm(nll[2][0])),
        "near:gradient_norm": pytest.approx(0.5 * np.linalg.norm(kl[2][0])),
        "nll/cross_entropy:mean": nll[1]["cross_entropy:mean"],
        "near:sum": pytest.approx(kl[0]),
        "near/kl:mean": kl[1]["kl:mean"],
    }


def test_the_gradient_norm_of_a_term_is_over_all_data() -> None:
    data, logprobs = batch("tokens")
    _, metrics, _ = WeightedSum({"far": (-3.0, Distance()), "off": (0.0, CrossEntropy())})(data, logprobs)
    slopes = np.concatenate(Distance()(data, logprobs)[2])
    assert metrics["far:gradient_norm"] == pytest.approx(3 * np.linalg.norm(slopes))
    assert metrics["off:gradient_norm"] == 0


def test_distances() -> None:
    datum = one(reference_logprobs=Q, weights=W)
    apart = P - Q
    expected = {"l1": (W * abs(apart)).sum(), "l2": (W * apart**2).sum()}
    for norm, value in expected.items():
        made = Distance(norm)([datum], [P])  # type: ignore[arg-type]  # a name of the table above
        assert made[:2] == (pytest.approx(value), {"distance:mean": pytest.approx(value / 3)})
        assert Distance(norm)([datum], [Q])[2][0].tolist() == [0.0] * 4  # type: ignore[arg-type]
    both = 0.25 * expected["l1"] + 0.75 * expected["l2"]
    assert Distance("elastic", share=0.25)([datum], [P])[0] == pytest.approx(both)
    assert Distance()([datum], [P])[0] == pytest.approx(2 * KLToReference("k2")([datum], [P])[0])
    bare = one(weights=W)
    assert Distance("l1", reference=None)([bare], [P])[0] == CrossEntropy()([bare], [P])[0]


def test_consistency_compares_the_answers_of_two_prompts() -> None:
    first, second = one(weights=[0.0, 0.0, 1.0, 2.0]), one(weights=[1.0, 1.0, 0.0, 0.0])
    p, q = P, Q
    loss, metrics, gradients = losses.Consistency()([first, second], [p, q])
    apart = p[2:] - q[:2]
    assert loss == pytest.approx((np.array([1.0, 2.0]) * apart**2).sum())
    assert metrics == {"consistency:mean": pytest.approx(loss / 2)}
    np.testing.assert_allclose(gradients[0], [0, 0, 2 * apart[0], 4 * apart[1]])
    np.testing.assert_allclose(gradients[1], [-2 * apart[0], -4 * apart[1], 0, 0])
    taught = losses.Consistency(teacher=True)([first, second], [p, q])
    assert taught[0] == loss
    assert taught[2][0].tolist() == [0.0] * 4
    np.testing.assert_array_equal(taught[2][1], gradients[1])
    assert losses.Consistency()([], [])[0] == 0


@pytest.mark.parametrize("norm", ["l1", "l2", "elastic"])
def test_distances_and_consistency_are_differentiated_as_by_torch(norm: Any) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(5)
    data, logprobs = batch("tokens")
    for index in range(0, len(data), 2):  # answers of three tokens, at different places of the two data
        for datum, at in ((data[index], 0), (data[index + 1], 1)):
            weights = np.zeros(4)
            weights[at : at + 3] = rng.random(3) + 0.1
            datum.loss_fn_inputs["weights"] = TensorData(weights, "float32", [4])
    leaves = [torch.tensor(p, requires_grad=True) for p in logprobs]

    def read(datum: Datum, name: str) -> Any:
        return torch.tensor(datum.loss_fn_inputs[name].to_numpy().astype(float))

    def measure(apart: Any) -> Any:
        of_l1 = {"l1": 1.0, "l2": 0.0, "elastic": 0.3}[norm]
        return of_l1 * apart.abs() + (1 - of_l1) * apart.square()

    total = torch.zeros((), dtype=torch.float64)
    for datum, leaf in zip(data, leaves, strict=True):
        weights = read(datum, "weights")
        total = total + 0.7 * (weights * measure(leaf - read(datum, "reference_logprobs"))).sum()
    for index in range(0, len(data), 2):
        weights = read(data[index], "weights")[:3]
        total = total + 0.4 * (weights * measure(leaves[index][:3] - leaves[index + 1][1:])).sum()
    total.backward()
    both = WeightedSum(
        {
            "distance": (0.7, Distance(norm, share=0.3)),
            "same": (0.4, losses.Consistency(norm, share=0.3)),
        }
    )
    loss, _, gradients = both(data, logprobs)
    assert loss == pytest.approx(float(total.detach()), rel=1e-9)
    for gradient, leaf in zip(gradients, leaves, strict=True):
        np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-9)


LOGITS = np.array([0.3, -1.0, 0.8, 0.1, -0.4])
OTHER = np.array([-0.2, 0.5, 0.4, -1.0, 0.0])


def log_softmax(logits: Any) -> Any:
    return logits - np.logaddexp.reduce(logits)


def kl(a: Any, b: Any) -> float:
    return float((np.exp(log_softmax(a)) * (log_softmax(a) - log_softmax(b))).sum())


def entropy(logits: Any) -> float:
    return -float((np.exp(log_softmax(logits)) * log_softmax(logits)).sum())


def slope_of(function: Any) -> Any:
    """Return the derivative of a function of logits at `LOGITS`, from finite differences."""
    moves = np.eye(5) * 1e-6
    return np.array([(function(LOGITS + move) - function(LOGITS - move)) / 2e-6 for move in moves])


def expected(loss: Any) -> tuple[float, float, Any]:
    """Return the expected value and metric of a loss, and its derivative by the logits.

    The expectation is over the tokens that a model with `LOGITS` samples.
    """
    p, q = log_softmax(LOGITS), log_softmax(OTHER)
    value, metric, slope = 0.0, 0.0, np.zeros(5)
    for token in range(5):
        datum = Datum(
            ModelInput.from_ints([0]), {"target_tokens": [token], "reference_logprobs": q[token : token + 1]}
        )
        found, metrics, gradients = loss([datum], [p[token : token + 1]])
        share = np.exp(p[token])
        value += share * found
        metric += share * next(iter(metrics.values()))
        # The derivative of the token's log-probability by the logits.
        slope += share * gradients[0][0] * (np.eye(5)[token] - np.exp(p))
    return value, metric, slope


def test_k3_estimates_forward_value_and_reverse_gradient() -> None:
    value, metric, slope = expected(KLToReference("k3"))
    assert (value, metric) == (pytest.approx(kl(LOGITS, OTHER), rel=1e-6),) * 2
    np.testing.assert_allclose(slope, slope_of(lambda logits: kl(OTHER, logits)), atol=1e-6)


def test_k2_gradient_estimates_the_divergence() -> None:
    _, _, slope = expected(KLToReference("k2"))
    np.testing.assert_allclose(slope, slope_of(lambda logits: kl(logits, OTHER)), atol=1e-6)


def test_entropy_bonus_estimates_entropy() -> None:
    _, metric, slope = expected(EntropyBonus())
    assert metric == pytest.approx(entropy(LOGITS), rel=1e-6)
    np.testing.assert_allclose(slope, -slope_of(entropy), atol=1e-6)


def test_listed_estimators_are_exact_for_the_vocabulary() -> None:
    p, q = log_softmax(LOGITS)[None], log_softmax(OTHER)[None]
    datum = Datum(ModelInput.from_ints([0]), {"target_tokens": np.arange(5)[None], "reference_logprobs": q})
    for loss, exact, sign in (
        (KLToReference("listed"), lambda logits: kl(logits, OTHER), 1),
        (EntropyBonus("listed"), entropy, -1),
    ):
        value, metrics, gradients = loss([datum], [p])
        assert value == pytest.approx(sign * exact(LOGITS), rel=1e-6)
        assert next(iter(metrics.values())) == pytest.approx(exact(LOGITS), rel=1e-6)
        by_logits = gradients[0][0] - np.exp(p[0]) * gradients[0][0].sum()
        np.testing.assert_allclose(by_logits, sign * slope_of(exact), atol=1e-6)


# ------------------------------------------------------------------------------------------ errors
@pytest.mark.parametrize(
    ("loss", "inputs", "complaint"),
    [
        (
            losses.ImportanceSampling(),
            {"advantages": P},
            r"data\[0\].loss_fn_inputs\['logprobs'\]: is missing",
        ),
        (losses.PPO(), {"logprobs": P}, r"data\[0\].loss_fn_inputs\['advantages'\]: is missing"),
        (
            KLToReference(),
            {},
            r"\['reference_logprobs'\]: is missing; tinker_sync.losses.with_reference adds",
        ),
        (
            KLToReference(),
            {"reference_logprobs": P[:2]},
            r"has shape \(2,\), the log-probabilities have \(4,\)",
        ),
        (CrossEntropy(), {"weights": P[:2]}, r"\['weights'\]: has shape \(2,\)"),
        (LabelSmoothing(), {}, r"has shape \(4,\); LabelSmoothing is for several targets a token"),
        (
            KLToReference("listed"),
            {},
            r"KLToReference\('listed'\) is for several targets a token, of shape \[T, K\]",
        ),
        (EntropyBonus("listed"), {}, r"EntropyBonus\('listed'\) is for several"),
        (Distance(), {}, r"\['reference_logprobs'\]: is missing; tinker_sync.losses.with_reference adds"),
        (losses.Consistency(), {}, "Consistency: expected pairs, got 1 data"),
        (DPO(), {"reference_logprobs": P}, "DPO: expected pairs, got 1 data; put each rejected answer after"),
    ],
    ids=str,
)
def test_unsuitable_data_are_refused(loss: Any, inputs: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidInputError, match=complaint):
        loss([one(**inputs)], [P])


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: KLToReference("k4"), "KLToReference.estimator: expected k3 or k2 or listed, got 'k4'"),
        (lambda: EntropyBonus("k2"), "EntropyBonus.estimator: expected sampled or listed"),
        (lambda: LabelSmoothing(1.0), "LabelSmoothing.epsilon: expected 0 or more and less than 1, got 1.0"),
        (lambda: LabelSmoothing(-0.1), "LabelSmoothing.epsilon"),
        (
            lambda: DPO(label_smoothing=0.5),
            "DPO.label_smoothing: expected 0 or more and less than 0.5",
        ),
        (lambda: DPO(label_smoothing=-0.1), "DPO.label_smoothing"),
        (lambda: Distance("l3"), "Distance.norm: expected l1 or l2 or elastic, got 'l3'"),
        (lambda: Distance("elastic", share=1.5), "Distance.share"),
        (lambda: losses.Consistency("l0"), "Consistency.norm"),
        (lambda: losses.Consistency()([one(), one(weights=W)], [P, P]), "answers of 4 and 3 tokens"),
        (lambda: WeightedSum({}), "give at least one loss"),
        (lambda: WeightedSum({"a": CrossEntropy()}), r"WeightedSum\['a'\]: expected \(weight, loss\)"),
        (lambda: WeightedSum({"a": (float("nan"), CrossEntropy())}), "expected a finite weight, got nan"),
        (lambda: WeightedSum({"a": (True, CrossEntropy())}), "expected a finite weight, got True"),
        (lambda: WeightedSum({"a:sum": (1.0, CrossEntropy())}), "without a colon"),
        (lambda: WeightedSum({"": (1.0, CrossEntropy())}), "a name without a colon"),
        (lambda: WeightedSum({"a": (1.0, lambda data, logprobs: None)}), "<lambda> does not take numpy"),
        (lambda: losses.dpo_pairs([one()], []), "as many rejected as chosen data, got 1 and 0"),
    ],
)
def test_invalid_settings_are_refused(make: Any, complaint: str) -> None:
    with pytest.raises(InvalidInputError, match=complaint):
        make()


# ------------------------------------------------------------------------------------------ references
def test_with_reference_adds_logprobs() -> None:
    data, logprobs = batch("candidates")
    output = ForwardBackwardOutput(
        "ArrayRecord", [{"logprobs": TensorData.from_numpy(p)} for p in logprobs], {}
    )
    brought = losses.with_reference(data, output, "teacher")
    for before, after, p in zip(data, brought, logprobs, strict=True):
        assert set(after.loss_fn_inputs) == {*before.loss_fn_inputs, "teacher"}
        np.testing.assert_allclose(after.loss_fn_inputs["teacher"].to_numpy(), p, rtol=1e-6)
        assert "teacher" not in before.loss_fn_inputs
    assert KLToReference("listed", reference="teacher")(brought, logprobs)[0] == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(InvalidInputError, match="the output has 4 entries for 3 data"):
        losses.with_reference(data[:3], output)
