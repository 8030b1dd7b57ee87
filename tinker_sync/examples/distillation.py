"""Distillation: a student learns a teacher's likeliest tokens at each position, with their probabilities."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

import tinker_sync as tinker
from tinker_sync import data

MODEL, RATE = "tinker-sync/tiny", 5e-3  # a large model takes a rate of about 2e-4
STEPS, TEXTS, TOP = 25, 16, 8


def train_teacher(service: tinker.ServiceClient) -> tinker.SamplingClient:
    """Teach a model to count by twos, and return a client that samples from it."""
    training = service.create_lora_training_client(MODEL, rank=16, seed=1)
    tokenizer = training.get_tokenizer()
    rng = random.Random(1)
    for _ in range(15):
        starts = [rng.randrange(60) for _ in range(24)]
        texts = [" ".join(str(start + 2 * n) for n in range(6)) for start in starts]
        batch = [data.from_completion("twos:", f" {text}\n", tokenizer) for text in texts]
        training.forward_backward(batch, "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=RATE)).result()
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


def main() -> None:
    """Train a student on texts that a trained teacher has written and scored."""
    with tinker.ServiceClient(base_url="local") as service:
        teacher = train_teacher(service)
        tokenizer = teacher.get_tokenizer()
        prompt = tinker.ModelInput.from_text("twos:", tokenizer)
        params = tinker.SamplingParams(max_tokens=24, stop=["\n"], seed=1)
        one = tinker.SamplingParams(max_tokens=1)
        written = [each.tokens for each in teacher.sample(prompt, TEXTS, params).result().sequences]
        inputs = [tinker.ModelInput.from_ints([*prompt.to_ints(), *answer]) for answer in written]
        scores = [teacher.sample(each, 1, one, True, topk_prompt_logprobs=TOP) for each in inputs]
        batch = [
            soften(prompt, answer, score.result()) for answer, score in zip(written, scores, strict=True)
        ]
        student = service.create_lora_training_client(MODEL, rank=8, seed=1)
        for step in range(STEPS):
            passed = student.forward_backward(batch, "cross_entropy")
            student.optim_step(tinker.AdamParams(learning_rate=RATE)).result()
            loss = passed.result().metrics["loss:mean"]
            if step % 3 == 0:
                print(f"step {step:2}  cross-entropy with the teacher {loss:.2f}  {'#' * round(10 * loss)}")
        sampling = student.save_weights_and_get_sampling_client()
        likeliest = tinker.SamplingParams(max_tokens=24, stop=["\n"], temperature=0.0)
        for name, client in {"teacher": teacher, "student": sampling}.items():
            answer = client.sample(prompt, 1, likeliest).result().sequences[0].text(tokenizer)
            print(f"the {name}: twos:{answer.rstrip()}")


if __name__ == "__main__":
    main()
