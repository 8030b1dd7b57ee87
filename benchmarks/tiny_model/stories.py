"""Short stories in simple English, each built from a small plot, with questions about it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, NamedTuple

from benchmarks.tiny_model import words


class Story(NamedTuple):
    """A story with pairs of question and short answer."""

    text: str
    questions: tuple[tuple[str, str], ...]


class _Cast:
    """The people and things of a story, drawn once to keep the story consistent."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        girl = rng.random() < 0.5
        self.name = rng.choice(words.GIRLS if girl else words.BOYS)
        self.they, self.them, self.their = ("she", "her", "her") if girl else ("he", "him", "his")
        self.They = self.they.capitalize()
        self.friend = rng.choice(words.BOYS if girl else words.GIRLS)
        self.animal = rng.choice(words.ANIMALS)
        self.thing = rng.choice(words.THINGS)[0]
        self.colour, self.size = rng.choice(words.COLOURS), rng.choice(words.SIZES)
        self.place, self.other_place = rng.sample(words.PLACES, 2)
        self.spot = rng.choice(words.SPOTS)
        self.food = rng.choice(words.FOODS)
        self.mood = rng.choice(words.MOODS)
        self.weather, self.time = rng.choice(words.WEATHER), rng.choice(words.TIMES)
        self.move, self.deed, self.act = (
            rng.choice(table)[1] for table in (words.MOVES, words.DEEDS, words.ACTS)
        )

    @property
    def it(self) -> str:
        """The name of the thing, with its colour or size."""
        return f"{self.rng.choice((self.colour, self.size))} {self.thing}"

    def opening(self) -> str:
        """Draw a first sentence; it may be empty."""
        return self.rng.choice(
            (
                f"It was a {self.weather} {self.time}. ",
                f"One {self.weather} {self.time} {self.name} {self.move} to the {self.place}. ",
                f"{self.name} was {self.mood}. ",
                f"Once there was a {'girl' if self.they == 'she' else 'boy'} named {self.name}. ",
                "",
            )
        )

    def closing(self) -> str:
        """Draw a last sentence."""
        return self.rng.choice(
            (
                f"Then {self.they} went home and {self.act}.",
                f"{self.They} was very happy.",
                f"{self.name} and {self.friend} {self.act} all {self.time}.",
                f"At night {self.they} slept well.",
                f"It was a good {self.time}.",
                "The end.",
            )
        )


def _lost(c: _Cast) -> Story:
    it = c.it
    text = (
        f"{c.name} had a {it}. {c.They} lost the {c.thing} at the {c.place}. "
        f"{c.name} looked for the {c.thing} all {c.time}. Then {c.friend} found it {c.spot}. "
    )
    asked = (
        (f"What did {c.name} lose?", f"a {it}"),
        (f"Who found the {c.thing}?", c.friend),
        (f"Where was the {c.thing}?", c.spot),
    )
    return Story(text, asked)


def _gift(c: _Cast) -> Story:
    it = c.it
    text = (
        f"{c.friend} gave {c.name} a {it}. {c.name} was {c.mood} and said thank you. "
        f"{c.They} took the {c.thing} to the {c.place} and {c.act}. "
    )
    asked = (
        (f"What did {c.friend} give {c.name}?", f"a {it}"),
        (f"Where did {c.name} take the {c.thing}?", f"to the {c.place}"),
        (f"How was {c.name}?", c.mood),
    )
    return Story(text, asked)


def _animal(c: _Cast) -> Story:
    animal, _, sound, _ = c.animal
    text = (
        f"A {c.colour} {animal} lived near the {c.place}. Every {c.time} the {animal} said {sound}. "
        f"{c.name} gave the {animal} some {c.food}. The {animal} was not hungry any more. "
    )
    asked = (
        (f"What did {c.name} give the {animal}?", f"some {c.food}"),
        (f"What colour was the {animal}?", c.colour),
        (f"Where did the {animal} live?", f"near the {c.place}"),
    )
    return Story(text, asked)


def _trip(c: _Cast) -> Story:
    animal = c.animal[0]
    text = (
        f"{c.name} and {c.friend} {c.move} from the {c.place} to the {c.other_place}. It was {c.weather}. "
        f"There they saw a {c.size} {animal} and ate {c.food}. {c.friend} {c.act}. "
    )
    asked = (
        (f"Where did {c.name} and {c.friend} go?", f"to the {c.other_place}"),
        ("What did they see?", f"a {c.size} {animal}"),
        ("What did they eat?", c.food),
    )
    return Story(text, asked)


def _market(c: _Cast) -> Story:
    count = c.rng.choice(words.NUMBERS[1:6])
    plural = next(many for one, many in words.THINGS if one == c.thing)
    text = (
        f"{c.name} went to the market and bought {count} {c.colour} {plural}. "
        f"{c.They} gave one to {c.friend}. {c.friend} put it {c.spot} and {c.act}. "
    )
    asked = (
        (f"What did {c.name} buy?", f"{count} {c.colour} {plural}"),
        (f"Who got one from {c.name}?", c.friend),
    )
    return Story(text, asked)


def _wish(c: _Cast) -> Story:
    animal = c.animal[0]
    text = (
        f"{c.name} wanted a {animal}. {c.They} asked {c.their} mother every {c.time}. "
        f"One day there was a {c.size} {c.colour} {animal} {c.spot}. {c.name} {c.act} and hugged it. "
    )
    asked = (
        (f"What did {c.name} want?", f"a {animal}"),
        (f"Where was the {animal}?", c.spot),
        (f"What colour was the {animal}?", c.colour),
    )
    return Story(text, asked)


def _sentences(c: _Cast) -> Story:
    it, animal = c.it, c.animal[0]
    choices = (
        f"The {c.size} {animal} {c.act} at the {c.place}. ",
        f"{c.name} {c.deed} a {it} {c.spot}. ",
        f"{c.name} likes {c.food} and {c.rng.choice(words.FOODS)}. ",
        f"The {c.thing} is {c.colour} and the {animal} is {c.rng.choice(words.COLOURS)}. ",
        f"{c.friend} {c.move} to the {c.other_place} when it was {c.weather}. ",
        f"In the {c.time} {c.name} {c.act} with {c.their} {animal}. ",
        f"The {animal} did not want the {c.food}. ",
        f'"I have a {it}," said {c.name}. ',
        f'"Where is my {c.thing}?" asked {c.friend}. "It is {c.spot}." ',
        f"{c.name} was {c.mood}, but {c.friend} was {c.rng.choice(words.MOODS)}. ",
    )
    return Story("".join(c.rng.sample(choices, c.rng.randint(1, 4))), ())


_PLOTS: Final[tuple[Callable[[_Cast], Story], ...]] = (
    _lost,
    _gift,
    _animal,
    _trip,
    _market,
    _wish,
    _sentences,
    _sentences,
)


def tell_story(rng: random.Random) -> Story:
    """Draw a story.

    >>> tell_story(random.Random(1)).text
    'It was a snowy night. The round cat sang at the river. The end.'
    """
    cast = _Cast(rng)
    body = rng.choice(_PLOTS)(cast)
    return Story(cast.opening() + body.text + cast.closing(), body.questions)
