"""Conversion of exceptions to failures: to the status of a response, or to the failure of a promise.

A promise is the answer to a request whose result comes later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from tinker_sync.errors import InvalidInputError, TinkerError, WireError
from tinker_sync.local.engine.host import Cancelled, HostClosed, UnknownRun
from tinker_sync.local.store import StoreError

Category = Literal["user", "server"]

_STATUS_OF_STORE = {"not_found": 404, "exists": 409, "bad_name": 400, "full": 507, "closed": 503}
_OF_THE_USER = frozenset({"not_found", "exists", "bad_name"})
_STEP = re.compile(r"\.([A-Za-z_]\w*)|\[(\d+)\]|\['([^']*)'\]")


class Refused(Exception):
    """The refusal of a request: the status and the headers of the response, and the `detail` in its body."""

    def __init__(self, status: int, detail: Any, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = dict(headers or {})


class UserFault(ValueError):
    """An error for a request that cannot be carried out because of a fault of the user."""


def refusal_of(problem: BaseException) -> Refused | None:
    """Convert an exception of a handler to a refusal, or to None if the exception is unexpected.

    >>> refusal_of(UserFault("no such base model")).status
    400
    """
    if isinstance(problem, Refused):
        return problem
    if isinstance(problem, WireError):
        return Refused(422, unfit(problem))
    if isinstance(problem, StoreError):
        return Refused(_STATUS_OF_STORE.get(problem.kind, 500), problem.message)
    if isinstance(problem, HostClosed):
        return Refused(503, str(problem))
    if isinstance(problem, (UserFault, InvalidInputError)):
        return Refused(400, str(problem))
    return None


def unfit(problem: WireError) -> list[dict[str, Any]]:
    """Return the `detail` of a refusal for a body that does not fit its type."""
    return [{"loc": ["body", *place(problem.path)], "msg": str(problem), "type": "value_error"}]


def place(path: str | None) -> list[str | int]:
    """Split the path of a field in a body into names and indexes.

    >>> place("$.data[3].loss_fn_inputs['weights']"), place("loss_fn_config['']")
    (['data', 3, 'loss_fn_inputs', 'weights'], ['loss_fn_config', ''])
    """
    text = path or ""
    if text and not text.startswith("$"):
        text = "." + text
    return [int(index) if index else name or quoted for name, index, quoted in _STEP.findall(text)]


def failure_of(problem: BaseException) -> tuple[str, Category]:
    """Convert an exception to the text of a promise's failure, and whose fault it is: "user" or "server"."""
    if isinstance(problem, StoreError):
        return problem.message, "user" if problem.kind in _OF_THE_USER else "server"
    if isinstance(problem, UnknownRun):
        return f"{problem}; load its last checkpoint into a new one", "user"
    if isinstance(problem, (UserFault, InvalidInputError, Cancelled, Refused)):
        return str(problem), "user"
    if isinstance(problem, ValueError):  # an error of the engine, which names the input
        return str(problem), "user"
    if isinstance(problem, TinkerError):  # for example, a package is not installed
        return str(problem), "server"
    if isinstance(problem, MemoryError):
        return "there is not enough memory for this request", "server"
    return f"internal error: {type(problem).__name__}: {problem}", "server"
