"""How long encoded texts may and shall be: the meaning of `padding`, `truncation` and `max_length`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attrs import frozen

from tinker_sync.errors import InvalidInputError

_NO_LIMIT: Final = int(1e20)
"""A model's limit above this means that nobody wrote one down."""


@frozen
class Lengths:
    """What to do about lengths: cut to `longest`; pad to `padded`, or to the longest text."""

    longest: int | None = None
    padded: int | None = None
    pad_to_longest: bool = False
    multiple_of: int | None = None

    @classmethod
    def of(
        cls,
        padding: bool | str,
        truncation: bool | str | None,
        max_length: int | None,
        multiple_of: int | None,
        model_limit: int,
    ) -> Lengths:
        """What the arguments of a call mean.

        >>> Lengths.of("max_length", True, 8, None, 2048)
        Lengths(longest=8, padded=8, pad_to_longest=False, multiple_of=None)
        """
        padding, truncation = getattr(padding, "value", padding), getattr(truncation, "value", truncation)
        if padding not in (False, True, None, "longest", "max_length", "do_not_pad"):
            raise InvalidInputError(f"padding: expected True, 'longest' or 'max_length', got {padding!r}")
        if truncation not in (False, True, None, "longest_first", "only_first", "do_not_truncate"):
            raise InvalidInputError(f"truncation: expected True or False, got {truncation!r}")
        cut = truncation not in (False, None, "do_not_truncate")
        if max_length is None and model_limit <= _NO_LIMIT:
            max_length = model_limit
        pads = padding in (True, "longest", "max_length")
        if cut and pads and multiple_of and max_length is not None and max_length % multiple_of:
            raise InvalidInputError(f"max_length: {max_length} is no multiple of {multiple_of}")
        return cls(
            longest=max_length if cut else None,
            padded=max_length if padding == "max_length" else None,
            pad_to_longest=padding in (True, "longest"),
            multiple_of=multiple_of,
        )

    def target(self, lengths: Sequence[int]) -> int | None:
        """The length to pad texts of these lengths to, None where they stay as they are.

        >>> Lengths(pad_to_longest=True, multiple_of=4).target([3, 5])
        8
        """
        target = max(lengths, default=0) if self.pad_to_longest else self.padded
        if target is None or self.multiple_of is None:
            return target
        return -(-target // self.multiple_of) * self.multiple_of
