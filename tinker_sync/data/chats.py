"""Supervised examples from chats, trained on what the assistant says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from tinker_sync.data.mask import assistant_mask
from tinker_sync.errors import InvalidInputError
from tinker_sync.text.chat import Message, Tool
from tinker_sync.types import Datum, ModelInput


def from_chat(
    messages: Sequence[Message],
    tokenizer: Any,
    *,
    train_on: Literal["all", "last"] = "all",
    tools: Sequence[Tool] | None = None,
    chat_template: str | None = None,
    **variables: Any,
) -> Datum:
    """An example for `cross_entropy` that teaches what the assistant says in a chat, and nothing else of it.

    Trained are the tokens that the model would have sampled: from after the prompt of each of its turns up to
    and with the token that ends the turn. Where they are is read from the template's generation tags; without
    such tags from how the text grows with each message, which is checked, token by token.

    Args:
        messages: the chat; what comes after the assistant's last word is read and not trained on.
        tokenizer: with a chat template; needs the extra `chat`.
        train_on: "all" turns of the assistant, or the "last" only.
        tools: what the model may call, as in `apply_chat_template`.
        chat_template: another template, or the name of one of the model's.
        variables: whatever else the template reads.

    Raises:
        InvalidInputError: the assistant says nothing, or it cannot be known which tokens are its own.
    """
    if train_on not in ("all", "last"):
        raise InvalidInputError(f"train_on: expected 'all' or 'last', got {train_on!r}")
    options = {"tools": tools, "chat_template": chat_template, **variables}
    ids, mask = assistant_mask(messages, tokenizer, last_only=train_on == "last", options=options)
    row = np.asarray(ids, dtype=np.int32)
    return Datum(
        ModelInput.from_ints(row[:-1]),
        {"target_tokens": row[1:].astype(np.int64), "weights": mask[1:].astype(np.float32)},
    )
