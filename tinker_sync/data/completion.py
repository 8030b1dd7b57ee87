"""Supervised examples from a prompt and its completion."""

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
    """Make an example for `cross_entropy` that trains a model to continue a prompt with a completion.

    Prompt and completion are encoded separately, as in sampling.

    Args:
        prompt: text, token ids, or a `ModelInput`, which may have images with `expected_tokens`.
        completion: text or token ids.
        tokenizer: encodes texts; token ids need none.
        weights: of the completion's tokens: one number for all, or one for each.
        prompt_weight: of the prompt's tokens.
        append_eos: end the completion with the tokenizer's end token, so that the model learns to stop.
        add_special_tokens: add the special tokens that the tokenizer puts before every text.

    Raises:
        InvalidInputError: an argument is empty, missing or of the wrong length.

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
        shifted.model_input,
        {"target_tokens": shifted.targets, "weights": shifted.row(prompt_weight, given)},
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
