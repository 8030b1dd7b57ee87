"""Fine-tune a model on chats, with an evaluation, a record of each step, and saves to resume from."""

from __future__ import annotations

import random
import tempfile

import tinker_sync as tinker
from tinker_sync import data

MODEL, RATE = "tinker-sync/tiny", 5e-3  # a large model takes a rate of about 2e-4
STEPS, BATCH, HELD_OUT = 60, 32, 100
Chat = list[dict[str, str]]


def make_chat(seed: str) -> Chat:
    """Return a chat with a task that is new to the tiny model: to write a word without its vowels."""
    rng = random.Random(seed)
    word = "".join(rng.choices("abcdefghijklmnop", k=rng.randint(3, 5)))
    answer = "".join(letter for letter in word if letter not in "aeio") or "-"
    return [
        {"role": "user", "content": f"Drop the vowels: {word}"},
        {"role": "assistant", "content": answer},
    ]


def evaluate(training: tinker.TrainingClient, chats: list[Chat]) -> float:
    """Return the share of chats that the model answers as the assistant does."""
    sampling = training.save_weights_and_get_sampling_client()
    params = tinker.SamplingParams(max_tokens=16, temperature=0.0, stop=["<|im_end|>"])
    items = sampling.map([chat[:1] for chat in chats], params, progress=False, on_error="raise")
    right = [item.texts[0].strip() == chat[1]["content"] for item, chat in zip(items, chats, strict=True)]
    return sum(right) / len(right)


def train(service: tinker.ServiceClient, directory: str, steps: int) -> tinker.TrainingClient:
    """Train up to `steps`, from the latest save in `directory` if there is one."""
    saves = service.checkpoints(directory, every=20)
    training, first = saves.resume() or (service.create_lora_training_client(MODEL, rank=16, seed=1), 0)
    if saves.latest:
        print(f"resumed after step {saves.latest.step} from {saves.latest.path}")
    tokenizer = training.get_tokenizer()
    with service.recorder(directory) as recorder:  # `tinker-sync plot DIRECTORY` draws its lines
        for step in range(first, steps):
            batch = [data.from_chat(make_chat(f"{step} {n}"), tokenizer) for n in range(BATCH)]
            passed = training.forward_backward(batch, "cross_entropy")
            rate = RATE * min(1.0, 2 * (1 - step / STEPS))
            training.optim_step(tinker.AdamParams(learning_rate=rate)).result()
            line = recorder.log(step, passed, learning_rate=rate)
            saves.after_step(training, step, score=line["loss:mean"])
            if step % 5 == 0:
                print(f"step {step:2}  loss {line['loss:mean']:.3f}  {'#' * round(8 * line['loss:mean'])}")
    return training


def main() -> None:
    """Train, start again in the middle, and show how the answers to new chats change."""
    held_out = [make_chat(f"held out {n}") for n in range(HELD_OUT)]
    with tinker.ServiceClient(base_url="local") as service, tempfile.TemporaryDirectory() as directory:
        training = train(service, directory, 0)
        print(f"before: {evaluate(training, held_out):.0%} of {len(held_out)} new chats are right")
        train(service, directory, STEPS // 2)
        print("broken off, and started again:")
        training = train(service, directory, STEPS)
        print(f"after: {evaluate(training, held_out):.0%} of {len(held_out)} new chats are right")


if __name__ == "__main__":
    main()
