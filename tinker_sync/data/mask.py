"""Which tokens of a chat the assistant has said: the ones a model would have sampled.

A wrong mask trains silently on the wrong thing, so whatever cannot be known for sure is refused:

- a template that rewrites earlier messages, or whose generation prompt does not stand in its finished text;
- a boundary inside a token: what is trained would not be what is sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tinker_sync.errors import InvalidInputError
from tinker_sync.text.chat import Chat, Message, find_generated
from tinker_sync.text.tokenizer import Tokenizer

_TAGS: Final = "give a chat_template with {% generation %} tags around what the assistant says"
_LAST: Final = "train_on='last' on each beginning of the chat may do"

Span = tuple[int, int]


def assistant_mask(
    messages: Sequence[Message], tokenizer: Any, *, last_only: bool, options: Mapping[str, Any]
) -> tuple[list[int], npt.NDArray[np.bool_]]:
    """The tokens of a chat, and which of them the assistant said.

    Args:
        messages: the chat.
        tokenizer: ours, or one with the same methods.
        last_only: mark the assistant's last turn only.
        options: further arguments of `apply_chat_template`.

    Raises:
        InvalidInputError: it says nothing, or it cannot be known.
    """
    turns = [index for index, message in enumerate(messages) if _role(message) == "assistant"]
    if not turns:
        raise InvalidInputError("messages: the assistant says nothing that could be trained on")
    text = _text(tokenizer, messages, options)
    spans = _tagged(tokenizer, messages, text, options)
    if spans is None:
        chosen = turns[-1:] if last_only else turns
        spans = [_grown(tokenizer, messages, index, text, options) for index in chosen]
        trims = True
    else:
        spans = spans[-1:] if last_only else spans
        trims = False
    if not spans:
        raise InvalidInputError("chat template: nothing stands between its generation tags")
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    mask = np.zeros(len(ids), dtype=np.bool_)
    for start, end in spans:
        first, last = (_token_at(tokenizer, text, ids, place) for place in (start, end))
        mask[first : _without_tail(tokenizer, ids, first, last) if trims else last] = True
    return ids, mask


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else getattr(message, "role", None)


def _text(
    tokenizer: Any, messages: Sequence[Message], options: Mapping[str, Any], prompt: bool = False
) -> str:
    text: str = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=prompt, **options
    )
    return text


# ------------------------------------------------------------------------------------------- by tags


def _tagged(
    tokenizer: Any, messages: Sequence[Message], text: str, options: Mapping[str, Any]
) -> list[Span] | None:
    """Where the template's own tags say that the assistant speaks; None where it has none."""
    template = tokenizer.get_chat_template(options["chat_template"], options["tools"])
    if "endgeneration" not in template:
        return None
    if not isinstance(tokenizer, Tokenizer):
        raise InvalidInputError("tokenizer: generation tags are read by this package's own tokenizers only")
    variables = {name: value for name, value in options.items() if name not in ("tools", "chat_template")}
    rendering = Chat(tokenizer).make_rendering(template, options["tools"], None, variables)
    return find_generated(rendering, messages, text)


# ------------------------------------------------------------------------------------------- by growth


def _grown(
    tokenizer: Any, messages: Sequence[Message], index: int, text: str, options: Mapping[str, Any]
) -> Span:
    """Where the text of one message stands: after the prompt for it, before what the next message adds."""
    where = f"messages[{index}]"
    if index == 0:
        raise InvalidInputError(f"{where}: nothing comes before it that could be its prompt; {_TAGS}")
    prompt = _text(tokenizer, messages[:index], options, prompt=True)
    ended = text if index + 1 == len(messages) else _text(tokenizer, messages[: index + 1], options)
    if not ended.startswith(prompt):
        raise InvalidInputError(
            f"{where}: its text does not begin with the prompt that the template gives for it; {_TAGS}"
        )
    if not text.startswith(ended):
        raise InvalidInputError(
            f"{where}: the template writes it otherwise when more messages follow; {_LAST}, or {_TAGS}"
        )
    before = _text(tokenizer, messages[:index], options)
    if before == prompt and not _speaks_at_once(messages[index], ended[len(prompt) :]):
        raise InvalidInputError(
            f"{where}: the template has no generation prompt and writes a heading before it; {_TAGS}"
        )
    return len(prompt), len(ended)


def _speaks_at_once(message: Any, added: str) -> bool:
    """Whether what a message adds to the text begins with its own words rather than with a heading."""
    said = message.get("content") if isinstance(message, Mapping) else getattr(message, "content", None)
    return isinstance(said, str) and bool(said.strip()) and added.lstrip().startswith(said.strip())


# ------------------------------------------------------------------------------------------- tokens


def _token_at(tokenizer: Any, text: str, ids: Sequence[int], place: int) -> int:
    """How many tokens stand before a place in the text."""
    if place == len(text):
        return len(ids)
    before: list[int] = tokenizer.encode(text[:place], add_special_tokens=False)
    if list(ids[: len(before)]) != before:
        around = text[max(0, place - 10) : place], text[place : place + 10]
        raise InvalidInputError(
            "chat template: a boundary of what the assistant says is no boundary of tokens, between "
            f"{around[0]!r} and {around[1]!r}; what is trained would not be what is sampled"
        )
    return len(before)


def _without_tail(tokenizer: Any, ids: Sequence[int], first: int, last: int) -> int:
    """Where a turn ends: after its last special token, if only white space follows, which nobody samples."""
    special = set(tokenizer.all_special_ids)
    special |= {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    end = last
    while end > first and ids[end - 1] not in special and not tokenizer.decode([ids[end - 1]]).strip():
        end -= 1
    return end if end > first and ids[end - 1] in special else last
