"""Recovery: the server crashes twice and loses the model, and the loop goes on from its last save."""

from __future__ import annotations

import logging
import random
import tempfile

import tinker_sync as tinker
from tinker_sync import data
from tinker_sync.loop import attempts
from tinker_sync.testing import LocalServer

MODEL, RATE = "tinker-sync/tiny", 5e-3  # a large model takes a rate of about 2e-4
STEPS, BATCH = 24, 16
CRASHES = (10, 19)  # the server of this example crashes before these steps


def make_batch(step: int, tokenizer: tinker.Tokenizer) -> list[tinker.Datum]:
    """Return the data of a step. The number of the step decides them, so that a repeated step is the same."""
    rng = random.Random(step)
    words = ["".join(rng.choices("abcdef", k=4)) for _ in range(BATCH)]
    return [data.from_completion(f"first: {word} ->", f" {word[0]}\n", tokenizer) for word in words]


def main() -> None:
    """Train on a server of this machine that crashes; for another one, change what `connect` returns."""
    logging.basicConfig(format="%(message).100s ...")  # shows the reason of each restart
    crashes = set(CRASHES)
    with LocalServer(model=MODEL) as server, tempfile.TemporaryDirectory() as runs:

        def connect() -> tinker.ServiceClient:
            return server.service()

        for attempt in attempts(connect, runs, every=4, keep="best 1, last 2", ttl_seconds=7 * 86_400):
            with attempt as (service, saves):
                training, first = saves.resume() or (
                    service.create_lora_training_client(MODEL, rank=16, seed=1),
                    0,
                )
                tokenizer = training.get_tokenizer()
                for step in range(first, STEPS):
                    if step in crashes:
                        crashes.remove(step)
                        server.restart()
                    passed = training.forward_backward(make_batch(step, tokenizer), "cross_entropy")
                    training.optim_step(tinker.AdamParams(learning_rate=RATE)).result()
                    loss = passed.result().metrics["loss:mean"]
                    saves.after_step(training, step, score=loss)
                    print(f"step {step:2}  loss {loss:6.3f}  {'#' * round(20 * loss)}", flush=True)
                print(f"kept: {', '.join(f'step {each.step}' for each in saves.kept)}")


if __name__ == "__main__":
    main()
