"""Reinforcement learning on Ray: workers sample and score, this process alone trains."""

from __future__ import annotations

import re
from typing import Any

import tinker_sync as tinker
from tinker_sync import data

MODEL, RATE = "tinker-sync/tiny", 1.5e-3  # a large model takes a rate of about 1e-4
ANIMALS = ("owl", "frog", "bee", "horse")
STEPS, GROUP, WORKERS = 12, 16, 4
Rollout = tuple[tinker.ModelInput, list[tinker.SampledSequence], list[float]]


def roll_out(sampling: tinker.SamplingClient, animal: str) -> Rollout:
    """Sample a group of stories, and reward those that name the animal. Runs in a worker of Ray.

    Return the prompt, the stories and their rewards.
    """
    from tinker_sync.ray import share_limits

    share_limits(sampling)  # when the server refuses one worker, all of them pause
    tokenizer = sampling.get_tokenizer()
    chat = [{"role": "user", "content": f"Tell me a story about the {animal}."}]
    prompt = tinker.ModelInput.from_chat(chat, tokenizer)
    params = tinker.SamplingParams(max_tokens=72, stop=["<|im_end|>"])
    stories = list(sampling.sample(prompt, GROUP, params).result().sequences)
    texts = [story.text(tokenizer).lower() for story in stories]
    return prompt, stories, [float(animal in re.findall("[a-z]+", text)) for text in texts]


def main() -> None:
    """Sample rollouts in the workers and train on them, step by step."""
    import ray

    own = not ray.is_initialized()
    if own:
        ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    # Ray replaces a worker that dies, and runs its rollout again.
    remote: Any = ray.remote(num_cpus=1, max_retries=-1)(roll_out)
    with tinker.ServiceClient(base_url="local") as service:
        training = service.create_lora_training_client(MODEL, rank=16, seed=1)
        for step in range(STEPS):
            sampling = training.save_weights_and_get_sampling_client().result()
            rollouts: list[Rollout] = ray.get([remote.remote(sampling, animal) for animal in ANIMALS])
            batch, earned = [], []
            for prompt, stories, rewards in rollouts:
                mean = sum(rewards) / len(rewards)
                batch += data.from_samples(prompt, stories, [reward - mean for reward in rewards])
                earned += rewards
            training.forward_backward(batch, "importance_sampling")
            training.optim_step(tinker.AdamParams(learning_rate=RATE)).result()
            mean = sum(earned) / len(earned)
            print(f"step {step:2}  mean reward {mean:.2f}  {'#' * round(60 * mean)}", flush=True)
    if own:
        ray.shutdown()


if __name__ == "__main__":
    main()
