"""Fine-tune a model on chats: an evaluation, checkpoints, and a resume as after a crash."""

from __future__ import annotations

import random
from collections.abc import Sequence

import tinker_sync as tinker
from tinker_sync import data
from tinker_sync.examples._shared import Options, connect, draw, parse, write

BATCH = 32
HELD_OUT = 100


def make_chat(rng: random.Random, *, at_least: int, below: int) -> list[dict[str, str]]:
    """Return a chat with a task that is new to the tiny model: to write a word without its vowels.

    The word has `at_least` letters or more, but fewer than `below`.
    """
    word = "".join(rng.choice("abcdefghijklmnop") for _ in range(rng.randint(at_least, below - 1)))
    plain = "".join(letter for letter in word if letter not in "aeio")
    return [
        {"role": "user", "content": f"Drop the vowels: {word}"},
        {"role": "assistant", "content": plain or "-"},
    ]


def evaluate(training: tinker.TrainingClient, chats: Sequence[list[dict[str, str]]]) -> float:
    """Return the share of chats that the model answers as the assistant does."""
    tokenizer = training.get_tokenizer()
    sampling = training.save_weights_and_get_sampling_client()
    params = tinker.SamplingParams(max_tokens=16, temperature=0.0, stop=["<|im_end|>"])
    prompts = [
        tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=False)
        for chat in chats
    ]
    futures = [sampling.sample(tinker.ModelInput.from_ints(prompt), 1, params) for prompt in prompts]
    answers = [future.result().sequences[0].text(tokenizer).strip() for future in futures]
    return sum(answer == chat[1]["content"] for answer, chat in zip(answers, chats, strict=True)) / len(chats)


def train(training: tinker.TrainingClient, options: Options, steps: range, losses: list[float]) -> None:
    """Train for the given steps, and append the loss of each to `losses`.

    The number of a step determines its data, so a resumed run repeats no data.
    """
    tokenizer = training.get_tokenizer()
    for step in steps:
        rng = random.Random(f"{options.seed} {step}")
        batch = [data.from_chat(make_chat(rng, at_least=3, below=6), tokenizer) for _ in range(BATCH)]
        passed = training.forward_backward(batch, "cross_entropy")
        rate = options.rate(5e-3, 2e-4) * min(1.0, 2 * (1 - step / options.steps))
        training.optim_step(tinker.AdamParams(learning_rate=rate)).result()
        trained = sum(float(datum.loss_fn_inputs["weights"].to_numpy().sum()) for datum in batch)
        losses.append(passed.result().metrics["loss:sum"] / trained)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train for half of the steps, then resume from a checkpoint in a new client. Return the losses."""
    options = parse(argv, __doc__, steps=60)
    held_out = [make_chat(random.Random(f"held out {n}"), at_least=3, below=6) for n in range(HELD_OUT)]
    losses: list[float] = []
    with connect(options) as service:
        first = service.create_lora_training_client(options.model, rank=16, seed=options.seed)
        write(f"before: {evaluate(first, held_out):.0%} of {HELD_OUT} new chats right")
        train(first, options, range(options.steps // 2), losses)
        checkpoint = first.save_state(f"step-{len(losses)}").result().path  # a resume needs only the path
        resumed = service.create_training_client_from_state_with_optimizer(checkpoint)
        write(f"resumed from {checkpoint}")
        train(resumed, options, range(options.steps // 2, options.steps), losses)
        write(f"after: {evaluate(resumed, held_out):.0%} of {HELD_OUT} new chats right")
    draw("loss per token", losses)
    return losses


if __name__ == "__main__":
    main()
