"""Supervised examples from a prompt and its completion, shifted by one token. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from tinker_sync.errors import InvalidInputError
from tinker_sync.types import Datum, EncodedTextChunk, ModelInput

if TYPE_CHECKING:
    from typing import TypeAlias

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[Any]
"""Token ids in any container."""
Ids32: TypeAlias = npt.NDArray[np.int32]
Row: TypeAlias = npt.NDArray[np.float32]

NO_TOKEN = 0
"""The target at a position before part of an image. It has no effect if the weight of the prompt is 0."""


def from_completion(
    prompt: str | ModelInput | TokenIds,
    completion: str | TokenIds,
    tokenizer: Any = None,
    *,
    weights: float | Sequence[float] | npt.NDArray[Any] = 1.0,
    prompt_weight: float = 0.0,
    append_eos: bool = False,
    add_special_tokens: bool = True,
) -> Datum:
    """Make an example for `cross_entropy` that trains a model to continue a prompt with a completion.

    Prompt and completion are encoded separately, as in sampling.

    Args:
        prompt: text, token ids, or a `ModelInput`, which may have images with `expected_tokens`.
        completion: text or token ids.
        tokenizer: encodes texts, and has the end token for `append_eos`; otherwise token ids need none.
        weights: of the completion's tokens, including the end token of `append_eos`: one number for all, or
            one for each.
        prompt_weight: of the prompt's tokens.
        append_eos: end the completion with the tokenizer's end token, so that the model learns to stop.
        add_special_tokens: begin a prompt given as text with the tokenizer's special tokens, if it has such.

    Raises:
        InvalidInputError: the completion is empty, there is only one token in all, the tokenizer or its end
            token is missing, or `weights` has the wrong length.

    >>> datum = from_completion([1, 2], [3, 4])
    >>> datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()
    ([1, 2, 3], [2, 3, 4])
    >>> datum.loss_fn_inputs["weights"].tolist()
    [0.0, 1.0, 1.0]
    """
    before = (
        prompt if isinstance(prompt, ModelInput) else _encode_prompt(prompt, tokenizer, add_special_tokens)
    )
    after = _encode_completion(completion, tokenizer, append_eos=append_eos)
    if not len(after):
        raise InvalidInputError("completion: is empty")
    given = as_numbers(weights, "weights")
    if given.ndim and given.shape != (len(after),):
        shape = list(given.shape)
        raise InvalidInputError(f"weights: expected {len(after)}, one for each token, got shape {shape}")
    shifted = shift(before, after)
    datum = Datum(
        shifted.model_input, {"target_tokens": shifted.targets, "weights": shifted.row(prompt_weight, given)}
    )
    datum.validate()
    return datum


def _encode_prompt(prompt: str | TokenIds, tokenizer: Any, add_special_tokens: bool) -> ModelInput:
    if not isinstance(prompt, str):
        return ModelInput.from_ints(as_ids(prompt, "prompt"))
    ids = _require_tokenizer(tokenizer, "prompt").encode(prompt, add_special_tokens=add_special_tokens)
    return ModelInput.from_ints(ids)


def _encode_completion(completion: str | TokenIds, tokenizer: Any, *, append_eos: bool) -> Ids32:
    ids = completion
    if isinstance(ids, str):
        ids = _require_tokenizer(tokenizer, "completion").encode(ids, add_special_tokens=False)
    tokens = as_ids(ids, "completion")
    if not append_eos:
        return tokens
    eos = _require_tokenizer(tokenizer, "append_eos").eos_token_id
    if eos is None:
        raise InvalidInputError("append_eos: the tokenizer has no end token")
    return np.append(tokens, np.int32(eos))


def _require_tokenizer(tokenizer: Any, what: str) -> Any:
    if tokenizer is None:
        raise InvalidInputError(f"{what}: needs a tokenizer; give the client's get_tokenizer()")
    return tokenizer


@frozen(eq=False)
class Shifted:
    """The input and the targets made from a row of tokens. Both are one position shorter than the row."""

    model_input: ModelInput
    targets: npt.NDArray[np.int64]
    first: int
    """The position that predicts the first token after the prompt; -1 without a prompt."""
    has_token: npt.NDArray[np.bool_]
    """False at the positions whose target is a part of an image, which no token stands for."""

    def row(self, prompt: float, after: float | Sequence[float] | npt.NDArray[Any]) -> Row:
        """Return a row with a value for each position, such as weights or advantages.

        Args:
            prompt: for positions that predict a token of the prompt; those of an image have 0.
            after: for the others; one number, or one for each token after the prompt.
        """
        values = np.full(len(self.targets), prompt, dtype=np.float32)
        given = np.asarray(after, dtype=np.float32)
        # Without a prompt no position predicts the first token, so its value is not used.
        skipped = max(0, -self.first) if given.ndim else 0
        values[max(self.first, 0) :] = given[skipped:] if given.ndim else given
        values[~self.has_token] = 0
        return values


def shift(prompt: ModelInput, tokens: TokenIds) -> Shifted:
    """Make an input and targets from a prompt followed by tokens.

    The input has all tokens of this row but the last, the targets all but the first.

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
    texts = [np.full(chunk.length, isinstance(chunk, EncodedTextChunk)) for chunk in prompt.chunks]
    has_token = np.concatenate([*texts, np.ones(len(after), bool)])
    return Shifted(_build_input(prompt, after), row[1:].astype(np.int64), len(before) - 1, has_token[1:])


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
