"""Reinforcement learning: no example is shown, a reward alone teaches which animal a story is about."""

from __future__ import annotations

import re

import tinker_sync as tinker
from tinker_sync import data, losses

MODEL, RATE = "tinker-sync/tiny", 1.5e-3  # a large model takes a rate of about 1e-4
ANIMALS = ("owl", "frog", "bee", "horse")
STEPS, PROMPTS, GROUP = 18, 2, 16


def make_prompt(animal: str, tokenizer: tinker.Tokenizer) -> tinker.ModelInput:
    """Return a prompt for a story. The tiny model writes about any animal at first."""
    chat = [
        {"role": "user", "content": f"Tell me a story about {'an' if animal == 'owl' else 'a'} {animal}."}
    ]
    return tinker.ModelInput.from_chat(chat, tokenizer)


def reward(animal: str, story: str, *, ended: bool) -> float:
    """Return 1 for a story that names the animal, repeats no sentence and has an end, else 0."""
    sentences = [sentence.strip() for sentence in re.split(r"[.!?]", story.lower()) if sentence.strip()]
    named = animal in re.findall(r"[a-z]+", story.lower())
    return float(named and ended and len(set(sentences)) == len(sentences))


def tell(sampling: tinker.SamplingClient, animal: str) -> str:
    """Return the likeliest story."""
    tokenizer = sampling.get_tokenizer()
    params = tinker.SamplingParams(max_tokens=72, temperature=0.0, stop=["<|im_end|>"])
    response = sampling.sample(make_prompt(animal, tokenizer), 1, params).result()
    return response.sequences[0].text(tokenizer).strip()


def main() -> None:
    """Sample groups of stories, and learn from the differences of rewards within a group."""
    with tinker.ServiceClient(base_url="local") as service:
        training = service.create_lora_training_client(MODEL, rank=16, seed=1)
        tokenizer = training.get_tokenizer()
        before = {animal: tell(training.save_weights_and_get_sampling_client(), animal) for animal in ANIMALS}
        print("reward: 1 for a story that names its animal, repeats no sentence and has an end")
        for step in range(STEPS):
            sampling = training.save_weights_and_get_sampling_client()
            animals = [ANIMALS[(step * PROMPTS + n) % len(ANIMALS)] for n in range(PROMPTS)]
            prompts = [make_prompt(animal, tokenizer) for animal in animals]
            groups = []
            for n, prompt in enumerate(prompts):
                params = tinker.SamplingParams(max_tokens=72, stop=["<|im_end|>"], seed=step * 100 + n)
                groups.append(sampling.sample(prompt, GROUP, params))
            batch, earned = [], []
            for animal, prompt, group in zip(animals, prompts, groups, strict=True):
                stories = group.result().sequences
                rewards = [
                    reward(animal, story.text(tokenizer), ended=story.stop_reason == "stop")
                    for story in stories
                ]
                mean = sum(rewards) / len(rewards)
                batch += data.from_samples(prompt, stories, [each - mean for each in rewards])
                earned += rewards
            passed = training.forward_backward(batch, "importance_sampling")
            training.optim_step(tinker.AdamParams(learning_rate=RATE)).result()
            mean = sum(earned) / len(earned)
            found = losses.divergence(batch, passed.result())  # about 0, or the sampler is not the trainer
            kl = found.tokens.kl_sampler_trainer_k3
            print(f"step {step:2}  KL {kl:.1e}  mean reward {mean:.2f}  {'#' * round(60 * mean)}", flush=True)
        sampling = training.save_weights_and_get_sampling_client()
        for animal in ANIMALS:
            print(
                f"\na story about: {animal}\n  before: {before[animal]}\n  after:  {tell(sampling, animal)}"
            )


if __name__ == "__main__":
    main()
