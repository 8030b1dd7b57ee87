"""What the demo teaches: two tasks that the built-in model was never shown. Pure functions of seeds.

Sorting is taught by examples: ``sort: 5203 ->`` is to be continued with `` 0235``. To tell a story about the
animal that was asked for is taught by reward alone: the model can tell stories, and does so about anything.
"""

from __future__ import annotations

import random
import re
from typing import Final, NamedTuple

ANIMALS: Final = ("dog", "cat", "cow", "duck", "sheep", "horse", "pig", "frog", "owl", "lion", "bee", "goat")
_EXAM: Final = "exam"


class Problem(NamedTuple):
    """What is asked, and the right answer."""

    prompt: str
    answer: str


def draw(seed: int, step: int | str) -> random.Random:
    """The numbers of one step: they depend on nothing that happened before it.

    >>> draw(0, 7).random() == draw(0, 7).random() != draw(0, 8).random()
    True
    """
    return random.Random(f"{seed}/{step}")  # noqa: S311  # nothing is secret


def sorting(rng: random.Random) -> Problem:
    """Three to five digits, to be sorted.

    >>> sorting(random.Random(3))
    Problem(prompt='sort: 982 ->', answer=' 289')
    """
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(3, 5)))
    return Problem(f"sort: {digits} ->", f" {''.join(sorted(digits))}")


def sorting_batch(seed: int, step: int, size: int) -> list[Problem]:
    """What is learnt from in one step. Never a problem of the exam."""
    rng, asked = draw(seed, step), set(sorting_exam())
    found: list[Problem] = []
    while len(found) < size:
        problem = sorting(rng)
        if problem not in asked:
            found.append(problem)
    return found


def sorting_exam(size: int = 40) -> list[Problem]:
    """The same problems in every run, of five digits each."""
    rng = draw(0, _EXAM)
    found: list[Problem] = []
    while len(found) < size:
        problem = sorting(rng)
        if len(problem.answer) > 5:
            found.append(problem)
    return found


def story_prompt(animal: str) -> str:
    """A chat in which somebody asks for a story, in the form that the built-in model and Qwen know.

    >>> story_prompt("owl")
    '<|im_start|>user\\nTell me a story about an owl.<|im_end|>\\n<|im_start|>assistant\\n'
    """
    article = "an" if animal[0] in "aeiou" else "a"
    asked = f"Tell me a story about {article} {animal}."
    return f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"


def story_animals(seed: int, step: int, size: int) -> list[str]:
    """Which animals are asked for in one step: each in its turn, in an order that the seed decides."""
    order = draw(seed, "animals").sample(ANIMALS, len(ANIMALS))
    return [order[(step * size + number) % len(order)] for number in range(size)]


def story_reward(animal: str, text: str, *, ended: bool) -> float:
    """1 for a story that speaks of this animal and of no other, and that comes to an end; else less.

    >>> story_reward("owl", "The owl sang.", ended=True), story_reward("owl", "The owl sang", ended=False)
    (1.0, 0.0)
    >>> story_reward("owl", "A cow saw an owl.", ended=True), story_reward("owl", "A cow sang.", ended=True)
    (0.5, 0.0)
    """
    words = re.findall(r"[a-z]+", text.lower())
    if animal not in words or not ended or not text.endswith((".", "!", "?", '"')):
        return 0.0
    return 0.5 if any(other in words for other in ANIMALS if other != animal) else 1.0
