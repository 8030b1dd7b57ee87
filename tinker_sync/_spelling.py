"""Which of the names that there are somebody meant by one that there is not."""

from __future__ import annotations

from collections.abc import Iterable


def meant(name: str, known: Iterable[str], *, cutoff: float = 0.6, loosely: bool = True) -> str | None:
    """The known name most like this one; None when none is. Loosely, parts of it count as well.

    >>> parameters = ["learning_rate", "weight_decay", "model_input"]
    >>> [meant(name, parameters) for name in ("learn_rate", "lr", "input", "colour")]
    ['learning_rate', 'learning_rate', 'model_input', None]
    """
    import difflib  # only after a typing error

    there, asked = list(known), name.lower()
    close = difflib.get_close_matches(asked, there, n=1, cutoff=cutoff)
    if close or not loosely or len(asked) < 2:
        return close[0] if close else None
    for candidate in there:
        words = candidate.split("_")
        initials = "".join(word[:1] for word in words)
        if asked in (initials, *words) or candidate in asked.split("_") or candidate.startswith(asked):
            return candidate
    return None


def no_parameter(of: str, name: str, known: Iterable[str]) -> str:
    """The text for a parameter that there is not: what it may have been meant for, and which there are.

    >>> no_parameter("AdamParams", "lr", ["learning_rate", "eps"])
    "AdamParams has no parameter 'lr'; did you mean 'learning_rate'? it takes: learning_rate, eps"
    """
    there = list(known)
    close = meant(name, there)
    hint = f"did you mean {close!r}? " if close else ""
    return f"{of} has no parameter {name!r}; {hint}it takes: {', '.join(there) or 'none'}"
