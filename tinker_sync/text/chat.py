"""From messages to what a model reads: choosing the template, preparing the messages, rendering, encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from tinker_sync.errors import InvalidInputError
from tinker_sync.text.schemas import schema_of
from tinker_sync.text.template import BEGIN, END, plain, render

if TYPE_CHECKING:
    from typing import TypeAlias

    from tinker_sync.text.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
"""`role`, `content` and whatever else the template reads."""
Tool: TypeAlias = Any
"""A JSON schema, or a function with types and a docstring."""

_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Names under which the reasoning of a message is known; templates read the first or the second."""
_OPEN: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""Stands where the last message ends, to be found again; the space shows whether the template strips."""


@frozen
class Rendering:
    """Everything a template is given, besides the messages."""

    template: str
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    variables: dict[str, Any] = field(factory=dict)

    def text(self, messages: Sequence[Message], *, prompt: bool = False, marked: bool = False) -> str:
        """The text of a chat.

        Args:
            messages: the chat.
            prompt: end with what begins the assistant's turn.
            marked: mark what stands between generation tags.
        """
        given = {
            **self.variables,
            "messages": _prepared(messages),
            "tools": self.tools,
            "documents": self.documents,
            "add_generation_prompt": prompt,
        }
        return render(self.template, given, marked=marked)

    def open_text(self, messages: Sequence[Message], where: str) -> str:
        """The text of a chat up to the end of what its last message says under the key `where`."""
        prepared = _prepared(messages)
        said = _left_open(prepared, where, self.template)
        given = {**self.variables, "messages": prepared, "tools": self.tools, "documents": self.documents}
        text = render(self.template, {**given, "add_generation_prompt": False})
        end = text.rfind(_OPEN.strip())
        if end < 0 or said.strip() not in text:
            raise InvalidInputError(
                "continue_final_message: the template does not show the last message as it is"
            )
        return text[:end] if text.startswith(_OPEN, end) else text[:end].rstrip()


@frozen
class Chat:
    """The chats of one tokenizer."""

    tokenizer: Tokenizer

    def template(self, chosen: str | None, tools: Sequence[Tool] | None) -> str:
        """The template's text: a named one, the given text, or the model's own."""
        own = self.tokenizer.chat_template
        if isinstance(own, Mapping):
            if chosen is not None:
                return own.get(chosen, chosen)
            for name in ("tool_use", "default") if tools is not None else ("default",):
                if name in own:
                    return own[name]
            names = ", ".join(sorted(own))
            raise InvalidInputError(
                f"chat_template: the model has several and no default; name one of {names}"
            )
        if chosen is None and own is None:
            raise InvalidInputError(
                "chat_template: the model's files have none; give one, or set tokenizer.chat_template"
            )
        return str(own) if chosen is None else chosen

    def rendering(
        self,
        template: str | None = None,
        tools: Sequence[Tool] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendering:
        """What to render chats with. Variables win over special tokens of the same name."""
        text = self.template(template, tools)
        for document in documents or ():
            if not isinstance(document, Mapping):
                raise InvalidInputError(f"documents: expected dictionaries, got a {type(document).__name__}")
        return Rendering(
            text,
            None if tools is None else [plain(schema_of(tool)) for tool in tools],
            None if documents is None else [plain(document) for document in documents],
            {**self.tokenizer.special_tokens_map, **plain(variables or {})},
        )

    def apply(
        self,
        conversation: Any,
        *,
        template: str | None,
        tools: Sequence[Tool] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool | str,
        variables: Mapping[str, Any],
        tokenize: bool,
        return_dict: bool,
        masks: bool,
        options: Mapping[str, Any],
    ) -> Any:
        """What `Tokenizer.apply_chat_template` gives."""
        if masks and not (tokenize and return_dict):
            raise InvalidInputError("return_assistant_tokens_mask: needs tokenize=True and return_dict=True")
        if continue_final_message and (add_generation_prompt or masks):
            raise InvalidInputError("continue_final_message: goes with neither a generation prompt nor masks")
        rendering = self.rendering(template, tools, documents, variables)
        chats, single = _chats(conversation)
        if continue_final_message:
            where = continue_final_message if isinstance(continue_final_message, str) else "content"
            texts = [rendering.open_text(chat, where) for chat in chats]
        else:
            texts = [rendering.text(chat, prompt=add_generation_prompt) for chat in chats]
        if not tokenize:
            return texts[0] if single else texts
        made = self.tokenizer(texts[0] if single else texts, add_special_tokens=False, **options)
        if masks:
            rows = self._masks(rendering, chats, texts, made, add_generation_prompt)
            made["assistant_masks"] = _shaped(rows, single, options.get("return_tensors"))
        return made if return_dict else made["input_ids"]

    def _masks(
        self, rendering: Rendering, chats: Sequence[Any], texts: Sequence[str], made: Any, prompt: bool
    ) -> list[list[int]]:
        rows = []
        for chat, text, encoding in zip(chats, texts, made.encodings, strict=True):
            row = [0] * len(encoding.ids)
            for start, end in generated(rendering, chat, text, prompt=prompt):
                first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
                if first is None:  # cut off
                    break
                for index in range(first, len(row) if last is None else last + 1):
                    row[index] = 1
            rows.append(row)
        return rows


def generated(
    rendering: Rendering, messages: Sequence[Message], text: str, *, prompt: bool = False
) -> list[tuple[int, int]]:
    """Where in a chat's text the assistant speaks, by the template's generation tags.

    Raises:
        InvalidInputError: the tags stand where they change the text, so that nobody can tell.
    """
    if BEGIN in text or END in text:
        raise InvalidInputError("messages: U+FDD0 and U+FDD1 are no characters of a text")
    marked = rendering.text(messages, prompt=prompt, marked=True)
    spans, plain_text = _unmarked(marked)
    if plain_text != text:
        raise InvalidInputError("chat template: it works on what stands between its generation tags")
    return spans


def _unmarked(marked: str) -> tuple[list[tuple[int, int]], str]:
    spans: list[tuple[int, int]] = []
    starts: list[int] = []
    pieces: list[str] = []
    length = begin = 0
    for index, character in enumerate(marked):
        if character not in (BEGIN, END):
            continue
        pieces.append(marked[begin:index])
        length, begin = length + index - begin, index + 1
        if character == BEGIN:
            starts.append(length)
        elif starts:
            spans.append((starts.pop(), length))
    return sorted(span for span in spans if span[0] < span[1]), "".join([*pieces, marked[begin:]])


def _shaped(rows: list[list[int]], single: bool, kind: str | None) -> Any:
    from tinker_sync.text.encoded import as_tensors

    if kind is not None:
        return as_tensors(rows, kind, "assistant_masks")
    return rows[0] if single else rows


# ------------------------------------------------------------------------------------------- messages


def _chats(conversation: Any) -> tuple[list[Any], bool]:
    """Each chat of a batch, and whether it was one chat alone."""
    conversation = getattr(conversation, "messages", conversation)
    if not isinstance(conversation, Sequence) or isinstance(conversation, str):
        raise InvalidInputError(
            f"conversation: expected a list of messages, got a {type(conversation).__name__}"
        )
    if not conversation:
        raise InvalidInputError("conversation: there is no message in it")
    if isinstance(conversation[0], (list, tuple)) or hasattr(conversation[0], "messages"):
        return [getattr(chat, "messages", chat) for chat in conversation], False
    return [conversation], True


def _prepared(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """What templates expect: plain copies, nothing that is None, reasoning under its usual names."""
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    made = plain(message)
    if not isinstance(made, dict):
        raise InvalidInputError(f"{where}: expected a dictionary, got a {type(message).__name__}")
    made = {name: value for name, value in made.items() if value is not None}
    thought = next((made[name] for name in _REASONING if name in made), None)
    return made if thought is None else {"thinking": thought, **made, "reasoning_content": thought}


def _left_open(messages: list[dict[str, Any]], where: str, template: str) -> str:
    """Mark the end of what the last message says; gives its words."""
    last = messages[-1]
    said = last.get(where)
    if said is None:
        raise InvalidInputError(f"continue_final_message: the last message has no {where!r}")
    names = [name for name in _REASONING if last.get(name) == said] if where in _REASONING else [where]
    if not any(name in template for name in names):
        raise InvalidInputError(f"continue_final_message: the template reads no {where!r}")
    if isinstance(said, str):
        for name in names:
            last[name] = said + _OPEN
        return said
    for block in reversed(said):
        if isinstance(block, dict) and "text" in block:
            words = str(block["text"])
            block["text"] = words + _OPEN
            return words
    raise InvalidInputError("continue_final_message: the last message has no text")
