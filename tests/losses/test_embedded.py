"""Custom losses train the embedded server's model like the server's own losses."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.embedded import BASE, KEY, Running, running

import tinker_sync
from tinker_sync import losses, types
from tinker_sync.errors import RequestFailedError

PATIENCE_S = 120.0
STEPS = int(os.environ.get("TINKER_SYNC_TEST_DPO_STEPS", "6"))
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path, seed=1, hold_s=0.5) as server:
        yield server


def service(server: Running) -> tinker_sync.ServiceClient:
    return tinker_sync.ServiceClient(base_url=server.url, api_key=KEY)


def trainer(client: tinker_sync.ServiceClient) -> tinker_sync.TrainingClient:
    return client.create_lora_training_client(BASE, rank=4, seed=3).result()


def sequences(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, 200, 8 + 3 * index).tolist() for index in range(count)]


def supervised() -> list[types.Datum]:
    made = []
    for tokens in sequences(3, 5):
        weights = np.linspace(0, 1, len(tokens) - 1)
        inputs = {"target_tokens": tokens[1:], "weights": weights}
        made.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs))
    return made


def candidates(weights: str, *, sparse: bool) -> list[types.Datum]:
    """Return data with up to six targets a token; `weights` is "random", "ones" or "none"."""
    rng = np.random.default_rng(5)
    made = []
    for tokens in sequences(3, 5):
        length = len(tokens) - 1
        targets = rng.integers(5, 200, (length, 6)) * (rng.random((length, 6)) < 0.2)
        shares = rng.random((length, 6)) + 0.1 if weights == "random" else 1.0
        layout = types.TensorData.from_numpy_sparse if sparse else types.TensorData.from_numpy
        inputs = {"target_tokens": layout(targets), "weights": layout(np.float32(shares * (targets != 0)))}
        if weights == "none":
            del inputs["weights"]
        assert inputs["target_tokens"].is_sparse is sparse
        made.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs))
    return made


def sampled(training: tinker_sync.TrainingClient) -> list[types.Datum]:
    """Return data with random advantages, and with log-probabilities close to those of the model."""
    bare = supervised()
    scored = training.forward(bare, "cross_entropy").result(PATIENCE_S).loss_fn_outputs
    rng = np.random.default_rng(7)
    made = []
    for datum, output in zip(bare, scored, strict=True):
        p = output["logprobs"].to_numpy()
        inputs = {
            "target_tokens": datum.loss_fn_inputs["target_tokens"],
            "logprobs": p + rng.standard_normal(p.shape).astype(np.float32) / 4,
            "advantages": rng.standard_normal(p.shape),
        }
        made.append(types.Datum(datum.model_input, inputs))
    return made


def trained(
    training: tinker_sync.TrainingClient, data: list[types.Datum], loss: Any
) -> list[tuple[float, float]]:
    """Submit three passes and steps at once. Return the loss and the gradient norm of each step."""
    one_pass = training.forward_backward if isinstance(loss, str) else training.forward_backward_custom
    asked = [
        (one_pass(data, loss), training.optim_step(types.AdamParams(learning_rate=1e-3))) for _ in range(3)
    ]
    return [
        (
            passed.result(PATIENCE_S).metrics["loss:sum"],
            (stepped.result(PATIENCE_S).metrics or {})["grad_norm"],
        )
        for passed, stepped in asked
    ]


def torch_loss(name: str) -> Any:
    """Return the server's loss of this name, written in torch."""
    import torch

    def compute(data: Any, logprobs: Any) -> Any:
        total = torch.zeros(())
        for datum, p in zip(data, logprobs, strict=True):
            given = {name: each.to_torch() for name, each in datum.loss_fn_inputs.items()}
            if name == "cross_entropy":
                total = total - (p * given["weights"]).sum()
                continue
            ratio, advantages = torch.exp(p - given["logprobs"]), given["advantages"]
            held = ratio.clamp(0.8, 1.2) if name == "ppo" else ratio
            total = total - torch.minimum(ratio * advantages, held * advantages).sum()
        return total, {}

    return compute


LOSSES = {
    "cross_entropy": losses.CrossEntropy(),
    "importance_sampling": losses.ImportanceSampling(),
    "ppo": losses.PPO(),
}
CASES = [
    ("cross_entropy", "tokens"),
    ("cross_entropy", "dense"),
    ("cross_entropy", "sparse"),
    ("importance_sampling", "tokens"),
    ("ppo", "tokens"),
]


def test_custom_losses_train_like_those_of_the_server(server: Running) -> None:
    has_torch = importlib.util.find_spec("torch") is not None
    with service(server) as client:
        for name, layout in CASES:
            if name != "cross_entropy":
                data = sampled(trainer(client))
            elif layout == "tokens":
                data = supervised()
            else:
                data = candidates("random", sparse=layout == "sparse")
            on_server = trained(trainer(client), data, name)
            assert on_server[0][1] > 0.1
            for loss in [LOSSES[name], *([torch_loss(name)] if has_torch else [])]:
                found = trained(trainer(client), data, loss)
                assert found[0] == pytest.approx(on_server[0], rel=1e-5)
                # Rounding errors grow from step to step.
                np.testing.assert_allclose(found, on_server, rtol=1e-3)


