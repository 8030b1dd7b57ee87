"""Supervised examples: a prompt, and what should have come after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tinker_sync.data.shift import Ids32, TokenIds, as_ids, as_numbers, shift
from tinker_sync.errors import InvalidInputError
from tinker_sync.types import Datum, ModelInput


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
    """An example for `cross_entropy` that teaches to continue a prompt with a completion.

    Prompt and completion are encoded each for itself, as they are when the model is sampled.

    Args:
        prompt: text, token ids, or a `ModelInput`, which may have images with `expected_tokens`.
        completion: text or token ids.
        tokenizer: what encodes texts; needed for them only.
        weights: of the completion's tokens: one number, or one for each.
        prompt_weight: of the prompt's tokens.
        append_eos: end the completion with the tokenizer's end token, so that the model learns to stop.
        add_special_tokens: begin a prompt of text with what the tokenizer puts before every text.

    Raises:
        InvalidInputError: something is empty, missing or of the wrong length.

    >>> datum = from_completion([1, 2], [3, 4])
    >>> datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()
    ([1, 2, 3], [2, 3, 4])
    >>> datum.loss_fn_inputs["weights"].tolist()
    [0.0, 1.0, 1.0]
    """
    told = prompt if isinstance(prompt, ModelInput) else _prompt(prompt, tokenizer, add_special_tokens)
    said = _completion(completion, tokenizer, append_eos=append_eos)
    if not len(said):
        raise InvalidInputError("completion: is empty")
    given = as_numbers(weights, "weights")
    if given.ndim and given.shape != (len(said),):
        shape = list(given.shape)
        raise InvalidInputError(f"weights: expected {len(said)}, one for each token, got shape {shape}")
    shifted = shift(told, said)
    datum = Datum(
        shifted.model_input,
        {"target_tokens": shifted.targets, "weights": shifted.row(prompt_weight, given)},
    )
    datum.validate()
    return datum


def _prompt(prompt: str | TokenIds, tokenizer: Any, add_special_tokens: bool) -> ModelInput:
    if not isinstance(prompt, str):
        return ModelInput.from_ints(as_ids(prompt, "prompt"))
    ids = _needed(tokenizer, "prompt").encode(prompt, add_special_tokens=add_special_tokens)
    return ModelInput.from_ints(ids)


def _completion(completion: str | TokenIds, tokenizer: Any, *, append_eos: bool) -> Ids32:
    ids = completion
    if isinstance(ids, str):
        ids = _needed(tokenizer, "completion").encode(ids, add_special_tokens=False)
    said = as_ids(ids, "completion")
    if not append_eos:
        return said
    eos = _needed(tokenizer, "append_eos").eos_token_id
    if eos is None:
        raise InvalidInputError("append_eos: the tokenizer has no end token")
    return np.append(said, np.int32(eos))


def _needed(tokenizer: Any, what: str) -> Any:
    if tokenizer is None:
        raise InvalidInputError(f"{what}: needs a tokenizer; give the client's get_tokenizer()")
    return tokenizer
