"""Suggestions for misspelt names. The functions are pure, and the module imports nothing of the package."""

from __future__ import annotations

from collections.abc import Iterable


def find_closest(name: str, known: Iterable[str], *, cutoff: float = 0.6, loosely: bool = True) -> str | None:
    """Return the known name that is closest to a misspelt one, or None without a close one.

    With `loosely`, initials and parts of names match too. A higher `cutoff`, up to 1, asks for closer names.

    >>> parameters = ["learning_rate", "weight_decay", "model_input"]
    >>> [find_closest(name, parameters) for name in ("learn_rate", "lr", "input", "colour")]
    ['learning_rate', 'learning_rate', 'model_input', None]
    """
    import difflib  # slow to import, needed only for a misspelt name

    names, asked = list(known), name.lower()
    close = difflib.get_close_matches(asked, names, n=1, cutoff=cutoff)
    if close or not loosely or len(asked) < 2:
        return close[0] if close else None
    for candidate in names:
        words = candidate.split("_")
        initials = "".join(word[:1] for word in words)
        if asked in (initials, *words) or candidate in asked.split("_") or candidate.startswith(asked):
            return candidate
    return None


def describe_unknown_parameter(owner: str, name: str, known: Iterable[str]) -> str:
    """Return the error text for an unknown parameter, with a suggestion and the known ones.

    >>> describe_unknown_parameter("AdamParams", "lr", ["learning_rate", "eps"])
    "AdamParams has no parameter 'lr'; did you mean 'learning_rate'? it takes: learning_rate, eps"
    """
    names = list(known)
    close = find_closest(name, names)
    hint = f"did you mean {close!r}? " if close else ""
    return f"{owner} has no parameter {name!r}; {hint}it takes: {', '.join(names) or 'none'}"
