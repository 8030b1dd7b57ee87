"""A check of chat messages, for all functions that take them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tinker_sync.errors import InvalidInputError

_OTHER_FORMATS: Final = {"from": "role", "value": "content", "speaker": "role", "text": "content"}
"""Keys of other chat formats, each with the key to use instead."""


def refuse_odd_messages(messages: Any) -> None:
    """Raise an error unless the value is a sequence of one or more chat messages, each with a role.

    For a message in another chat format, the error lists the keys to rename.

    Raises:
        InvalidInputError: `problems` lists each message that is wrong.

    >>> refuse_odd_messages([{"from": "human", "value": "2 + 3?"}])
    Traceback (most recent call last):
    tinker_sync.errors.InvalidInputError: messages[0]: has no 'role'; rename 'from' to 'role', 'value' to \
'content', and 'human' to 'user'
    """
    if isinstance(messages, Mapping):
        raise InvalidInputError("messages: expected a list of messages, got one; write [message]")
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        kind = type(messages).__name__
        raise InvalidInputError(
            f"messages: expected a list of dictionaries with role and content, got {kind}"
        )
    problems = [problem for index, message in enumerate(messages) for problem in _problems(index, message)]
    if not messages:
        problems = ["messages: is empty"]
    if problems:
        raise InvalidInputError(problems)


def _problems(index: int, message: Any) -> Iterator[str]:
    if not isinstance(message, Mapping):
        # Objects of other libraries have the keys as attributes.
        if not hasattr(message, "role"):
            kind = type(message).__name__
            yield f"messages[{index}]: expected a dictionary with role and content, got a {kind}"
        return
    if "role" not in message:
        yield f"messages[{index}]: has no 'role'{_advice(message)}"
    elif not isinstance(message["role"], str):
        yield f"messages[{index}]['role']: expected text, got {message['role']!r}"
    elif "content" not in message and "value" in message:
        yield f"messages[{index}]: has no 'content'{_advice(message)}"
    elif all(value is None for name, value in message.items() if name not in ("role", "name")):
        found = "is None" if "content" in message else "is missing"
        yield f"messages[{index}]['content']: {found}; give text, or leave the message out"
    elif isinstance(message.get("content"), (int, float, bytes)):
        given = message["content"]
        yield f"messages[{index}]['content']: expected text, got {given!r} ({type(given).__name__})"


def _advice(message: Mapping[str, Any]) -> str:
    renames = [f"{old!r} to {new!r}" for old, new in _OTHER_FORMATS.items() if old in message]
    if not renames:
        return "; a message is {'role': 'user', 'content': '...'}"
    roles = {"human": "user", "gpt": "assistant", "bot": "assistant"}
    given = message.get("from", message.get("speaker"))
    if given in roles:
        renames.append(f"{given!r} to {roles[given]!r}")
    listed = ", ".join(renames[:-1]) + f", and {renames[-1]}" if len(renames) > 2 else " and ".join(renames)
    return f"; rename {listed}"
