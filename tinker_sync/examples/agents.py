"""Reinforcement learning of an agent with several turns, trained only through chats that pass a gateway."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import urlopen

import numpy as np

import tinker_sync as tinker

MODEL, RATE = "tinker-sync/tiny", 1.5e-3  # a large model takes a rate of about 1e-4
ANIMALS = ("owl", "frog", "bee", "horse")
STEPS, TASKS, GROUP = 14, 2, 12
SETTINGS = tinker.SamplingParams(max_tokens=72)


def make_chat(base_url: str) -> Callable[[list[Any]], str]:
    """Return a function that sends a chat and returns the answer, as any program that speaks chat does."""

    def ask(messages: list[Any]) -> str:
        body = json.dumps({"model": "any", "messages": messages}).encode()
        with urlopen(f"{base_url}/chat/completions", body) as answer:  # noqa: S310  # the gateway's own address
            said: str = json.load(answer)["choices"][0]["message"]["content"]
        return said

    return ask


def run_agent(base_url: str, task: tuple[str, str]) -> None:
    """Ask for two stories in one chat. The agent knows nothing of tokens or training."""
    ask, messages = make_chat(base_url), []
    for animal in task:
        question = f"Tell me a story about {'an' if animal == 'owl' else 'a'} {animal}."
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": ask(messages)})


def reward(animal: str, story: str) -> float:
    """Return 1 for a story that names the animal, repeats no sentence and has an end, else 0."""
    sentences = [sentence.strip() for sentence in re.split(r"[.!?]", story.lower()) if sentence.strip()]
    named = animal in re.findall(r"[a-z]+", story.lower())
    ended = story.rstrip().endswith((".", "!", "?", '"'))
    return float(named and ended and len(set(sentences)) == len(sentences))


def main() -> None:
    """Let groups of agents do the same task, and learn from the differences of rewards in each turn."""
    with tinker.ServiceClient(base_url="local") as service:
        training = service.create_lora_training_client(MODEL, rank=16, seed=1)
        sampling = training.save_weights_and_get_sampling_client()
        with sampling.endpoint(sampling_params=SETTINGS) as gateway, ThreadPoolExecutor(32) as agents:
            print("reward: of each of two stories, 1 if it names its animal, repeats nothing and has an end")
            for step in range(STEPS):
                batch, earned = [], []
                for n in range(TASKS):
                    first = (step * TASKS + n) % len(ANIMALS)
                    task = ANIMALS[first], ANIMALS[first - 1]
                    url = gateway.openai_base_url(f"task {n}")
                    for done in [agents.submit(run_agent, url, task) for _ in range(GROUP)]:
                        done.result()
                    group = gateway.trajectories(f"task {n}")
                    stories = [[turn.message["content"] for turn in each.turns] for each in group]
                    rewards = np.array([list(map(reward, task, told)) for told in stories])
                    advantages = rewards - rewards.mean(axis=0)  # of each turn over its group
                    for trajectory, numbers in zip(group, advantages, strict=True):
                        batch += trajectory.data(numbers)
                    earned.append(rewards.mean())
                training.forward_backward(batch, "importance_sampling")
                training.optim_step(tinker.AdamParams(learning_rate=RATE)).result()
                gateway.clear()
                gateway.use(training.save_weights_and_get_sampling_client(), version=step + 1)
                mean = sum(earned) / len(earned)
                print(f"step {step:2}  mean reward {mean:.2f}  {'#' * round(60 * mean)}", flush=True)


if __name__ == "__main__":
    main()
