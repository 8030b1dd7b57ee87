"""Reinforcement learning: no example is shown, a reward alone teaches which animal a story is about."""

from __future__ import annotations

from collections.abc import Sequence

import tinker_sync as tinker
from tinker_sync import data
from tinker_sync.demo.lessons import choose_animals, compute_reward, make_story_prompt
from tinker_sync.examples._shared import connect, draw, parse, write

ANIMALS = 2
GROUP = 16


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Sample groups of stories, and learn from the differences of rewards within a group.

    Return the mean reward of each step.
    """
    options = parse(argv, __doc__, steps=12)
    rewards: list[float] = []
    with connect(options) as service:
        training = service.create_lora_training_client(options.model, rank=16, seed=options.seed)
        tokenizer = training.get_tokenizer()
        params = tinker.SamplingParams(max_tokens=72, stop=["<|im_end|>"])
        for step in range(options.steps):
            sampling = training.save_weights_and_get_sampling_client()
            animals = choose_animals(options.seed, step, ANIMALS)
            prompts = [
                tinker.ModelInput.from_text(make_story_prompt(animal), tokenizer) for animal in animals
            ]
            groups = [sampling.sample(prompt, GROUP, params) for prompt in prompts]
            batch, seen = [], []
            for animal, prompt, group in zip(animals, prompts, groups, strict=True):
                stories = group.result().sequences
                earned = [
                    compute_reward(animal, story.text(tokenizer), ended=story.stop_reason == "stop")
                    for story in stories
                ]
                mean = sum(earned) / len(earned)
                batch += data.from_samples(prompt, stories, [reward - mean for reward in earned])
                seen += earned
            passed = training.forward_backward(batch, "importance_sampling")
            rate = options.rate(1.5e-3, 1e-4)
            training.optim_step(tinker.AdamParams(learning_rate=rate)).result()
            passed.result()
            rewards.append(sum(seen) / len(seen))
        sampling = training.save_weights_and_get_sampling_client()
        prompt = tinker.ModelInput.from_text(make_story_prompt("owl"), tokenizer)
        story = sampling.sample(prompt, 1, params).result().sequences[0].text(tokenizer)
    write(f"a story about: owl\n  {story.strip()}")
    draw("mean reward", rewards)
    return rewards


if __name__ == "__main__":
    main()
