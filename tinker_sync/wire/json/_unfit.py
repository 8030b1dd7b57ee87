"""Errors about values that do not fit. They name the place of the value and show no secrets.

Hooks, the functions that cattrs calls, raise `Unfit`. The public functions of `wire.json` raise an
`InvalidInputError` or a `WireError` with paths such as `$.sequences[2].stop_reason`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Any, TypeVar

from tinker_sync._base.secret import is_secret_name, mask_text
from tinker_sync.errors import InvalidInputError, WireError
from tinker_sync.types._convert import MAX_PROBLEMS, noted
from tinker_sync.types._structured import ABSENT, Unfit, short_repr

T = TypeVar("T")
Step = str | int
Steps = tuple[Step, ...]

WIRE_NAMES = {
    "_tokens": "tokens",
    "_logprobs": "logprobs",
    "topk_logprobs_np": "topk_logprobs",
    "_prompt_logprobs": "prompt_logprobs",
    "topk_prompt_logprobs_np": "topk_prompt_logprobs",
}
"""The JSON names of fields that hold arrays under another name."""

_LONGEST_VALUE = 100
_LONGEST_NAME = 60
# No secret is longer.
_SURROUNDINGS = 8 * 1024
# Fields with addresses that servers sign. Such an address alone gives access to a file.
_SIGNED = frozenset({"url", "urls"})
_NAME = re.compile(r"\"([\w\-]+)\"?\s*:")
_PLACE = re.compile(r"\.(\w+)|\[(\d+)\]|\['((?:[^'\\]|\\.)*)'\]")
_MODEL = re.compile(r"[A-Z]\w*(?=[.\[:])")

Found = tuple[str, str]
"""A place, and a description of the problem there."""

_MOST_NOTED = 100
"""The most names that are collected, so that a body with many unknown fields uses little memory."""
_ignored: ContextVar[set[str]] = ContextVar("_ignored")


@contextmanager
def noting() -> Iterator[set[str]]:
    """Collect the fields that `read_leniently` ignores in this block, as names such as `Datum.colour`.

    At most a hundred names are collected. The set grows during the block.
    """
    names: set[str] = set()
    token = _ignored.set(names)
    try:
        yield names
    finally:
        _ignored.reset(token)


def note(names: Iterable[str], owner: str) -> None:
    """Add the unknown fields of an object to the names that the enclosing block of `noting` collects."""
    noted = _ignored.get()
    for name in names:
        if len(noted) >= _MOST_NOTED:
            return
        noted.add(mask_text(owner + _formatted(name)))


def at(step: Step, convert: Callable[..., T], *arguments: Any) -> T:
    """Call `convert` and return its result.

    If `convert` raises an error, `step`, a key or index, is added to the place that the error names.
    """
    try:
        return convert(*arguments)
    except Exception as error:
        noted(error, step)
        raise


def problems_in(errors: Iterable[tuple[Steps, Exception]]) -> list[Found]:
    """Return the problems that errors report, each with its place; at most `MAX_PROBLEMS`.

    Args:
        errors: pairs of the keys and indices that lead to a value, and the error about this value.
    """
    every = (found for steps, each in errors for found in described(each, steps))
    return list(islice(every, MAX_PROBLEMS))


def described(error: Exception, steps: Steps = ()) -> Iterator[Found]:
    """Yield the problems that one error reports about the value at `steps`, each with its place.

    An error of a class that no conversion raises is raised again.
    """
    steps = tuple(WIRE_NAMES.get(step, step) if isinstance(step, str) else step for step in steps)
    if isinstance(error, Unfit):
        steps += error.steps
        yield _path(steps), _text(error.text, error.value, steps)
    elif isinstance(error, InvalidInputError):
        for problem in error.problems:
            inner, text = _located(problem)
            yield _path(steps + inner), mask_text(text)
    elif hasattr(error, "extra_fields"):  # raised by cattrs
        for name in sorted(error.extra_fields):
            yield _path((*steps, name)), f"{error.cl.__name__} has no such field"  # type: ignore[attr-defined]
    elif isinstance(error, KeyError):
        yield _path(steps), "is missing"
    elif isinstance(error, (TypeError, ValueError, ArithmeticError, AssertionError)):
        yield _path(steps), mask_text(str(error))
    else:
        raise error


def _text(text: str, value: Any, steps: Steps) -> str:
    if value is ABSENT:
        return mask_text(text)
    kind = type(value).__name__
    if value is None:
        shown = "null"
    elif isinstance(value, dict):
        shown = f"an object of {len(value)} fields"
    elif isinstance(value, (list, tuple)):
        shown = f"a list of {len(value)}"
    elif any(step in _SIGNED or is_secret_name(step) for step in steps if isinstance(step, str)):
        shown = f"something that is not shown ({kind})"
    else:
        shown = mask_text(short_repr(value))
        shown = f"{shown if len(shown) <= _LONGEST_VALUE else shown[:_LONGEST_VALUE] + '…'} ({kind})"
    return f"{text}, got {shown}"


def _located(problem: str) -> tuple[Steps, str]:
    """Split the message of a model's own check, such as `SamplingParams.top_p: ...`, into place and text."""
    start = found.end() if (found := _MODEL.match(problem)) else 0
    steps: list[Step] = []
    while match := _PLACE.match(problem, start):
        name, index, key = match.groups()
        steps.append(int(index) if index else name or key)
        start = match.end()
    return (tuple(steps), problem[start + 2 :]) if problem[start : start + 2] == ": " else ((), problem)


def _path(steps: Steps) -> str:
    return "$" + "".join(map(_formatted, steps))


def _formatted(step: Step) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    if step.isidentifier() and len(step) <= _LONGEST_NAME:
        return f".{step}"
    shown = repr(step)
    return f"[{shown}]" if len(shown) <= _LONGEST_NAME else f"[{shown[:_LONGEST_NAME]}…]"


def input_error(problems: Iterable[Found]) -> InvalidInputError:
    return InvalidInputError(f"{place}: {text}" for place, text in problems)


def wire_error(problems: list[Found]) -> WireError:
    """Return one error for all problems of a received body. Its text has the first four of them."""
    (place, text), others = problems[0], problems[1:]
    text += "".join(f"; also {where}: {what}" for where, what in others[:3])
    if others[3:]:
        text += f"; and {len(others) - 3} more"
    return WireError(text, path=place)


def excerpt(text: str, position: int) -> str:
    """Return a part of a text around a position, or only its length if there may be a secret near by."""
    # Only the surroundings are searched, because a search of megabytes would hold up all threads for seconds.
    near = text[max(0, position - _SURROUNDINGS) : position + _SURROUNDINGS]
    if any(is_secret_name(name) for name in _NAME.findall(near)) or mask_text(near) != near:
        return f"{len(text)} characters, not shown because a credential may be among them"
    start = max(0, position - 20)
    around = text[start : position + 40]
    return f"{'…' if start else ''}{around!r}{'…' if start + len(around) < len(text) else ''}"
