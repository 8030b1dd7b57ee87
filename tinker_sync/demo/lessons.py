"""The two tasks of the demo, which are not in the training data of the built-in model.

In the first, the model learns from examples to sort digits: it continues ``sort: 5203 ->`` with `` 0235``. In
the second, it learns from rewards alone to write a story about the animal that the prompt names. An untrained
model writes stories about any animal.

The functions are pure, and their random choices depend on seeds. `RECIPE` is a program for users with the
first task and a simpler second one.
"""

from __future__ import annotations

import random
import re
from typing import Final, NamedTuple

ANIMALS: Final = ("dog", "cat", "cow", "duck", "sheep", "horse", "pig", "frog", "owl", "lion", "bee", "goat")
_EXAM: Final = "exam"


class SortingProblem(NamedTuple):
    """A prompt and its right answer."""

    prompt: str
    answer: str


def make_generator(seed: int, step: int | str) -> random.Random:
    """Return the random generator of one step. Its numbers do not depend on earlier steps.

    >>> make_generator(0, 7).random() == make_generator(0, 7).random() != make_generator(0, 8).random()
    True
    """
    return random.Random(f"{seed}/{step}")  # noqa: S311  # not a secret


def make_problem(rng: random.Random) -> SortingProblem:
    """Make a problem of three to five digits.

    >>> make_problem(random.Random(3))
    SortingProblem(prompt='sort: 982 ->', answer=' 289')
    """
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(3, 5)))
    return SortingProblem(f"sort: {digits} ->", f" {''.join(sorted(digits))}")


def make_batch(seed: int, step: int, size: int) -> list[SortingProblem]:
    """Return the problems of one training step, without those of `make_exam`."""
    rng, exam = make_generator(seed, step), set(make_exam())
    found: list[SortingProblem] = []
    while len(found) < size:
        problem = make_problem(rng)
        if problem not in exam:
            found.append(problem)
    return found


def make_exam(size: int = 40) -> list[SortingProblem]:
    """Return the problems of the test before and after training: five digits each, the same in every run."""
    rng = make_generator(0, _EXAM)
    found: list[SortingProblem] = []
    while len(found) < size:
        problem = make_problem(rng)
        if len(problem.answer) > 5:
            found.append(problem)
    return found


def make_story_prompt(animal: str) -> str:
    """Return a chat prompt for a story, in the format of the built-in model and of Qwen.

    >>> make_story_prompt("owl")
    '<|im_start|>user\\nTell me a story about an owl.<|im_end|>\\n<|im_start|>assistant\\n'
    """
    article = "an" if animal[0] in "aeiou" else "a"
    request = f"Tell me a story about {article} {animal}."
    return f"<|im_start|>user\n{request}<|im_end|>\n<|im_start|>assistant\n"


def choose_animals(seed: int, step: int, size: int) -> list[str]:
    """Return the animals of one step. The seed decides on an order, in which the steps take the animals."""
    order = make_generator(seed, "animals").sample(ANIMALS, len(ANIMALS))
    return [order[(step * size + number) % len(order)] for number in range(size)]


def compute_reward(animal: str, text: str, *, ended: bool) -> float:
    """Return 1 for a complete story about this animal alone, 0.5 if it names others too, else 0.

    >>> compute_reward("owl", "The owl sang.", ended=True), compute_reward("owl", "The owl sang", ended=False)
    (1.0, 0.0)
    >>> compute_reward("owl", "A cow saw an owl.", ended=True)
    0.5
    """
    words = re.findall(r"[a-z]+", text.lower())
    if animal not in words or not ended or not text.endswith((".", "!", "?", '"')):
        return 0.0
    return 0.5 if any(other in words for other in ANIMALS if other != animal) else 1.0


RECIPE: Final = """\
import random
import numpy as np
import tinker_sync as tinker
from tinker_sync.data import from_completion, from_samples

with tinker.ServiceClient(base_url="local") as service:
    training = service.create_lora_training_client("tinker-sync/tiny", rank=16)
    tokenizer = training.get_tokenizer()
    for step in range(80):  # supervised: learn from right answers
        data = []
        for _ in range(64):
            n = f"{random.randrange(100000):05}"
            asked, answer = f"sort: {n} ->", f" {''.join(sorted(n))}\\n"
            data.append(from_completion(asked, answer, tokenizer))
        training.forward_backward(data, "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=5e-3)).result()
    path = training.save_state("sorted").result().path  # others can resume

    training = service.create_training_client_from_state_with_optimizer(path)
    prompt = tinker.ModelInput.from_text("It was a sunny day.", tokenizer)
    params = tinker.SamplingParams(max_tokens=48)
    for step in range(20):  # reinforcement: learn from rewards
        sampling = training.save_weights_and_get_sampling_client()
        sampled = sampling.sample(prompt, 32, params).result()
        texts = [sequence.text(tokenizer) for sequence in sampled.sequences]
        rewards = np.array([float("owl" in text) for text in texts])
        data = from_samples(prompt, sampled, rewards - rewards.mean())
        training.forward_backward(data, "importance_sampling")
        training.optim_step(tinker.AdamParams(learning_rate=2e-3)).result()
        print(step, rewards.mean())
"""

HOSTED: Final = """\
The same on the hosted service: put your key into TINKER_API_KEY, write ServiceClient() without base_url, \
and name a model that it offers (tinker-sync model list) with a learning rate that suits it, such as 1e-4.\
"""
