"""The training documents of the built-in model: an endless stream, the same for the same seed.

No external data is used: stories come from a grammar, facts from a table, problems from their tasks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final

from benchmarks.tiny_model import tasks, words
from benchmarks.tiny_model.page import Page, is_held_out
from benchmarks.tiny_model.stories import Story, tell_story


def draw_story(rng: random.Random, *, held_out: bool) -> Story:
    """Draw a story from those held out from training, or from the others."""
    while True:
        found = tell_story(rng)
        if is_held_out(found.text) == held_out:
            return found


def _story(rng: random.Random) -> Page:
    found = draw_story(rng, held_out=False)
    page = Page().write(found.text + "\n")
    for question, answer in rng.sample(found.questions, min(len(found.questions), rng.randint(0, 3))):
        page.write(f"Q: {question}\nA: {answer}\n")
    return page


def _facts(rng: random.Random) -> Page:
    page = Page()
    plain = rng.random() < 0.3
    for question, answer, sentence in rng.sample(words.FACTS, rng.randint(1, 5)):
        if plain:
            page.write(f"{sentence}\n")
        else:
            page.write("Q: ").write_random(question).write(f"\nA: {answer}\n")
    return page


def _counting(rng: random.Random) -> Page:
    page, step = Page(), rng.choice((1, 1, 2, 5, 10))
    start = rng.randrange(0, 80)
    return page.write_random(str(start)).write(
        "".join(f", {start + step * n}" for n in range(1, rng.randint(4, 9))) + "\n"
    )


_ASIDES: Final = (
    ("Hello!", "Hello! How can I help you?"),
    ("Good morning.", "Good morning! What can I do for you?"),
    ("Who are you?", "I am a very small language model."),
    ("What can you do?", "I can tell stories, add numbers, and copy or reverse words."),
    ("Thank you.", "You are welcome."),
    ("Goodbye.", "Goodbye!"),
)
_SYSTEMS: Final = ("You are a helpful friend.", "Answer in few words.", "You are a kind teacher.")


def _exchange(rng: random.Random, page: Page) -> None:
    kind = rng.random()
    page.turn("user")
    if kind < 0.1:
        question, answer = rng.choice(_ASIDES)
        page.write(question)
    elif kind < 0.35:
        question, answer, sentence = rng.choice(words.FACTS)
        answer = rng.choice((f"{answer[0].upper()}{answer[1:]}.", sentence))
        page.write_random(question)
    elif kind < 0.75:
        task = rng.choice(tuple(tasks.KINDS))
        problem = tasks.draw(task, rng, held_out=False)
        before, given, after, answer = tasks.question(task, problem)
        if after:
            before = rng.choice((before, "How much is "))
        page.write(before).write_random(given).write(after)
    else:
        found = draw_story(rng, held_out=False)
        answer = found.text
        page.write(rng.choice(("Tell me a story.", "Please tell me a short story.", "A story, please.")))
    page.end_turn().turn("assistant").write(answer).end_turn()


def _chat(rng: random.Random) -> Page:
    page = Page()
    if rng.random() < 0.2:
        page.turn("system").write(rng.choice(_SYSTEMS)).end_turn()
    for _ in range(rng.randint(1, 3)):
        _exchange(rng, page)
    return page


def _problems(kind: str) -> Callable[[random.Random], Page]:
    return lambda rng: tasks.page(kind, rng)


# The shares are of documents. Stories are longest; problems take the most practice.
_MIXTURE: Final[tuple[tuple[int, Callable[[random.Random], Page]], ...]] = (
    (22, _story),
    (8, _facts),
    (3, _counting),
    (15, _chat),
    (18, _problems("addition")),
    (14, _problems("subtraction")),
    (7, _problems("copy")),
    (13, _problems("reverse")),
)


def documents(seed: int) -> Iterator[Page]:
    """Yield documents without end.

    >>> first = next(documents(0))
    >>> first.text == next(documents(0)).text
    True
    """
    rng = random.Random(seed)  # nothing is secret
    makers = [maker for _, maker in _MIXTURE]
    shares = [share for share, _ in _MIXTURE]
    while True:
        yield rng.choices(makers, shares)[0](rng)
