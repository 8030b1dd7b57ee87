"""Results of encoding: named columns of ids and masks, as lists, arrays or tensors; padding lengths. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attrs import frozen

from tinker_sync.errors import InvalidInputError, MissingExtraError

if TYPE_CHECKING:
    from tokenizers import Encoding

_NO_LIMIT: Final = int(1e20)
"""Configuration files without a limit have a number above this one as the model's limit."""

_COLUMNS: Final = {
    "input_ids": "ids",
    "token_type_ids": "type_ids",
    "attention_mask": "attention_mask",
    "special_tokens_mask": "special_tokens_mask",
    "offset_mapping": "offsets",
}


class Encoded(dict[str, Any]):
    """A dictionary of `input_ids`, `attention_mask` and other columns, also available as attributes.

    >>> Encoded(input_ids=[5, 6]).input_ids
    [5, 6]
    """

    encodings: Sequence[Encoding] | None = None
    """The result of the library `tokenizers` for each text, with more details; None without texts."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no {name!r} here, only {', '.join(self)}", name=name, obj=self) from None

    def tokens(self, batch_index: int = 0) -> list[str]:
        """Return the tokens of one text, by its index, as the vocabulary spells them.

        Raises:
            InvalidInputError: the ids do not come from a text.
        """
        if self.encodings is None:
            raise InvalidInputError("Encoded.tokens: these ids do not come from a text")
        return self.encodings[batch_index].tokens

    def to(self, device: Any) -> Encoded:
        """Return a copy with the torch tensors on another device."""
        moved = Encoded(
            {name: getattr(value, "to", lambda _, v=value: v)(device) for name, value in self.items()}
        )
        moved.encodings = self.encodings
        return moved


def as_tensors(rows: Sequence[Sequence[int]], kind: str | None, name: str) -> Any:
    """Return rows of equal length as an array ("np") or tensor ("pt"); None returns them unchanged.

    Raises:
        InvalidInputError: the rows differ in length, or the kind is another one.
        MissingExtraError: torch is not installed.
    """
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
    """Return token ids as Python's ints: one int, a list or tuple of ints, or a list of rows of ints.

    The given ids are an int, list, tuple, range, array or tensor, or a dict with one of these as "input_ids".
    """
    if isinstance(given, dict):
        given = given["input_ids"]
    if hasattr(given, "tolist"):  # arrays, tensors and their single values
        return given.tolist()
    if isinstance(given, (list, tuple)):
        first = given[0] if given else 0
        return given if type(first) is int else [as_ids(item) for item in given]
    return list(given) if isinstance(given, Iterable) else given


def make_columns(
    encodings: Sequence[Encoding], names: Sequence[str], *, lengths_too: bool, single: bool, kind: str | None
) -> Encoded:
    made = Encoded({name: [getattr(each, _COLUMNS[name]) for each in encodings] for name in names})
    if kind is not None:
        made = Encoded({name: as_tensors(rows, kind, name) for name, rows in made.items()})
    elif single:
        made = Encoded({name: rows[0] for name, rows in made.items()})
    if lengths_too:
        made["length"] = [len(each) for each in encodings]
    made.encodings = encodings
    return made


@frozen
class Lengths:
    """The meaning of `padding`, `truncation` and `max_length`: a maximum, and a length to pad to."""

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
        """Interpret the arguments of a call. Raise `InvalidInputError` for those that are not valid.

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
            raise InvalidInputError(f"max_length: {max_length} is not a multiple of {multiple_of}")
        return cls(
            longest=max_length if cut else None,
            padded=max_length if padding == "max_length" else None,
            pad_to_longest=padding in (True, "longest"),
            multiple_of=multiple_of,
        )

    def target(self, lengths: Sequence[int]) -> int | None:
        """Return the length to pad texts of these lengths to, or None for no padding.

        >>> Lengths(pad_to_longest=True, multiple_of=4).target([3, 5])
        8
        """
        target = max(lengths, default=0) if self.pad_to_longest else self.padded
        if target is None or self.multiple_of is None:
            return target
        return -(-target // self.multiple_of) * self.multiple_of


def describe_bad_text(given: Sequence[object], error: Exception) -> str:
    """Return an error message that names the text that cannot be encoded."""
    for index, text in enumerate(given):
        where = "text" if len(given) == 1 else f"text[{index}]"
        if not isinstance(text, str):
            return f"{where}: expected a str, got {type(text).__name__}"
        try:
            text.encode()
        except UnicodeEncodeError as broken:
            return f"{where}[{broken.start}]: half of a surrogate pair is not a character"
    return f"text: {error}"
