"""A sweep: four learning rates train side by side on one server, and the best one is named."""

from __future__ import annotations

import random
from collections.abc import Sequence

import tinker_sync as tinker
from tinker_sync import data
from tinker_sync.examples._shared import connect, draw, parse, write

BATCH = 16
FACTORS = (0.1, 0.3, 1.0, 3.0)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train a model with each learning rate, all at the same time. Return the losses at the best rate."""
    options = parse(argv, __doc__, steps=20)
    rates = [options.rate(5e-3, 2e-4) * factor for factor in FACTORS]
    curves: dict[float, list[float]] = {rate: [] for rate in rates}
    with connect(options) as service:
        clients = {
            rate: service.create_lora_training_client(
                options.model, rank=16, seed=options.seed, user_metadata={"learning_rate": f"{rate:g}"}
            )
            for rate in rates
        }
        tokenizer = clients[rates[0]].get_tokenizer()
        for step in range(options.steps):
            rng = random.Random(f"{options.seed} {step}")
            numbers = ["".join(rng.choice("0123456789") for _ in range(4)) for _ in range(BATCH)]
            batch = [
                data.from_completion(f"last: {number} ->", f" {number[-1]}\n", tokenizer)
                for number in numbers
            ]
            passes = {
                rate: client.forward_backward(batch, "cross_entropy") for rate, client in clients.items()
            }
            steps = [
                client.optim_step(tinker.AdamParams(learning_rate=rate)) for rate, client in clients.items()
            ]
            for rate, passed in passes.items():
                curves[rate].append(passed.result().metrics["loss:sum"] / (2 * BATCH))
            for stepped in steps:
                stepped.result()
    ends = {rate: sum(losses[-3:]) / len(losses[-3:]) for rate, losses in curves.items()}
    best = min(ends, key=lambda rate: ends[rate])
    for rate, end in ends.items():
        write(f"learning rate {rate:<8g} loss {end:.4f}{'  the best' if rate == best else ''}")
    draw(f"loss per token with the learning rate {best:g}", curves[best])
    return curves[best]


if __name__ == "__main__":
    main()
