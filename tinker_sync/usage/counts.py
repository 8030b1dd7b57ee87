"""Token counts by kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from attrs import fields, frozen

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
        """Return the kinds with a count above 0, and their counts.

        >>> dict(TokenCounts(prompt=2).items())
        {'prompt': 2}
        """
        return ((kind, getattr(self, kind)) for kind in KINDS if getattr(self, kind))


assert tuple(each.name for each in fields(TokenCounts)) == KINDS  # noqa: S101
