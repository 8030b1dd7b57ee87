"""The vocabulary and the facts of the training documents, as plain tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import TypeAlias

GIRLS: Final = ("Anna", "Mia", "Lily", "Sara", "Emma", "Nora", "Ruth", "Zoe", "Ella", "Kate")
BOYS: Final = ("Tom", "Ben", "Sam", "Max", "Leo", "Jack", "Tim", "Paul", "Finn", "Dan")

# singular, plural, sound, young
ANIMALS: Final = (
    ("dog", "dogs", "woof", "puppy"),
    ("cat", "cats", "meow", "kitten"),
    ("cow", "cows", "moo", "calf"),
    ("duck", "ducks", "quack", "duckling"),
    ("sheep", "sheep", "baa", "lamb"),
    ("horse", "horses", "neigh", "foal"),
    ("pig", "pigs", "oink", "piglet"),
    ("frog", "frogs", "croak", "tadpole"),
    ("owl", "owls", "hoot", "owlet"),
    ("lion", "lions", "roar", "cub"),
    ("bee", "bees", "buzz", "larva"),
    ("mouse", "mice", "squeak", "pup"),
    ("hen", "hens", "cluck", "chick"),
    ("goat", "goats", "maa", "kid"),
)
THINGS: Final = (
    ("ball", "balls"),
    ("book", "books"),
    ("box", "boxes"),
    ("hat", "hats"),
    ("key", "keys"),
    ("cup", "cups"),
    ("kite", "kites"),
    ("lamp", "lamps"),
    ("stone", "stones"),
    ("shoe", "shoes"),
    ("bag", "bags"),
    ("boat", "boats"),
    ("drum", "drums"),
    ("coat", "coats"),
    ("leaf", "leaves"),
    ("coin", "coins"),
)
COLOURS: Final = ("red", "blue", "green", "yellow", "white", "black", "brown", "pink")
SIZES: Final = ("big", "small", "old", "new", "little", "heavy", "pretty", "round")
MOODS: Final = ("happy", "sad", "tired", "hungry", "brave", "kind", "quiet", "proud", "angry", "shy")
FOODS: Final = ("bread", "soup", "cake", "rice", "apples", "cheese", "fish", "eggs", "milk", "honey")
PLACES: Final = ("house", "garden", "park", "school", "forest", "farm", "river", "kitchen", "market", "beach")
SPOTS: Final = ("under the table", "behind the door", "near the tree", "on the chair", "in the grass")
WEATHER: Final = ("sunny", "rainy", "windy", "cold", "warm", "cloudy", "snowy")
TIMES: Final = ("morning", "evening", "day", "night", "afternoon")
# base, past
MOVES: Final = (
    ("walk", "walked"),
    ("run", "ran"),
    ("go", "went"),
    ("ride", "rode"),
    ("hurry", "hurried"),
)
DEEDS: Final = (
    ("see", "saw"),
    ("find", "found"),
    ("take", "took"),
    ("like", "liked"),
    ("want", "wanted"),
    ("buy", "bought"),
    ("hide", "hid"),
    ("draw", "drew"),
    ("lose", "lost"),
    ("bring", "brought"),
)
ACTS: Final = (
    ("sing", "sang"),
    ("sleep", "slept"),
    ("laugh", "laughed"),
    ("jump", "jumped"),
    ("play", "played"),
    ("dance", "danced"),
    ("read", "read"),
    ("swim", "swam"),
    ("cry", "cried"),
    ("smile", "smiled"),
)

OPPOSITES: Final = (
    ("hot", "cold"),
    ("big", "small"),
    ("up", "down"),
    ("day", "night"),
    ("old", "new"),
    ("happy", "sad"),
    ("fast", "slow"),
    ("open", "closed"),
    ("wet", "dry"),
    ("full", "empty"),
    ("hard", "soft"),
    ("light", "dark"),
    ("left", "right"),
    ("early", "late"),
    ("loud", "quiet"),
    ("black", "white"),
)
DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS: Final = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
NUMBERS: Final = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
HUES: Final = (
    ("the sky", "blue"),
    ("grass", "green"),
    ("snow", "white"),
    ("coal", "black"),
    ("a lemon", "yellow"),
    ("blood", "red"),
    ("milk", "white"),
    ("a leaf", "green"),
    ("the sun", "yellow"),
    ("wood", "brown"),
)
CAPITALS: Final = (
    ("France", "Paris"),
    ("Italy", "Rome"),
    ("Spain", "Madrid"),
    ("Japan", "Tokyo"),
    ("Egypt", "Cairo"),
    ("Greece", "Athens"),
    ("Germany", "Berlin"),
    ("Norway", "Oslo"),
    ("Peru", "Lima"),
    ("Kenya", "Nairobi"),
    ("Cuba", "Havana"),
    ("Austria", "Vienna"),
)
LEGS: Final = (
    ("a dog", "four"),
    ("a hen", "two"),
    ("a bee", "six"),
    ("a spider", "eight"),
    ("a snake", "no"),
    ("a horse", "four"),
)


Fact: TypeAlias = tuple[str, str, str]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _of_animals() -> Iterator[Fact]:
    for name, plural, sound, young in ANIMALS:
        article = "an" if name[0] in "aeiou" else "a"
        yield f"What does {article} {name} say?", sound, f"The {name} says {sound}."
        yield f"What is a young {name} called?", young, f"A young {name} is called {young}."
        yield f"One {name}, two?", plural, f"One {name}, two {plural}."


def _of_orders() -> Iterator[Fact]:
    for names, kind in ((DAYS, "day"), (MONTHS, "month"), (NUMBERS, "number")):
        # Weeks and years begin again.
        steps = zip(names, names[1:] + (names[:1] if kind != "number" else ()), strict=False)
        for one, two in steps:
            yield f"What {kind} comes after {one}?", two, f"After {one} comes {two}."
            yield f"What {kind} comes before {two}?", one, f"Before {two} comes {one}."


def _facts() -> Iterator[Fact]:
    for pair in OPPOSITES:
        for word, other in (pair, pair[::-1]):
            yield f"What is the opposite of {word}?", other, f"The opposite of {word} is {other}."
    for place, capital in CAPITALS:
        yield f"What is the capital of {place}?", capital, f"{capital} is the capital of {place}."
    for thing, hue in HUES:
        yield f"What colour is {thing}?", hue, f"{_capital(thing)} is {hue}."
    for animal, legs in LEGS:
        yield f"How many legs has {animal}?", legs, f"{_capital(animal)} has {legs} legs."
    yield from _of_animals()
    for thing, many in THINGS:
        yield f"One {thing}, two?", many, f"One {thing}, two {many}."
    yield from _of_orders()
    for now, past in (*MOVES, *DEEDS, *ACTS):
        yield f"Today they {now}. Yesterday?", f"they {past}", f"Today they {now}, yesterday they {past}."


FACTS: Final = tuple(_facts())
"""Question, answer, and the same as a sentence."""
