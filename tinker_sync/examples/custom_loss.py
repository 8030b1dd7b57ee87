"""A loss of your own in numpy: the focal loss, which gives little weight to tokens learned already."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

import tinker_sync as tinker
from tinker_sync import data
from tinker_sync.losses import numpy_loss

MODEL, RATE = "tinker-sync/tiny", 5e-3  # a large model takes a rate of about 2e-4
STEPS, BATCH = 40, 32


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


def main() -> None:
    """Teach the model to double each letter of a word, with the loss `focal`."""
    with tinker.ServiceClient(base_url="local") as service:
        training = service.create_lora_training_client(MODEL, rank=16, seed=1)
        tokenizer = training.get_tokenizer()
        for step in range(STEPS):
            rng = random.Random(step)
            words = ["".join(rng.choices("abcdef", k=4)) for _ in range(BATCH)]
            batch = [
                data.from_completion(
                    f"double: {word} ->", f" {''.join(2 * letter for letter in word)}\n", tokenizer
                )
                for word in words
            ]
            passed = training.forward_backward_custom(batch, focal)
            training.optim_step(tinker.AdamParams(learning_rate=RATE)).result()
            loss = passed.result().metrics["focal:mean"]
            if step % 4 == 0 or step == STEPS - 1:
                print(f"step {step:2}  focal loss {loss:5.2f}  {'#' * round(8 * loss)}")
        sampling = training.save_weights_and_get_sampling_client()
        prompts = ["double: fade ->", "double: bead ->"]
        params = tinker.SamplingParams(max_tokens=12, temperature=0.0, stop=["\n"])
        for item in sampling.map(prompts, params, progress=False, on_error="raise"):
            print(f"{prompts[item.index]}{item.texts[0].rstrip()}")


if __name__ == "__main__":
    main()
