"""A sweep: four learning rates train side by side on one server, and the best one is named."""

from __future__ import annotations

import random

import tinker_sync as tinker
from tinker_sync import data

MODEL, RATE = "tinker-sync/tiny", 5e-3  # a large model takes a rate of about 2e-4
STEPS, BATCH = 20, 16
FACTORS = (0.1, 0.3, 1.0, 3.0)


def main() -> None:
    """Train a model with each learning rate, all at the same time."""
    rates = [RATE * factor for factor in FACTORS]
    losses: dict[float, list[float]] = {rate: [] for rate in rates}
    with tinker.ServiceClient(base_url="local") as service:
        clients = {
            rate: service.create_lora_training_client(
                MODEL, rank=16, seed=1, user_metadata={"learning_rate": f"{rate:g}"}
            )
            for rate in rates
        }
        tokenizer = clients[rates[0]].get_tokenizer()
        for step in range(STEPS):
            rng = random.Random(step)
            numbers = ["".join(rng.choices("0123456789", k=4)) for _ in range(BATCH)]
            batch = [
                data.from_completion(f"last: {number} ->", f" {number[-1]}\n", tokenizer)
                for number in numbers
            ]
            # All calls are sent before the first result is waited for, so the models train at the same time.
            passes = {
                rate: client.forward_backward(batch, "cross_entropy") for rate, client in clients.items()
            }
            steps = [
                client.optim_step(tinker.AdamParams(learning_rate=rate)) for rate, client in clients.items()
            ]
            tinker.gather(steps)
            for rate, passed in passes.items():
                losses[rate].append(passed.result().metrics["loss:mean"])
    ends = {rate: sum(curve[-3:]) / len(curve[-3:]) for rate, curve in losses.items()}
    best = min(ends, key=lambda rate: ends[rate])
    for rate, end in ends.items():
        mark = "  the best" if rate == best else ""
        print(
            f"learning rate {rate:<8g} loss {losses[rate][0]:.3f} -> {end:.3f}  {'#' * round(15 * end)}{mark}"
        )


if __name__ == "__main__":
    main()
