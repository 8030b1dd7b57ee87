"""What does not fit, where, and how an error shows it without giving secrets away.

`Unfit` travels inside this package only. Whoever holds a container adds the step that led to the value; the
public functions turn the whole into an `InvalidInputError` or a `WireError` with paths such as
`$.sequences[2].stop_reason`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from tinker_sync._secret import is_secret_name, mask_text
from tinker_sync.errors import InvalidInputError, WireError
from tinker_sync.types._model import short_repr

T = TypeVar("T")
Step = str | int

MAX_PROBLEMS = 20
"""A million wrong numbers are no more news than twenty."""

_LONGEST_VALUE = 100
_LONGEST_NAME = 60
_ABSENT: Any = object()
# Addresses that are handed out signed: whoever has one may read what it names.
_SIGNED = frozenset({"url", "urls"})
_NAME = re.compile(r"\"([\w\-]+)\"?\s*:")
_PLACE = re.compile(r"\.(\w+)|\[(\d+)\]|\['((?:[^'\\]|\\.)*)'\]")


class Problem:
    """One thing that does not fit: what was expected, what came, and the steps to it, innermost first."""

    __slots__ = ("_text", "_value", "steps")

    def __init__(self, text: str, value: Any = _ABSENT, steps: Iterable[Step] = ()) -> None:
        self._text = text
        self._value = value
        self.steps: list[Step] = list(steps)

    @property
    def text(self) -> str:
        """What is wrong, in a line."""
        if self._value is _ABSENT:
            return mask_text(self._text)
        return f"{self._text}, got {self._shown()}"

    def path(self, root: str) -> str:
        """Where it is wrong."""
        return root + "".join(formatted(step) for step in reversed(self.steps))

    def _shown(self) -> str:
        value, kind = self._value, type(self._value).__name__
        if value is None:
            return "null"
        if isinstance(value, dict):
            return f"an object of {len(value)} fields"
        if isinstance(value, (list, tuple)):
            return f"a list of {len(value)}"
        if any(step in _SIGNED or is_secret_name(step) for step in self.steps if isinstance(step, str)):
            return f"something that is not shown ({kind})"
        shown = mask_text(short_repr(value))
        return f"{shown if len(shown) <= _LONGEST_VALUE else shown[:_LONGEST_VALUE] + '…'} ({kind})"


class Unfit(Exception):
    """Values that do not fit."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__()
        self.problems = problems

    def under(self, step: Step) -> tuple[Problem, ...]:
        """The problems as seen from the container that holds the value under `step`."""
        for problem in self.problems:
            problem.steps.append(step)
        return self.problems


def unfit(text: str, value: Any = _ABSENT) -> Unfit:
    """One value that does not fit."""
    return Unfit(Problem(text, value))


def at(step: Step, convert: Callable[[Any], T], value: Any) -> T:
    """One value converted under its step."""
    try:
        return convert(value)
    except Unfit as one:
        problems = one.under(step)
    raise Unfit(*problems)


def each(items: Iterable[tuple[Step, T]], convert: Callable[[T], Any]) -> Iterator[tuple[Step, Any]]:
    """Each item converted under its step. What does not fit is told together, at the end."""
    problems: list[Problem] = []
    for step, item in items:
        try:
            converted = convert(item)
        except Unfit as one:
            problems.extend(one.under(step))
            if len(problems) >= MAX_PROBLEMS:
                break
        else:
            yield step, converted
    if problems:
        raise Unfit(*problems)


def refused_by(model: str, error: Exception) -> Unfit:
    """What a model's own checks had against its fields, with the places they name taken apart."""
    texts = error.problems if isinstance(error, InvalidInputError) else (str(error),)
    return Unfit(*(_located(model, text) for text in texts[:MAX_PROBLEMS]))


def _located(model: str, text: str) -> Problem:
    position = len(model) if text.startswith((f"{model}.", f"{model}[", f"{model}:")) else 0
    steps: list[Step] = []
    while match := _PLACE.match(text, position):
        name, index, key = match.groups()
        steps.append(int(index) if index else name or key)
        position = match.end()
    if text[position : position + 2] != ": ":
        return Problem(text)
    return Problem(text[position + 2 :], steps=reversed(steps))


def formatted(step: Step) -> str:
    """Return one step of a path, short and without control characters."""
    if isinstance(step, int):
        return f"[{step}]"
    if step.isidentifier() and len(step) <= _LONGEST_NAME:
        return f".{step}"
    shown = repr(step)
    return f"[{shown}]" if len(shown) <= _LONGEST_NAME else f"[{shown[:_LONGEST_NAME]}…]"


def input_error(problems: Iterable[Problem], root: str = "$") -> InvalidInputError:
    """For what cannot be written."""
    return InvalidInputError(f"{problem.path(root)}: {problem.text}" for problem in problems)


def wire_error(problems: tuple[Problem, ...], root: str = "$") -> WireError:
    """For what was received: the first problem, and the next few in the same text."""
    first, others = problems[0], problems[1:]
    text = first.text + "".join(f"; also {other.path(root)}: {other.text}" for other in others[:3])
    if others[3:]:
        text += f"; and {len(others) - 3} more"
    return WireError(text, path=first.path(root))


def excerpt(text: str, position: int) -> str:
    """A few characters of a text around a position, unless it may hold a secret."""
    if any(is_secret_name(name) for name in _NAME.findall(text)):
        return f"{len(text)} characters, not shown because a credential may be among them"
    start = max(0, position - 20)
    around = text[start : position + 40]
    return mask_text(f"{'…' if start else ''}{around!r}{'…' if start + len(around) < len(text) else ''}")
