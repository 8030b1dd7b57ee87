"""Distillation: a student learns a teacher's likeliest tokens at each position, with their probabilities."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

import tinker_sync as tinker
from tinker_sync import data
from tinker_sync.examples._shared import connect, draw, parse, write

TEXTS = 16
TOP = 8


def train_teacher(service: tinker.ServiceClient, model: str, rate: float, seed: int) -> tinker.SamplingClient:
    """Teach a model to count by twos, and return a client that samples from it."""
    training = service.create_lora_training_client(model, rank=16, seed=seed)
    tokenizer = training.get_tokenizer()
    rng = random.Random(seed)
    for _ in range(15):
        starts = [rng.randrange(60) for _ in range(24)]
        texts = [" ".join(str(start + 2 * n) for n in range(6)) for start in starts]
        batch = [data.from_completion("twos:", f" {text}\n", tokenizer) for text in texts]
        training.forward_backward(batch, "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=rate)).result()
    return training.save_weights_and_get_sampling_client()


def soften(prompt: tinker.ModelInput, answer: Sequence[int], scored: tinker.SampleResponse) -> tinker.Datum:
    """Return an example with the teacher's likeliest tokens as targets, weighted by probability.

    Args:
        prompt: the prompt, which is not learned.
        answer: the tokens that the teacher has sampled.
        scored: a response with the teacher's likeliest tokens at each position of prompt and answer.
    """
    tokens = [*prompt.to_ints(), *answer]
    targets = np.zeros((len(tokens) - 1, TOP), dtype=np.int64)
    weights = np.zeros((len(tokens) - 1, TOP), dtype=np.float32)
    for at, likeliest in enumerate((scored.topk_prompt_logprobs or [])[1:]):
        if at < prompt.length - 1 or likeliest is None:
            continue  # the prompt itself is not learned
        for column, (token, logprob) in enumerate(likeliest):
            targets[at, column], weights[at, column] = token, np.exp(logprob)
    return tinker.Datum(
        tinker.ModelInput.from_ints(tokens[:-1]), {"target_tokens": targets, "weights": weights}
    )


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train a student on texts that a trained teacher has written and scored. Return the student's losses."""
    options = parse(argv, __doc__, steps=25)
    losses: list[float] = []
    with connect(options) as service:
        rate = options.rate(5e-3, 2e-4)
        teacher = train_teacher(service, options.model, rate, options.seed)
        tokenizer = teacher.get_tokenizer()
        prompt = tinker.ModelInput.from_text("twos:", tokenizer)
        params = tinker.SamplingParams(max_tokens=24, stop=["\n"], seed=options.seed)
        one = tinker.SamplingParams(max_tokens=1)
        written = [each.tokens for each in teacher.sample(prompt, TEXTS, params).result().sequences]
        inputs = [tinker.ModelInput.from_ints([*prompt.to_ints(), *answer]) for answer in written]
        scores = [teacher.sample(each, 1, one, True, topk_prompt_logprobs=TOP) for each in inputs]
        batch = [
            soften(prompt, answer, score.result()) for answer, score in zip(written, scores, strict=True)
        ]
        learned = sum(float(datum.loss_fn_inputs["weights"].to_numpy().sum()) for datum in batch)
        student = service.create_lora_training_client(options.model, rank=8, seed=options.seed)
        for _ in range(options.steps):
            passed = student.forward_backward(batch, "cross_entropy")
            student.optim_step(tinker.AdamParams(learning_rate=rate)).result()
            losses.append(passed.result().metrics["loss:sum"] / learned)
        sampling = student.save_weights_and_get_sampling_client()
        likeliest = tinker.SamplingParams(max_tokens=24, stop=["\n"], temperature=0.0)
        for name, client in {"teacher": teacher, "student": sampling}.items():
            answer = client.sample(prompt, 1, likeliest).result().sequences[0].text(tokenizer)
            write(f"the {name}: twos:{answer.rstrip()}")
    draw("cross-entropy with the teacher, per token", losses)
    return losses


if __name__ == "__main__":
    main()
