"""What encoding gives besides bare ids: a dictionary of lists, one for each input of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tinker_sync.errors import InvalidInputError, MissingExtraError

if TYPE_CHECKING:
    from typing import TypeAlias

    from tokenizers import Encoding

TensorKind: TypeAlias = Literal["np", "pt"]
"""Arrays of numpy or tensors of torch in place of lists."""


class Encoded(dict[str, Any]):
    """`input_ids`, `attention_mask` and the like, by name or as attributes.

    >>> Encoded(input_ids=[5, 6]).input_ids
    [5, 6]
    """

    encodings: Sequence[Encoding] | None = None
    """What the tokenizer library made of each text: tokens, offsets and so on."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no {name!r} here, only {', '.join(self)}", name=name, obj=self) from None

    def tokens(self, batch_index: int = 0) -> list[str]:
        """The tokens of one text as the vocabulary writes them."""
        if self.encodings is None:
            raise InvalidInputError("Encoded.tokens: these ids were not made of text")
        return self.encodings[batch_index].tokens

    def to(self, device: Any) -> Encoded:
        """The same with tensors of torch on another device."""
        moved = Encoded(
            {name: getattr(value, "to", lambda _, v=value: v)(device) for name, value in self.items()}
        )
        moved.encodings = self.encodings
        return moved


def as_tensors(rows: Sequence[Sequence[int]], kind: str | None, name: str) -> Any:
    """Rows of one length as an array or tensor; the rows themselves where none is wanted."""
    if kind is None:
        return rows
    if len({len(row) for row in rows}) > 1:
        raise InvalidInputError(f"{name}: rows differ in length; set padding=True or truncation=True")
    matrix = np.asarray(rows, dtype=np.int64)
    kind = getattr(kind, "value", kind)
    if kind == "np":
        return matrix
    if kind != "pt":
        raise InvalidInputError(f"return_tensors: expected 'np' or 'pt', got {kind!r}")
    try:
        import torch
    except ImportError:
        raise MissingExtraError("torch", feature="return_tensors='pt'") from None
    return torch.from_numpy(matrix)


def as_ids(given: Any) -> Any:
    """Ids from a list, tuple, range, array or tensor: an int, a list of ints or a list of lists."""
    if isinstance(given, dict):
        given = given["input_ids"]
    if hasattr(given, "tolist"):  # arrays, tensors and their single values
        return given.tolist()
    if isinstance(given, (list, tuple)):
        first = given[0] if given else 0
        return given if type(first) is int else [as_ids(item) for item in given]
    return list(given) if isinstance(given, Iterable) else given
