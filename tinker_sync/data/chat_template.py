"""Chats as text: choice of the template, preparation of the messages, and rendering by Jinja.

Templates come with a model, so they run in a sandbox and see plain data only. Threads share the compiled
templates. A failure inside a template raises `InvalidInputError`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast

from attrs import frozen

from tinker_sync.errors import InvalidInputError, MissingExtraError

if TYPE_CHECKING:
    from typing import TypeAlias

    from jinja2 import Template
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from tinker_sync.data.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
"""`role`, `content` and other keys that the template reads."""
Tool: TypeAlias = Mapping[str, Any]
"""The JSON schema of a function that the model may call."""

BEGIN: Final = "\ufdd0"
END: Final = "\ufdd1"
"""Marks around the assistant's text: code points that Unicode reserves for private use in a process."""

_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Keys for the reasoning of a message; templates read the first or the second."""
_OPEN: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of a last message that the model continues. If the mark's trailing space is missing from the
rendered text, the template strips messages."""
_KEPT: Final = 64


@frozen
class ChatTemplate:
    """A chosen template with its inputs other than the messages. It renders chats."""

    template: str
    variables: dict[str, Any]

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        template: str | None = None,
        tools: Sequence[Tool] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> ChatTemplate:
        """Choose a template for a chat. A variable overrides a special token of the same name.

        Raises:
            InvalidInputError: there is no template, or a tool or a document is not valid.
        """
        text = choose_template(tokenizer.chat_template, template, tools)
        for tool in cast("Sequence[Any]", tools or ()):
            if not isinstance(tool, Mapping):
                advice = "; transformers.utils.get_json_schema makes one of it" if callable(tool) else ""
                raise InvalidInputError(f"tools: expected JSON schemas, got a {type(tool).__name__}{advice}")
        for document in documents or ():
            if not isinstance(document, Mapping):
                raise InvalidInputError(f"documents: expected dictionaries, got a {type(document).__name__}")
        given = {"tools": tools, "documents": documents}
        plain = {name: None if items is None else list(map(to_plain, items)) for name, items in given.items()}
        return cls(text, {**tokenizer.special_tokens_map, **to_plain(variables or {}), **plain})

    def render(self, messages: Sequence[Message], *, prompt: bool = False, marked: bool = False) -> str:
        """Render a chat.

        Args:
            messages: the chat.
            prompt: end with the beginning of the assistant's turn.
            marked: put `BEGIN` and `END` around the text between the template's `{% generation %}` tags.
        """
        return self._render(_prepare_all(messages), prompt=prompt, marked=marked)

    def render_open(self, messages: Sequence[Message]) -> str:
        """Render a chat up to the end of its last message, for the model to continue.

        Raises:
            InvalidInputError: the last message has no text, or the template changes or omits the text.
        """
        prepared = _prepare_all(messages)
        content = _leave_open(prepared)
        text = self._render(prepared)
        end = text.rfind(_OPEN.strip())
        if end < 0 or content.strip() not in text:
            raise InvalidInputError("continue_final_message: the template changes the last message")
        return text[:end] if text.startswith(_OPEN, end) else text[:end].rstrip()

    def find_generated(self, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
        """Return the spans of `text`, a rendered chat, that are between the template's generation tags.

        A span is a pair of character offsets: the first one, and the one after the last.

        Raises:
            InvalidInputError: the template changes the text between its tags, or `text` has the characters
                that mark the spans.
        """
        if BEGIN in text or END in text:
            raise InvalidInputError("messages: U+FDD0 and U+FDD1 are not allowed in a text")
        spans, unmarked = _remove_marks(self.render(messages, marked=True))
        if unmarked != text:
            raise InvalidInputError("chat template: it changes the text between its generation tags")
        return spans

    def _render(self, messages: list[dict[str, Any]], *, prompt: bool = False, marked: bool = False) -> str:
        given = {**self.variables, "messages": messages, "add_generation_prompt": prompt}
        try:
            import jinja2
        except ImportError:
            raise MissingExtraError("chat", feature="the chat template") from None
        try:
            return _compile(self.template, marked).render(**given)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidInputError(f"chat template, line {error.lineno}: {error.message}") from error
        except jinja2.TemplateError as error:
            raise InvalidInputError(f"chat template: {error.message or type(error).__name__}") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            parted = [n for n, message in enumerate(messages) if isinstance(message.get("content"), list)]
            advice = f"; try text in place of the list in messages[{parted[0]}]['content']" if parted else ""
            raise InvalidInputError(f"chat template: {type(error).__name__}: {error}{advice}") from error


def choose_template(
    own: str | Mapping[str, str] | None, chosen: str | None, tools: Sequence[Tool] | None
) -> str:
    """Return the text of the template for a chat.

    Args:
        own: the model's template, or several by name, or None.
        chosen: the name of a template of the model, or the text of a template. None chooses the model's own
            template; of several, it chooses `tool_use` for a chat with tools, and else `default`.
        tools: the tools of the chat.

    Raises:
        InvalidInputError: the model has no template, or several without a default.
    """
    if isinstance(own, Mapping):
        if chosen is not None:
            return own.get(chosen, chosen)
        for name in ("tool_use", "default") if tools is not None else ("default",):
            if name in own:
                return own[name]
        names = ", ".join(sorted(own))
        raise InvalidInputError(f"chat_template: the model has several and no default; name one of {names}")
    if chosen is None and own is None:
        raise InvalidInputError(
            "chat_template: the model's files have none; give one, or set tokenizer.chat_template"
        )
    return str(own) if chosen is None else chosen


def split_chats(conversation: Any) -> tuple[list[Any], bool]:
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


# ------------------------------------------------------------------------------------------- messages


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


def _leave_open(messages: list[dict[str, Any]]) -> str:
    """Append the mark `_OPEN` to the last message's text; return the text alone."""
    last = messages[-1]
    content = last.get("content")
    if content is None:
        raise InvalidInputError("continue_final_message: the last message has no 'content'")
    if isinstance(content, str):
        last["content"] = content + _OPEN
        return content
    for block in reversed(content):
        if isinstance(block, dict) and "text" in block:
            words = str(block["text"])
            block["text"] = words + _OPEN
            return words
    raise InvalidInputError("continue_final_message: the last message has no text")


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


# ------------------------------------------------------------------------------------------- plain data


def to_plain(value: Any) -> Any:
    """Copy a value as plain types. Dataclasses and models become dictionaries.

    Other objects become the name of their class, so that a template cannot call their methods.

    >>> to_plain({"content": [{"type": "image", "image": object()}]})
    {'content': [{'type': 'image', 'image': '<object>'}]}
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if type(value) is dict or isinstance(value, Mapping):
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(to_plain(item) for item in value)
    if isinstance(value, str):  # enums and other subclasses, as the base class shows them
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, float) else _unpack(value)


def _unpack(value: Any) -> Any:
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return to_plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    dumped = getattr(value, "model_dump", None)
    return to_plain(dumped()) if callable(dumped) else f"<{type(value).__name__}>"


# ------------------------------------------------------------------------------------------- Jinja


@lru_cache(_KEPT)
def _compile(template: str, marked: bool) -> Template:
    compiled = _make_environment(marked).from_string(template)
    compiled.globals = dict(compiled.globals)  # each rendering reads all of them, slowly from a chain of maps
    return compiled


@lru_cache(None)
def _make_environment(marked: bool) -> ImmutableSandboxedEnvironment:
    from jinja2 import ext, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """An extension of Jinja: the tag `generation`, which templates put around the assistant's text."""

        tags = {"generation"}  # noqa: RUF012  # the base class declares it so

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_around", [])
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _around(self, caller: Callable[[], str]) -> str:
            return f"{BEGIN}{caller()}{END}" if marked else caller()

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _format_now
    environment.globals["dict"] = _DictFactory()
    environment.globals["namespace"] = _make_namespace()
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode JSON without the HTML escapes of Jinja's own filter, as in the models' training data."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _format_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005  # templates want the user's local time


class _DictFactory:
    """`dict` for templates: creates dictionaries without giving access to the class."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _make_namespace() -> type[Any]:
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    def check(names: Any) -> None:
        for name in names:
            if isinstance(name, str) and name.startswith("_"):
                raise SecurityError(f"a namespace takes no names with a leading underscore, got {name!r}")

    class PublicNamespace(Namespace):
        """A namespace that refuses names with a leading underscore, which could escape from the sandbox."""

        def __init__(*args: Any, **items: Any) -> None:  # a template may use an item named self
            self, *given = args
            made = dict(*given, **items)
            check(made)
            Namespace.__init__(self, made)

        def __setitem__(self, name: str, value: Any) -> None:
            check([name])
            Namespace.__setitem__(self, name, value)

    return PublicNamespace
