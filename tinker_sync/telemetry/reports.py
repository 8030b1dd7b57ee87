"""Reports of errors by kind and location, without their texts.

The text of an error may quote a prompt, a key, an address or a path on the user's machine. So a report is
built from fields of known meaning, and a traceback is reduced to this package's frames, as module and line.
Pure functions; any thread may call them.
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
# These attributes have the same meaning in every error of this package.
_SAFE_FIELDS: Final = (
    ("status_code", "status {}"),
    ("category", "category {}"),
    ("method", "{}"),
    ("path", "{}"),
    ("request_id", "request {}"),
    ("attempts", "{} attempts"),
)


def draft_failure(error: BaseException, time_s: float) -> Draft:
    """Return the event for a failure that reached the user."""
    kind, message = type(error).__name__, describe(error)
    if is_user_error(error):
        data: dict[str, Any] = {"error_type": kind, "message": message}
        status = getattr(error, "status_code", None)
        if isinstance(status, int):
            data["status_code"] = status
        fields: dict[str, Any] = {"event_name": "user_error", "event_data": data}
        return Draft("GENERIC_EVENT", "WARNING", time_s, fields, key=(kind, message))
    fields = {"error_type": kind, "error_message": message, "traceback": locate(error) or None}
    return Draft("UNHANDLED_EXCEPTION", "ERROR", time_s, fields, key=(kind, message))


def describe(error: BaseException) -> str:
    """Describe an error by its fields of known meaning.

    >>> describe(APIStatusError("tokens [1, 2, 3] are too many", status_code=413, method="POST"))
    'status 413, POST'
    """
    found = [(pattern, getattr(error, name, None)) for name, pattern in _SAFE_FIELDS]
    text = ", ".join(pattern.format(value) for pattern, value in found if _is_plain(value))
    return mask_text(text)[:_MAX_TEXT]


def _is_plain(value: object) -> bool:
    """Return True for a number, name, path or id, and False for text, which a server may have written."""
    return bool(value) and (
        isinstance(value, int) or (isinstance(value, str) and bool(_PLAIN.fullmatch(value)))
    )


def is_user_error(error: BaseException) -> bool:
    """Return True when the input, the key or the account caused the error.

    >>> is_user_error(InvalidInputError("no data")), is_user_error(KeyError("data"))
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


def locate(error: BaseException) -> str:
    """Return the lines of this package in the tracebacks of an error and its causes, or ""."""
    lines = []
    for each in _chain(error):
        frames = list(_package_frames(each.__traceback__))[-_MAX_FRAMES:]
        lines += [f"{type(each).__name__}:", *(f"  {frame}" for frame in frames)] if frames else []
    return "\n".join(lines)[:_MAX_TEXT]


def _chain(error: BaseException) -> Iterator[BaseException]:
    each: BaseException | None = error
    for _ in range(_MAX_CHAIN):
        if each is None:
            return
        yield each
        each = each.__cause__ or each.__context__


def _package_frames(traceback: TracebackType | None) -> Iterator[str]:
    while traceback is not None:
        module = str(traceback.tb_frame.f_globals.get("__name__"))
        if module.startswith(_PACKAGE):
            yield f"{module}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
