"""Reinforcement learning on Ray: workers sample and score, this process alone trains."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import tinker_sync as tinker
from tinker_sync import data
from tinker_sync.demo.lessons import choose_animals, compute_reward, make_story_prompt
from tinker_sync.examples._shared import connect, draw, parse, write

WORKERS = 4
GROUP = 16
ANIMALS = 2
Rollout = tuple[tinker.ModelInput, list[tinker.SampledSequence], list[float]]


def roll_out(sampling: tinker.SamplingClient, animal: str) -> Rollout:
    """Sample a group of stories about an animal, and score them. Runs in a worker of Ray.

    Return the prompt, the stories and their rewards.
    """
    from tinker_sync.ray import share_limits

    share_limits(sampling)  # when the server refuses one worker, all of them pause
    tokenizer = sampling.get_tokenizer()
    prompt = tinker.ModelInput.from_text(make_story_prompt(animal), tokenizer)
    params = tinker.SamplingParams(max_tokens=72, stop=["<|im_end|>"])
    stories = sampling.sample(prompt, GROUP, params).result().sequences
    earned = [
        compute_reward(animal, story.text(tokenizer), ended=story.stop_reason == "stop") for story in stories
    ]
    return prompt, list(stories), earned


def main(
    argv: Sequence[str] | None = None, *, workers: int = WORKERS, ahead: int = 0, prompts: int = ANIMALS
) -> list[float]:
    """Sample rollouts and train on them, step by step. Return the mean reward of each step.

    A step has `prompts` animals, with one rollout for each. With `ahead=1`, the rollouts of the next step are
    sampled while this step trains.
    """
    import ray

    options = parse(argv, __doc__, steps=12)
    own = not ray.is_initialized()
    if own:
        ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
    # Ray replaces a worker that dies, and runs its rollout again.
    remote: Any = ray.remote(num_cpus=1, max_retries=-1)(roll_out)
    rewards: list[float] = []
    started_s = time.monotonic()
    with connect(options) as service:
        training = service.create_lora_training_client(options.model, rank=16, seed=options.seed)
        under_way: list[list[Any]] = []
        for step in range(options.steps + ahead):
            if step < options.steps:
                sampling = training.save_weights_and_get_sampling_client().result()
                animals = choose_animals(options.seed, step, prompts)
                under_way.append([remote.remote(sampling, animal) for animal in animals])
            if step < ahead:
                continue
            rollouts: list[Rollout] = ray.get(under_way.pop(0))
            batch, seen = [], []
            for prompt, stories, earned in rollouts:
                mean = sum(earned) / len(earned)
                batch += data.from_samples(prompt, stories, [reward - mean for reward in earned])
                seen += earned
            passed = training.forward_backward(batch, "importance_sampling")
            training.optim_step(tinker.AdamParams(learning_rate=options.rate(1.5e-3, 1e-4))).result()
            passed.result()
            rewards.append(sum(seen) / len(seen))
    step_s = (time.monotonic() - started_s) / options.steps
    write(f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f} with {workers} workers, {step_s:.2f} s a step")
    draw("mean reward", rewards)
    if own:
        ray.shutdown()
    return rewards


if __name__ == "__main__":
    main()
