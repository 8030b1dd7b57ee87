"""Token counts by kind, and `Meter`, which adds up the tokens of results by model.

The thread that decodes a result reports it before the future resolves, so the counts are complete after
`result()`. A forked child begins at zero, because the parent reports its own usage.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Final, Literal

from attrs import fields, frozen

from tinker_sync._base import fork as _fork
from tinker_sync._base.events import Event, ModelNamed, TokensUsed

Kind = Literal["trained", "prompt", "cached", "sampled"]
KINDS: Final[tuple[Kind, ...]] = ("trained", "prompt", "cached", "sampled")


@frozen(kw_only=True)
class TokenCounts:
    """Numbers of tokens by kind. Counts can be added.

    Attributes:
        trained: tokens of training passes, forward-only passes included.
        prompt: prompt tokens outside the server's cache.
        cached: prompt tokens in the server's cache.
        sampled: generated tokens.

    >>> TokenCounts(trained=3) + TokenCounts(trained=1, sampled=2)
    TokenCounts(trained=4, prompt=0, cached=0, sampled=2)
    """

    trained: int = 0
    prompt: int = 0
    cached: int = 0
    sampled: int = 0

    @property
    def total(self) -> int:
        """The sum over all kinds.

        >>> TokenCounts(prompt=2, cached=3).total
        5
        """
        return self.trained + self.prompt + self.cached + self.sampled

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(**{kind: getattr(self, kind) + getattr(other, kind) for kind in KINDS})

    def __sub__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(**{kind: getattr(self, kind) - getattr(other, kind) for kind in KINDS})

    def items(self) -> Iterator[tuple[Kind, int]]:
        """Return the kinds with a count other than 0, and their counts.

        >>> dict(TokenCounts(prompt=2).items())
        {'prompt': 2}
        """
        return ((kind, getattr(self, kind)) for kind in KINDS if getattr(self, kind))


assert tuple(each.name for each in fields(TokenCounts)) == KINDS  # noqa: S101


class Meter:
    """A counter of the tokens of each model. Thread-safe.

    >>> meter = Meter()
    >>> meter.observe(ModelNamed(model="s:train:0", base_model="org/base"))
    >>> meter.observe(TokensUsed(model="s:train:0", trained=7))
    >>> meter.by_model()
    {'org/base': TokenCounts(trained=7, prompt=0, cached=0, sampled=0)}

    Args:
        ask_name: asks the server for the base model of a model or sampler; returns None without an answer.
    """

    def __init__(self, ask_name: Callable[[str], str | None] = lambda _: None) -> None:
        self._ask_name = ask_name
        self._lock = threading.Lock()
        # By model or sampler, in the order of KINDS.
        self._counts: dict[str, list[int]] = {}  # guarded by _lock
        self._names: dict[str, str] = {}  # guarded by _lock
        _fork.renew_in_child(self)

    def observe(self, event: Event) -> None:
        """Record the tokens of a result, or the base model of a model; ignore other events."""
        if isinstance(event, TokensUsed):
            with self._lock:
                counts = self._counts.get(event.model)
                if counts is None:
                    counts = self._counts[event.model] = [0, 0, 0, 0]
                counts[0] += event.trained
                counts[1] += event.prompt
                counts[2] += event.cached
                counts[3] += event.sampled
        elif isinstance(event, ModelNamed):
            with self._lock:
                name = event.base_model or self._names.get(event.like or "")
                if name is not None:
                    self._names[event.model] = name

    def base_model(self, model: str) -> str | None:
        """Return the base model of a model or sampler. If it is unknown, return what `ask_name` returns."""
        with self._lock:
            known = self._names.get(model)
        if known is not None:
            return known
        name = self._ask_name(model)
        if name is not None:
            with self._lock:
                self._names[model] = name
        return name

    def by_model(self) -> dict[str | None, TokenCounts]:
        """Return the usage so far by base model. The key None stands for models of unknown name.

        Calls `ask_name` for each model whose base model is not known.
        """
        with self._lock:
            counts = {
                model: TokenCounts(**dict(zip(KINDS, own, strict=True)))
                for model, own in self._counts.items()
            }
        summed: dict[str | None, TokenCounts] = {}
        for model, own in counts.items():
            name = self.base_model(model)
            summed[name] = summed.get(name, TokenCounts()) + own
        return summed

    def renew_after_fork(self) -> None:
        """Begin at zero in a child process."""
        self._lock = threading.Lock()
        self._counts = {}
