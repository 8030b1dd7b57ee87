"""Sums, copies and reversals: problems with one answer, how they are written, and which are held out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, NamedTuple

from tinker_sync.local.tiny.page import Page, held_out
from tinker_sync.local.tiny.words import ANIMALS, COLOURS, THINGS

_WORDS: Final = (*COLOURS, *(row[0] for row in ANIMALS), *(row[0] for row in THINGS))


class Problem(NamedTuple):
    """What is asked and what is right; together they are a line, as in ``Q: 23+45=68``."""

    prompt: str
    answer: str


def addition(rng: random.Random) -> Problem:
    """Two numbers below 100.

    >>> addition(random.Random(1))
    Problem(prompt='Q: 17+72=', answer='89')
    """
    one, two = rng.randrange(100), rng.randrange(100)
    return Problem(f"Q: {one}+{two}=", str(one + two))


def subtraction(rng: random.Random) -> Problem:
    """The smaller of two numbers below 100 from the larger."""
    two, one = sorted((rng.randrange(100), rng.randrange(100)))
    return Problem(f"Q: {one}-{two}=", str(one - two))


def _items(rng: random.Random) -> tuple[list[str], str]:
    """Something to be copied or reversed, and what stands between its items."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.sample(_WORDS, rng.randint(2, 5)), " "
    if kind == 1:
        return [rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 8))], " "
    return [rng.choice("0123456789") for _ in range(rng.randint(2, 8))], ""


def copy(rng: random.Random) -> Problem:
    """The same again."""
    items, between = _items(rng)
    return Problem(f"copy: {between.join(items)} ->", f" {between.join(items)}")


def reverse(rng: random.Random) -> Problem:
    """The same from its end."""
    items, between = _items(rng)
    return Problem(f"reverse: {between.join(items)} ->", f" {between.join(items[::-1])}")


KINDS: Final[dict[str, Callable[[random.Random], Problem]]] = {
    "addition": addition,
    "subtraction": subtraction,
    "copy": copy,
    "reverse": reverse,
}


def draw(kind: str, rng: random.Random, *, asked_later: bool) -> Problem:
    """A problem of a kind, either one of those kept from training or one of the others."""
    while True:
        problem = KINDS[kind](rng)
        if held_out(problem.prompt) == asked_later:
            return problem


def page(kind: str, rng: random.Random) -> Page:
    """Some problems of a kind that may be trained on, one a line."""
    found = Page()
    for _ in range(rng.randint(1, 6)):
        prompt, answer = draw(kind, rng, asked_later=False)
        start = prompt.index(":") + 2
        end = len(prompt) - (1 if prompt.endswith("=") else 3)
        found.say(prompt[:start]).given(prompt[start:end]).say(f"{prompt[end:]}{answer}\n")
    return found


def question(kind: str, problem: Problem) -> tuple[str, str, str, str]:
    """How a problem is put in a chat: words before, the problem itself, words after, and the answer."""
    if kind in ("addition", "subtraction"):
        bare = problem.prompt.removeprefix("Q: ").removesuffix("=")
        return "What is ", bare, "?", f"{bare}={problem.answer}"
    items = problem.prompt.partition(": ")[2].removesuffix(" ->")
    return f"{kind.capitalize()}: ", items, "", problem.answer.strip()


def as_chat(kind: str, problem: Problem) -> Problem:
    """The prompt of a chat of one turn, and the answer.

    >>> as_chat("addition", Problem("Q: 2+3=", "5")).answer
    '2+3=5'
    """
    before, given, after, answer = question(kind, problem)
    page = Page().turn("user").say(before + given + after).end_turn().turn("assistant")
    return Problem(page.text, answer)
