"""Supervised examples from chats, trained on the assistant's tokens: those a model would have sampled.

A wrong mask would train on the wrong tokens without any error, so this module refuses uncertain cases:

- a template without generation tags that rewrites earlier messages, or whose generation prompt is missing
  from the finished text;
- a boundary inside a token, because the trained tokens would differ from the sampled ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from attrs import frozen

from tinker_sync.data.chat_template import ChatTemplate, Message, Tool
from tinker_sync.data.tokenizer import Tokenizer
from tinker_sync.errors import InvalidInputError
from tinker_sync.types import Datum, ModelInput
from tinker_sync.types.model_input import refuse_odd_messages

_TAGS: Final = "give a chat_template with {% generation %} tags around the assistant's text"
_LAST: Final = "train with train_on='last' on each beginning of the chat"

Span = tuple[int, int]
"""The character offsets at which a part of a text begins and ends."""


def from_chat(
    messages: Sequence[Message],
    tokenizer: Any,
    *,
    train_on: Literal["all", "last"] = "all",
    tools: Sequence[Tool] | None = None,
    chat_template: str | None = None,
    **variables: Any,
) -> Datum:
    """Make an example for `cross_entropy` that trains on the assistant's tokens of a chat.

    These are the tokens that the model would have sampled: in each of its turns, from the end of the prompt
    to the token that ends the turn, inclusive. The template marks them with ``{% generation %}`` tags.
    Without such tags this function finds them: it renders the chat message by message. In both cases a turn
    must begin and end between two tokens.

    Args:
        messages: the chat; text after the assistant's last turn is input only.
        tokenizer: a tokenizer with a chat template; the templates need the extra `chat`.
        train_on: "all" turns of the assistant, or only the "last".
        tools: JSON schemas of functions that the model may call.
        chat_template: another template, or the name of one of the model's.
        variables: further variables of the template.

    Raises:
        InvalidInputError: there is no turn of the assistant, or its tokens cannot be determined.
    """
    if train_on not in ("all", "last"):
        raise InvalidInputError(f"train_on: expected 'all' or 'last', got {train_on!r}")
    options = {"tools": tools, "chat_template": chat_template, **variables}
    ids, mask = mark_assistant(messages, tokenizer, last_only=train_on == "last", options=options)
    row = np.asarray(ids, dtype=np.int32)
    return Datum(
        ModelInput.from_ints(row[:-1]),
        {"target_tokens": row[1:].astype(np.int64), "weights": mask[1:].astype(np.float32)},
    )


def mark_assistant(
    messages: Sequence[Message], tokenizer: Any, *, last_only: bool, options: Mapping[str, Any]
) -> tuple[list[int], npt.NDArray[np.bool_]]:
    """Return the tokens of a chat, and a mask that is true for those of the assistant.

    Args:
        messages: the chat.
        tokenizer: a `Tokenizer`, or, for a template without generation tags, an object with the same methods.
        last_only: mark the assistant's last turn only.
        options: further arguments of `apply_chat_template`.

    Raises:
        InvalidInputError: there is no turn of the assistant, or its tokens cannot be determined.
    """
    refuse_odd_messages(messages)
    turns = [index for index, message in enumerate(messages) if _role(message) == "assistant"]
    if not turns:
        found = ", ".join(sorted({repr(_role(message)) for message in messages}))
        raise InvalidInputError(
            f"messages: there is no message of the assistant to train on, only of role {found}; add the "
            "answer, or use ModelInput.from_chat for a prompt"
        )
    text = _render(tokenizer, messages, options)
    spans = _find_tagged(tokenizer, messages, text, options)
    if spans is None:
        chosen = turns[-1:] if last_only else turns
        spans = [_find_grown(tokenizer, messages, index, text, options) for index in chosen]
        trims = True
    else:
        spans = spans[-1:] if last_only else spans
        trims = False
    if not spans:
        raise InvalidInputError("chat template: there is no text between its generation tags")
    encoded = _Encoded.of(tokenizer, text)
    mask = np.zeros(len(encoded.ids), dtype=np.bool_)
    for start, end in spans:
        first, last = encoded.count_before(start), encoded.count_before(end)
        mask[first : encoded.trim_tail(first, last) if trims else last] = True
    return encoded.ids, mask


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else getattr(message, "role", None)


def _render(
    tokenizer: Any, messages: Sequence[Message], options: Mapping[str, Any], prompt: bool = False
) -> str:
    text: str = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=prompt, **options
    )
    return text


# ------------------------------------------------------------------------------------------- by tags


def _find_tagged(
    tokenizer: Any, messages: Sequence[Message], text: str, options: Mapping[str, Any]
) -> list[Span] | None:
    """Return the parts of `text` between the template's generation tags; None for a template without tags."""
    template = tokenizer.get_chat_template(options["chat_template"], options["tools"])
    if "endgeneration" not in template:
        return None
    if not isinstance(tokenizer, Tokenizer):
        raise InvalidInputError("tokenizer: a template with generation tags needs this package's Tokenizer")
    variables = {name: value for name, value in options.items() if name not in ("tools", "chat_template")}
    chosen = ChatTemplate.of(tokenizer, template, options["tools"], None, variables)
    return chosen.find_generated(messages, text)