@needs_torch
def test_traced_losses_match_on_both_sides(tmp_path: Path) -> None:
    def nll(logprobs: Any, weights: Any) -> Any:
        loss = -(logprobs * weights).sum()
        return loss, {"custom/nll:sum": loss, "custom/best:mean": logprobs.max()}

    found: dict[bool, Any] = {}
    for on_server in (False, True):
        flags = {"seed": 1, "custom_loss_server_side": on_server}
        with running(tmp_path / str(on_server), **flags) as server, service(server) as client:
            handle = client.create_custom_loss(nll, {"logprobs": 1, "weights": 1}).result(PATIENCE_S)
            assert (handle.loss_id is not None) is on_server
            training = trainer(client)
            metrics = training.forward_backward(supervised(), handle).result(PATIENCE_S).metrics
            step = training.optim_step(types.AdamParams()).result(PATIENCE_S)
            assert ("surrogate_loss:sum" in metrics) is not on_server
            found[on_server] = {**metrics, **(step.metrics or {})}
            found[on_server].pop("surrogate_loss:sum", None)
            expected = trained(trainer(client), supervised(), "cross_entropy")[0]
            assert (metrics["loss:sum"], (step.metrics or {})["grad_norm"]) == pytest.approx(
                expected, rel=1e-5
            )
    assert found[True] == pytest.approx(found[False], rel=1e-5)


@needs_torch
def test_unsupported_operation_is_refused_at_upload(tmp_path: Path) -> None:
    import torch

    def noisy(logprobs: Any) -> Any:
        return (logprobs + torch.rand_like(logprobs)).sum(), {}

    with running(tmp_path, seed=1, custom_loss_server_side=True) as server, service(server) as client:
        for _ in range(2):  # a refused loss may be created again
            with pytest.raises(
                RequestFailedError, match=r"torch.rand_like.*not computed by this server"
            ) as caught:
                client.create_custom_loss(noisy, {"logprobs": 1}).result(PATIENCE_S)
            assert caught.value.category.value == "user"


def preferences() -> tuple[list[types.Datum], list[types.Datum]]:
    """Return two lists of data with the same prompts and different random answers.

    The tokens of a prompt have weight 0.
    """
    rng = np.random.default_rng(11)
    answers: tuple[list[types.Datum], list[types.Datum]] = ([], [])
    for _ in range(4):
        prompt = rng.integers(5, 200, 6).tolist()
        for made in answers:
            tokens = prompt + rng.integers(5, 200, 8).tolist()
            weights = [0.0] * 5 + [1.0] * 8
            inputs = {"target_tokens": tokens[1:], "weights": weights}
            made.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs))
    return answers


def test_dpo_improves_its_margin(server: Running) -> None:
    with service(server) as client:
        training = trainer(client)
        data = losses.dpo_pairs(*preferences())
        data = losses.with_reference(data, training.forward(data, "cross_entropy").result(PATIENCE_S))
        loss = losses.DPO(beta=0.5)
        asked = []
        for _ in range(STEPS):
            asked.append(training.forward_backward_custom(data, loss))
            training.optim_step(types.AdamParams(learning_rate=5e-3))
        metrics = [future.result(PATIENCE_S).metrics for future in asked]
        margins = [each["dpo_margin:mean"] for each in metrics]
        assert margins[0] == pytest.approx(0.0, abs=1e-4)
        assert metrics[0]["loss:sum"] == pytest.approx(4 * np.log(2), abs=1e-3)
        assert margins[-1] > 1.0
        assert metrics[-1]["dpo_accuracy:mean"] == 1.0
        assert metrics[-1]["loss:sum"] < 0.5 * metrics[0]["loss:sum"]


def test_weighted_sum_restrains_a_policy(server: Running) -> None:
    def apart(weight: float) -> float:
        training = trainer(client)
        before = training.forward(supervised(), "cross_entropy").result(PATIENCE_S)
        data = losses.with_reference(sampled(training), before)
        terms = {"reward": (1.0, losses.ImportanceSampling()), "kl": (weight, losses.KLToReference("k2"))}
        loss = losses.WeightedSum({**terms, "bonus": (0.0, losses.EntropyBonus())})
        for _ in range(4):
            passed = training.forward_backward_custom(data, loss)
            training.optim_step(types.AdamParams(learning_rate=2e-3))
        metrics = passed.result(PATIENCE_S).metrics
        assert metrics["loss:sum"] == pytest.approx(metrics["reward:sum"] + weight * metrics["kl:sum"])
        return float(metrics["kl:sum"])

    with service(server) as client:
        assert 0 < 2 * apart(30.0) < apart(0.0)
