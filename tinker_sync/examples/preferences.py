"""DPO: from pairs of a better and a worse answer, measured on pairs that are held out."""

from __future__ import annotations

import random
from collections.abc import Sequence

import tinker_sync as tinker
from tinker_sync import data
from tinker_sync.examples._shared import connect, draw, parse, write
from tinker_sync.losses import DPO, dpo_pairs, with_reference

PAIRS = 16
BETA = 0.3


def make_pairs(rng: random.Random, tokenizer: tinker.Tokenizer, count: int) -> list[tinker.Datum]:
    """Return `count` pairs for `DPO`: an answer with a final dot, then the same answer without it."""
    better, worse = [], []
    for _ in range(count):
        one, two = rng.randint(1, 49), rng.randint(1, 49)
        prompt = f"Q: {one}+{two}="
        better.append(data.from_completion(prompt, f"{one + two}.\n", tokenizer))
        worse.append(data.from_completion(prompt, f"{one + two}\n", tokenizer))
    return dpo_pairs(better, worse)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Score all pairs with the untrained model, then train. Return the DPO margins of held-out pairs."""
    options = parse(argv, __doc__, steps=20)
    margins: list[float] = []
    with connect(options) as service:
        training = service.create_lora_training_client(options.model, rank=16, seed=options.seed)
        tokenizer = training.get_tokenizer()
        rng = random.Random(options.seed)
        pairs = [make_pairs(rng, tokenizer, PAIRS) for _ in range(4)]
        scored = [training.forward(batch, "cross_entropy") for batch in pairs]
        *batches, held_out = [
            with_reference(batch, score.result()) for batch, score in zip(pairs, scored, strict=True)
        ]
        loss = DPO(beta=BETA)
        for step in range(options.steps):
            training.forward_backward_custom(batches[step % len(batches)], loss)
            rate = options.rate(1e-3, 5e-5)
            training.optim_step(tinker.AdamParams(learning_rate=rate))
            metrics = training.forward_custom(held_out, loss).result().metrics
            margins.append(metrics["dpo_margin:mean"])
        metrics = training.forward_custom(held_out, loss).result().metrics
        sampling = training.save_weights_and_get_sampling_client()
        prompt = tinker.ModelInput.from_text("Q: 12+31=", tokenizer)
        params = tinker.SamplingParams(max_tokens=16, temperature=0.0, stop=["\n"])
        answer = sampling.sample(prompt, 1, params).result().sequences[0].text(tokenizer)
    write(f"Q: 12+31={answer.rstrip()}\nheld-out pairs preferred: {metrics['dpo_accuracy:mean']:.0%}")
    draw("margin of held-out pairs", margins)
    return margins


if __name__ == "__main__":
    main()
