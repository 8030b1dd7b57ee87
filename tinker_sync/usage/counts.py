"""Token counts by kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from attrs import fields, frozen

Kind = Literal["trained", "prompt", "cached", "sampled"]
KINDS: Final[tuple[Kind, ...]] = ("trained", "prompt", "cached", "sampled")


@frozen(kw_only=True)
class TokenCounts:
    """How many tokens of each kind. Adds up.

    Attributes:
        trained: went through a training client, forward and backward or forward only.
        prompt: of prompts, without those the server still had.
        cached: of prompts, which the server still had from before.
        sampled: were generated.

    >>> TokenCounts(trained=3) + TokenCounts(trained=1, sampled=2)
    TokenCounts(trained=4, prompt=0, cached=0, sampled=2)
    """

    trained: int = 0
    prompt: int = 0
    cached: int = 0
    sampled: int = 0

    @property
    def total(self) -> int:
        """All kinds together.

        >>> TokenCounts(prompt=2, cached=3).total
        5
        """
        return self.trained + self.prompt + self.cached + self.sampled

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(**{kind: getattr(self, kind) + getattr(other, kind) for kind in KINDS})

    def __sub__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(**{kind: getattr(self, kind) - getattr(other, kind) for kind in KINDS})

    def items(self) -> Iterator[tuple[Kind, int]]:
        """The kinds that occur, with their counts.

        >>> dict(TokenCounts(prompt=2).items())
        {'prompt': 2}
        """
        return ((kind, getattr(self, kind)) for kind in KINDS if getattr(self, kind))


assert tuple(each.name for each in fields(TokenCounts)) == KINDS  # noqa: S101