# ------------------------------------------------------------------------------------------- by message


def _find_grown(
    tokenizer: Any, messages: Sequence[Message], index: int, text: str, options: Mapping[str, Any]
) -> Span:
    """Return the part of `text` from the end of a message's prompt to the beginning of the next message.

    Raises:
        InvalidInputError: the rendered texts do not show where the message begins and ends.
    """
    where = f"messages[{index}]"
    if index == 0:
        raise InvalidInputError(f"{where}: no message before it forms its prompt; {_TAGS}")
    prompt = _render(tokenizer, messages[:index], options, prompt=True)
    ended = text if index + 1 == len(messages) else _render(tokenizer, messages[: index + 1], options)
    if not ended.startswith(prompt):
        raise InvalidInputError(
            f"{where}: its text does not begin with the template's generation prompt; {_TAGS}"
        )
    if not text.startswith(ended):
        raise InvalidInputError(
            f"{where}: the template changes it when more messages follow; {_LAST}, or {_TAGS}"
        )
    before = _render(tokenizer, messages[:index], options)
    if before == prompt and not _begins_with_content(messages[index], ended[len(prompt) :]):
        raise InvalidInputError(
            f"{where}: the template has no generation prompt and writes a heading before it; {_TAGS}"
        )
    return len(prompt), len(ended)


def _begins_with_content(message: Any, added: str) -> bool:
    """Return True when the text that a message adds begins with its content, not with a heading before it."""
    content = message.get("content") if isinstance(message, Mapping) else getattr(message, "content", None)
    return isinstance(content, str) and bool(content.strip()) and added.lstrip().startswith(content.strip())


# ------------------------------------------------------------------------------------------- tokens


@frozen(eq=False)
class _Encoded:
    """A text and its tokens.

    Attributes:
        fences: places where the tokenizer surely splits the text before it does anything else: the offset and
            the index of each special token that the text spells out. What is on one side of a fence does not
            affect the tokens on the other side.
        special: the ids of special tokens.
    """

    tokenizer: Any
    text: str
    ids: list[int]
    fences: list[tuple[int, int]]
    special: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Any, text: str) -> _Encoded:
        added = tokenizer.added_tokens_decoder
        special = {*tokenizer.all_special_ids, *(index for index, token in added.items() if token.special)}
        fences: list[tuple[int, int]] = []
        if not getattr(tokenizer, "is_fast", False):  # the tokenizer knows no offsets
            ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            ids, offsets = made["input_ids"], made["offset_mapping"]
            if not tokenizer.backend_tokenizer.encode_special_tokens:
                hard = {
                    index: token.content
                    for index, token in added.items()
                    if not (token.normalized or token.single_word)
                }
                fences = [
                    (start, index)
                    for index, (token, (start, end)) in enumerate(zip(ids, offsets, strict=True))
                    if token in hard and hard[token] in text[start:end]
                ]
        return cls(tokenizer, text, ids, fences, frozenset(special))

    def count_before(self, place: int) -> int:
        """Return the number of tokens before the character offset `place`; refuse one inside a token.

        The text before `place`, encoded alone as the prompt of a sample is, must give the same tokens. They
        are encoded from the last fence on, because all of them for each turn would take quadratic time.
        """
        if place == len(self.text):
            return len(self.ids)
        # The token at the last fence before the place may reach beyond it.
        index = bisect_left(self.fences, (place, 0)) - 2
        begin, count = self.fences[index] if index >= 0 else (0, 0)
        before: list[int] = self.tokenizer.encode(self.text[begin:place], add_special_tokens=False)
        if self.ids[count : count + len(before)] != before:
            around = self.text[max(0, place - 10) : place], self.text[place : place + 10]
            raise InvalidInputError(
                "chat template: the assistant's text begins or ends inside a token, between "
                f"{around[0]!r} and {around[1]!r}; the trained tokens would differ from the sampled ones"
            )
        return count + len(before)

    def trim_tail(self, first: int, last: int) -> int:
        """Return the end of a turn as an index of the tokens.

        It is after the last special token if only white space follows that token, else `last`.
        """
        ids, end = self.ids, last
        while (
            end > first
            and ids[end - 1] not in self.special
            and not self.tokenizer.decode([ids[end - 1]]).strip()
        ):
            end -= 1
        return end if end > first and ids[end - 1] in self.special else last
