"""The shift of a row of tokens into the model's input and its targets. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from tinker_sync.errors import InvalidInputError
from tinker_sync.types import EncodedTextChunk, ModelInput

if TYPE_CHECKING:
    from typing import TypeAlias

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[Any]
"""Token ids in any container."""
Ids32: TypeAlias = npt.NDArray[np.int32]
Row: TypeAlias = npt.NDArray[np.float32]

NO_TOKEN = 0
"""The target at a position before part of an image. Its weight is 0, so the id does not matter."""


@frozen(eq=False)
class Shifted:
    """The input and the targets made from a row of tokens, both one position shorter."""

    model_input: ModelInput
    targets: npt.NDArray[np.int64]
    first: int
    """The position that predicts the first token after the prompt."""

    def row(self, prompt: float, after: float | Sequence[float] | npt.NDArray[Any]) -> Row:
        """Return a value for each position.

        Args:
            prompt: for positions that predict a token of the prompt.
            after: for the others; one number, or one for each token after the prompt.
        """
        values = np.full(len(self.targets), prompt, dtype=np.float32)
        given = np.asarray(after, dtype=np.float32)
        # Without a prompt no position predicts the first token, so its value is not used.
        skipped = max(0, -self.first) if given.ndim else 0
        values[max(self.first, 0) :] = given[skipped:] if given.ndim else given
        return values


def shift(prompt: ModelInput, tokens: TokenIds) -> Shifted:
    """Make the input from all tokens but the last, and the targets from all tokens but the first.

    Raises:
        InvalidInputError: there is no token to predict, or an image lacks `expected_tokens`.

    >>> shifted = shift(ModelInput.from_ints([1, 2]), [3, 4])
    >>> shifted.model_input.to_ints(), shifted.targets.tolist(), shifted.row(0, 1).tolist()
    ([1, 2, 3], [2, 3, 4], [0.0, 1.0, 1.0])
    """
    after = as_ids(tokens, "tokens")
    before = _prompt_ids(prompt)
    if len(before) + len(after) < 2 or not len(after):
        raise InvalidInputError("nothing to predict: expected a prompt and at least one token after it")
    row = np.concatenate([before, after])
    return Shifted(_build_input(prompt, after), row[1:].astype(np.int64), len(before) - 1)


def _build_input(prompt: ModelInput, after: Ids32) -> ModelInput:
    """Return the input, as one chunk when all of it is text."""
    if all(isinstance(chunk, EncodedTextChunk) for chunk in prompt.chunks):
        return ModelInput.from_ints(np.concatenate([_prompt_ids(prompt), after[:-1]]))
    if len(after) == 1:
        return prompt
    return prompt.append(EncodedTextChunk(tokens=after[:-1]))


def _prompt_ids(prompt: ModelInput) -> Ids32:
    """Return the token at each position of a prompt, `NO_TOKEN` at the positions of an image."""
    pieces = [
        chunk.as_int32() if isinstance(chunk, EncodedTextChunk) else np.full(chunk.length, NO_TOKEN, np.int32)
        for chunk in prompt.chunks
    ]
    return np.concatenate([np.empty(0, np.int32), *pieces])


def as_numbers(given: Any, where: str) -> Row:
    """Convert one number or a row of numbers to float32; `where` begins the text of an error."""
    try:
        numbers = np.asarray(given, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"{where}: expected numbers ({error})") from None
    return numbers


def as_ids(tokens: TokenIds, where: str) -> Ids32:
    """Convert token ids to int32; `where` begins the text of an error."""
    try:
        return EncodedTextChunk(tokens=tokens).as_int32()
    except InvalidInputError as error:
        problems = [problem.replace("EncodedTextChunk.tokens", where, 1) for problem in error.problems]
        raise InvalidInputError(problems) from None
