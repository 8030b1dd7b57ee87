"""Sums, copies and reversals: problems with one correct answer, as lines and as chats."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, NamedTuple

from benchmarks.tiny_model.page import Page, is_held_out
from benchmarks.tiny_model.words import ANIMALS, COLOURS, THINGS

_WORDS: Final = (*COLOURS, *(row[0] for row in ANIMALS), *(row[0] for row in THINGS))


class Problem(NamedTuple):
    """A prompt and its answer; together they form a line such as ``Q: 23+45=68``."""

    prompt: str
    answer: str


def addition(rng: random.Random) -> Problem:
    """Draw a sum of two numbers below 100.

    >>> addition(random.Random(1))
    Problem(prompt='Q: 17+72=', answer='89')
    """
    one, two = rng.randrange(100), rng.randrange(100)
    return Problem(f"Q: {one}+{two}=", str(one + two))


def subtraction(rng: random.Random) -> Problem:
    """Draw a difference of two numbers below 100; the result is never negative."""
    two, one = sorted((rng.randrange(100), rng.randrange(100)))
    return Problem(f"Q: {one}-{two}=", str(one - two))


def _items(rng: random.Random) -> tuple[list[str], str]:
    """Draw the items to copy or reverse, and their separator."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.sample(_WORDS, rng.randint(2, 5)), " "
    if kind == 1:
        return [rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 8))], " "
    return [rng.choice("0123456789") for _ in range(rng.randint(2, 8))], ""


def copy(rng: random.Random) -> Problem:
    """Draw items to copy."""
    items, between = _items(rng)
    return Problem(f"copy: {between.join(items)} ->", f" {between.join(items)}")


def reverse(rng: random.Random) -> Problem:
    """Draw items to reverse."""
    items, between = _items(rng)
    return Problem(f"reverse: {between.join(items)} ->", f" {between.join(items[::-1])}")


KINDS: Final[dict[str, Callable[[random.Random], Problem]]] = {
    "addition": addition,
    "subtraction": subtraction,
    "copy": copy,
    "reverse": reverse,
}


def draw(kind: str, rng: random.Random, *, held_out: bool) -> Problem:
    """Draw a problem of a kind, from those held out from training, or from the others."""
    while True:
        problem = KINDS[kind](rng)
        if is_held_out(problem.prompt) == held_out:
            return problem


def page(kind: str, rng: random.Random) -> Page:
    """Draw a page of training problems of a kind, one on each line."""
    found = Page()
    for _ in range(rng.randint(1, 6)):
        prompt, answer = draw(kind, rng, held_out=False)
        start = prompt.index(":") + 2
        end = len(prompt) - (1 if prompt.endswith("=") else 3)
        found.write(prompt[:start]).write_random(prompt[start:end]).write(f"{prompt[end:]}{answer}\n")
    return found


def question(kind: str, problem: Problem) -> tuple[str, str, str, str]:
    """Phrase a problem for a chat: text before, the problem, text after, and the answer."""
    if kind in ("addition", "subtraction"):
        bare = problem.prompt.removeprefix("Q: ").removesuffix("=")
        return "What is ", bare, "?", f"{bare}={problem.answer}"
    items = problem.prompt.partition(": ")[2].removesuffix(" ->")
    return f"{kind.capitalize()}: ", items, "", problem.answer.strip()


def as_chat(kind: str, problem: Problem) -> Problem:
    """Return the problem as the prompt of a one-turn chat, with its answer.

    >>> as_chat("addition", Problem("Q: 2+3=", "5")).answer
    '2+3=5'
    """
    before, given, after, answer = question(kind, problem)
    page = Page().turn("user").write(before + given + after).end_turn().turn("assistant")
    return Problem(page.text, answer)
