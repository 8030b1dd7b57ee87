"""Chats as text and token ids: choice of the template, preparation of the messages, rendering, encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from tinker_sync.errors import InvalidInputError
from tinker_sync.text.encoded import as_tensors
from tinker_sync.text.template import BEGIN, END, render, schema_of, to_plain

if TYPE_CHECKING:
    from typing import TypeAlias

    from tinker_sync.text.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
"""`role`, `content` and other keys that the template reads."""
Tool: TypeAlias = Any
"""A JSON schema, or a function with types and a docstring."""

_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Keys for the reasoning of a message; templates read the first or the second."""
_OPEN: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of a last message that the model continues. If the mark's trailing space is missing from the
rendered text, the template strips messages."""


@frozen
class Rendering:
    """A chosen template with its inputs other than the messages. It renders chats."""

    template: str
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    variables: dict[str, Any] = field(factory=dict)

    def text(self, messages: Sequence[Message], *, prompt: bool = False, marked: bool = False) -> str:
        """Render a chat.

        Args:
            messages: the chat.
            prompt: end with the beginning of the assistant's turn.
            marked: put marks around the text between the template's `{% generation %}` tags.
        """
        given = {
            **self.variables,
            "messages": _prepare_all(messages),
            "tools": self.tools,
            "documents": self.documents,
            "add_generation_prompt": prompt,
        }
        return render(self.template, given, marked=marked)

    def render_open(self, messages: Sequence[Message], where: str) -> str:
        """Render a chat up to the end of the text that the last message has under the key `where`.

        Raises:
            InvalidInputError: the last message has no such text, or the template changes or omits the text.
        """
        prepared = _prepare_all(messages)
        content = _leave_open(prepared, where, self.template)
        given = {**self.variables, "messages": prepared, "tools": self.tools, "documents": self.documents}
        text = render(self.template, {**given, "add_generation_prompt": False})
        end = text.rfind(_OPEN.strip())
        if end < 0 or content.strip() not in text:
            raise InvalidInputError("continue_final_message: the template changes the last message")
        return text[:end] if text.startswith(_OPEN, end) else text[:end].rstrip()


@frozen
class Chat:
    """A renderer and encoder of chats for one tokenizer."""

    tokenizer: Tokenizer

    def choose_template(self, chosen: str | None, tools: Sequence[Tool] | None) -> str:
        """Return the text of the template for a chat.

        Args:
            chosen: the name of a template of the model, or the text of a template. None chooses the model's
                own template; of several, it chooses `tool_use` for a chat with tools, and else `default`.
            tools: the tools of the chat.

        Raises:
            InvalidInputError: the model has no template, or several without a default.
        """
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

    def make_rendering(
        self,
        template: str | None = None,
        tools: Sequence[Tool] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendering:
        """Return a `Rendering` of a template. A variable overrides a special token of the same name.

        Raises:
            InvalidInputError: there is no template, or a tool or a document is not valid.
        """
        text = self.choose_template(template, tools)
        for document in documents or ():
            if not isinstance(document, Mapping):
                raise InvalidInputError(f"documents: expected dictionaries, got a {type(document).__name__}")
        return Rendering(
            text,
            None if tools is None else [to_plain(schema_of(tool)) for tool in tools],
            None if documents is None else [to_plain(document) for document in documents],
            {**self.tokenizer.special_tokens_map, **to_plain(variables or {})},
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
        """Do the work of `Tokenizer.apply_chat_template`, which documents the arguments."""
        if masks and not (tokenize and return_dict):
            raise InvalidInputError("return_assistant_tokens_mask: needs tokenize=True and return_dict=True")
        if continue_final_message and (add_generation_prompt or masks):
            raise InvalidInputError("continue_final_message: goes with neither a generation prompt nor masks")
        rendering = self.make_rendering(template, tools, documents, variables)
        chats, single = _split_chats(conversation)
        if continue_final_message:
            where = continue_final_message if isinstance(continue_final_message, str) else "content"
            texts = [rendering.render_open(chat, where) for chat in chats]
        else:
            texts = [rendering.text(chat, prompt=add_generation_prompt) for chat in chats]
        if not tokenize:
            return texts[0] if single else texts
        made = self.tokenizer(texts[0] if single else texts, add_special_tokens=False, **options)
        if masks:
            rows = self._masks(rendering, chats, texts, made, add_generation_prompt)
            made["assistant_masks"] = _shape(rows, single, options.get("return_tensors"))
        return made if return_dict else made["input_ids"]

    def _masks(
        self, rendering: Rendering, chats: Sequence[Any], texts: Sequence[str], made: Any, prompt: bool
    ) -> list[list[int]]:
        rows = []
        for chat, text, encoding in zip(chats, texts, made.encodings, strict=True):
            row = [0] * len(encoding.ids)
            for start, end in find_generated(rendering, chat, text, prompt=prompt):
                first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
                if first is None:  # truncated
                    break
                for index in range(first, len(row) if last is None else last + 1):
                    row[index] = 1
            rows.append(row)
        return rows


def find_generated(
    rendering: Rendering, messages: Sequence[Message], text: str, *, prompt: bool = False
) -> list[tuple[int, int]]:
    """Return the spans of `text`, a rendered chat, that are between the template's generation tags.

    A span is a pair of character offsets: the first one, and the one after the last.

    Raises:
        InvalidInputError: the template changes the text between its tags, or `text` has the characters that
            mark the spans.
    """
    if BEGIN in text or END in text:
        raise InvalidInputError("messages: U+FDD0 and U+FDD1 are not allowed in a text")
    marked = rendering.text(messages, prompt=prompt, marked=True)
    spans, unmarked = _remove_marks(marked)
    if unmarked != text:
        raise InvalidInputError("chat template: it changes the text between its generation tags")
    return spans


def _remove_marks(marked: str) -> tuple[list[tuple[int, int]], str]:
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


def _shape(rows: list[list[int]], single: bool, kind: str | None) -> Any:
    if kind is not None:
        return as_tensors(rows, kind, "assistant_masks")
    return rows[0] if single else rows


# ------------------------------------------------------------------------------------------- messages


def _split_chats(conversation: Any) -> tuple[list[Any], bool]:
    """Return the chats of a batch, and True when the argument is one chat rather than a batch.

    Raises:
        InvalidInputError: the argument is not a list, or is empty.
    """
    conversation = getattr(conversation, "messages", conversation)
    if not isinstance(conversation, Sequence) or isinstance(conversation, str):
        raise InvalidInputError(
            f"conversation: expected a list of messages, got a {type(conversation).__name__}"
        )
    if not conversation:
        raise InvalidInputError("conversation: expected at least one message, got none")
    if isinstance(conversation[0], (list, tuple)) or hasattr(conversation[0], "messages"):
        return [getattr(chat, "messages", chat) for chat in conversation], False
    return [conversation], True


def _prepare_all(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copy messages as plain data, without None values.

    A copy has the reasoning of its message under both keys that templates read: `thinking` and
    `reasoning_content`.
    """
    return [_prepare(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _prepare(message: Any, where: str) -> dict[str, Any]:
    made = to_plain(message)
    if not isinstance(made, dict):
        raise InvalidInputError(f"{where}: expected a dictionary, got a {type(message).__name__}")
    made = {name: value for name, value in made.items() if value is not None}
    thought = next((made[name] for name in _REASONING if name in made), None)
    return made if thought is None else {"thinking": thought, **made, "reasoning_content": thought}


def _leave_open(messages: list[dict[str, Any]], where: str, template: str) -> str:
    """Append the mark `_OPEN` to the last message's text under the key `where`; return the text alone."""
    last = messages[-1]
    content = last.get(where)
    if content is None:
        raise InvalidInputError(f"continue_final_message: the last message has no {where!r}")
    names = [name for name in _REASONING if last.get(name) == content] if where in _REASONING else [where]
    if not any(name in template for name in names):
        raise InvalidInputError(f"continue_final_message: the template reads no {where!r}")
    if isinstance(content, str):
        for name in names:
            last[name] = content + _OPEN
        return content
    for block in reversed(content):
        if isinstance(block, dict) and "text" in block:
            words = str(block["text"])
            block["text"] = words + _OPEN
            return words
    raise InvalidInputError("continue_final_message: the last message has no text")
