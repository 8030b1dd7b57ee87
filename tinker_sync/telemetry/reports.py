"""What is told of an error: its kind and whereabouts, never its words.

Words may quote a prompt, a key, an address or a path of the user's machine, whoever wrote them. So messages
are put together from fields of known meaning, and of a traceback only our own frames are kept, as a module
and a line. Pure functions; any thread may call them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final

from tinker_sync._secret import mask_text
from tinker_sync.errors import APIStatusError, InvalidInputError, RequestErrorCategory, RequestFailedError
from tinker_sync.telemetry.buffer import Draft

_PACKAGE: Final = "tinker_sync."
_PLAIN: Final = re.compile(r"[\w.:/%{}\-]{1,300}")
_MAX_FRAMES: Final = 20
_MAX_CHAIN: Final = 8
_MAX_TEXT: Final = 2000
# They have the meaning their name says in every error of ours that has them.
_TELLING: Final = (
    ("status_code", "status {}"),
    ("category", "category {}"),
    ("method", "{}"),
    ("path", "{}"),
    ("request_id", "request {}"),
    ("attempts", "{} attempts"),
)


def draft_of_failure(error: BaseException, time_s: float) -> Draft:
    """The event for a failure that has reached the user."""
    kind, message = type(error).__name__, describe(error)
    if is_users_fault(error):
        data: dict[str, Any] = {"error_type": kind, "message": message}
        status = getattr(error, "status_code", None)
        if isinstance(status, int):
            data["status_code"] = status
        fields: dict[str, Any] = {"event_name": "user_error", "event_data": data}
        return Draft("GENERIC_EVENT", "WARNING", time_s, fields, key=(kind, message))
    fields = {"error_type": kind, "error_message": message, "traceback": whereabouts(error) or None}
    return Draft("UNHANDLED_EXCEPTION", "ERROR", time_s, fields, key=(kind, message))


def describe(error: BaseException) -> str:
    """An error in words of ours.

    >>> describe(APIStatusError("tokens [1, 2, 3] are too many", status_code=413, method="POST"))
    'status 413, POST'
    """
    found = [(pattern, getattr(error, name, None)) for name, pattern in _TELLING]
    said = ", ".join(pattern.format(value) for pattern, value in found if _is_plain(value))
    return mask_text(said)[:_MAX_TEXT]


def _is_plain(value: object) -> bool:
    """Whether it is a number, name, path or id. What stands in their place may be words, of servers too."""
    return bool(value) and (
        isinstance(value, int) or (isinstance(value, str) and bool(_PLAIN.fullmatch(value)))
    )


def is_users_fault(error: BaseException) -> bool:
    """Whether the input, the key or the account is at fault, or the server said so.

    >>> is_users_fault(InvalidInputError("no data")), is_users_fault(KeyError("data"))
    (True, False)
    """
    for each in _chain(error):
        if isinstance(each, InvalidInputError):
            return True
        if isinstance(each, RequestFailedError) and each.category is RequestErrorCategory.User:
            return True
        if isinstance(each, APIStatusError) and 400 <= each.status_code < 500 and each.status_code != 408:
            return True
    return False


def whereabouts(error: BaseException) -> str:
    """Where in this package an error and what caused it came by; empty when nowhere."""
    lines = []
    for each in _chain(error):
        frames = list(_our_frames(each.__traceback__))[-_MAX_FRAMES:]
        lines += [f"{type(each).__name__}:", *(f"  {frame}" for frame in frames)] if frames else []
    return "\n".join(lines)[:_MAX_TEXT]


def _chain(error: BaseException) -> Iterator[BaseException]:
    each: BaseException | None = error
    for _ in range(_MAX_CHAIN):
        if each is None:
            return
        yield each
        each = each.__cause__ or each.__context__


def _our_frames(traceback: TracebackType | None) -> Iterator[str]:
    while traceback is not None:
        module = str(traceback.tb_frame.f_globals.get("__name__"))
        if module.startswith(_PACKAGE):
            yield f"{module}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
