"""A small program that trains, samples and saves, and returns its numbers."""

from __future__ import annotations

from typing import Any

import tinker_sync

MODEL = "tinker-sync/random"
PATIENCE_S = 120.0

DATA = [
    tinker_sync.Datum(
        tinker_sync.ModelInput.from_ints([1, 2, 3 + number]),
        {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 0.5]},
    )
    for number in range(3)
]


def train(
    service: tinker_sync.ServiceClient, *, steps: int = 2, seed: int | None = 1, model: str = MODEL
) -> dict[str, Any]:
    """Train, sample and save. Return the losses, the samples and the name of the checkpoint.

    Args:
        service: the client.
        steps: the number of steps.
        seed: the seed of the adapter and of the samples; None leaves both to the server.
        model: the base model.
    """
    training = service.create_lora_training_client(model, rank=4, seed=seed)
    losses = []
    for _ in range(steps):
        passed = training.forward_backward(DATA, "cross_entropy")
        stepped = training.optim_step(tinker_sync.AdamParams(learning_rate=1e-2))
        losses.append(passed.result(PATIENCE_S).metrics["loss:sum"])
        stepped.result(PATIENCE_S)
    sampling = training.save_weights_and_get_sampling_client()
    params = tinker_sync.SamplingParams(max_tokens=5, seed=seed)
    # The samples run one after another, so that their sequence numbers do not depend on the order of threads.
    samples = [
        sampling.sample(tinker_sync.ModelInput.from_ints([1, number]), 1, params).result(PATIENCE_S)
        for number in range(3)
    ]
    saved = training.save_state("done").result(PATIENCE_S)
    return {
        "losses": losses,
        "tokens": [sample.sequences[0].tokens for sample in samples],
        "logprobs": [sample.sequences[0].logprobs for sample in samples],
        "saved": saved.path.rpartition("/")[2],
    }
