"""A loss of your own in numpy: the focal loss, which gives little weight to tokens learned already."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

import tinker_sync as tinker
from tinker_sync import data
from tinker_sync.examples._shared import connect, draw, parse
from tinker_sync.losses import numpy_loss

BATCH = 32


@numpy_loss
def focal(batch: Any, logprobs: Any) -> Any:
    """Return the focal loss, a metric, and the derivative of the loss by each log-probability.

    Tokens with the weight 0, which belong to prompts, add nothing.
    """
    weights = [datum.loss_fn_inputs["weights"].to_numpy() for datum in batch]
    trained = sum(float(each.sum()) for each in weights)
    loss, slopes = 0.0, []
    for weight, score in zip(weights, logprobs, strict=True):
        chance = np.exp(score)
        loss -= float((weight * (1 - chance) ** 2 * score).sum()) / trained
        slope = 2 * (1 - chance) * chance * score - (1 - chance) ** 2
        slopes.append(weight * slope / trained)
    return loss, {"focal:mean": loss}, slopes


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Teach the model to double each letter of a word, with the loss `focal`. Return the losses."""
    options = parse(argv, __doc__, steps=40)
    losses: list[float] = []
    with connect(options) as service:
        training = service.create_lora_training_client(options.model, rank=16, seed=options.seed)
        tokenizer = training.get_tokenizer()
        for step in range(options.steps):
            rng = random.Random(f"{options.seed} {step}")
            words = ["".join(rng.choice("abcdef") for _ in range(4)) for _ in range(BATCH)]
            doubled = ["".join(2 * letter for letter in word) for word in words]
            batch = [
                data.from_completion(f"double: {word} ->", f" {answer}\n", tokenizer)
                for word, answer in zip(words, doubled, strict=True)
            ]
            passed = training.forward_backward_custom(batch, focal)
            rate = options.rate(5e-3, 2e-4)
            training.optim_step(tinker.AdamParams(learning_rate=rate)).result()
            losses.append(passed.result().metrics["focal:mean"])
    draw("focal loss per token", losses)
    return losses


if __name__ == "__main__":
    main()
