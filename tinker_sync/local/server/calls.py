"""What handlers get and return: requests, answers and failures; and the table of handlers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import attrs

from tinker_sync.errors import InvalidInputError, TinkerError, WireError
from tinker_sync.local.engine.host import Cancelled, HostClosed, UnknownRun
from tinker_sync.local.store import StoreError
from tinker_sync.wire import json as json_codec
from tinker_sync.wire.endpoints import PROTOBUF, Endpoint

if TYPE_CHECKING:
    import asyncio
    from typing import TypeAlias

    from tinker_sync.local.server.state import Service

# -------------------------------------------------------------------------------------------------- failures


Category = Literal["user", "server"]

_STATUS_OF_STORE = {"not_found": 404, "exists": 409, "bad_name": 400, "full": 507, "closed": 503}
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
    """Return the text and the category with which the promise of an exception fails."""
    if isinstance(problem, UnknownRun):
        return f"{problem}; load its last checkpoint into a new one", "user"
    refused = refusal_of(problem)
    if refused is not None:
        return str(refused.detail), "user" if refused.status < 500 else "server"
    if isinstance(problem, (ValueError, Cancelled)):  # an error of the engine, which names the input
        return str(problem), "user"
    if isinstance(problem, TinkerError):  # for example, a package is not installed
        return str(problem), "server"
    if isinstance(problem, MemoryError):
        return "there is not enough memory for this request", "server"
    return f"internal error: {type(problem).__name__}: {problem}", "server"


# -------------------------------------------------------------------------------------- requests and answers


T = TypeVar("T")

_DIGITS: Final = re.compile(r"[0-9]{1,18}")


@attrs.frozen(eq=False, kw_only=True)
class Ask:
    """A request as its handler gets it: the call, the ids in the path, the query, the headers and the body.

    Header names are in lower case.
    """

    endpoint: Endpoint
    ids: Mapping[str, str]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    credential: str = attrs.field(default="", repr=False)
    gone: asyncio.Future[None] | None = None
    """Done when the client has closed the connection."""
    ignored: set[str] = attrs.field(factory=set, init=False)
    """Unknown fields of the body, by name."""

    def read(self, cls: type[T]) -> T:
        """Return the JSON body as a value of `cls`, and add its unknown fields to `ignored`.

        Raises:
            WireError: the body is not JSON, or does not fit the type.
        """
        request, ignored = json_codec.read_leniently(json_codec.loads(self.body, whole_text=True), cls)
        self.ignored.update(ignored)
        return request

    def tree(self, *fields: str) -> dict[str, Any]:
        """Return the JSON body as a mapping; an empty body is an empty mapping.

        Fields that are neither in `fields` nor called `type` are added to `ignored`.

        Raises:
            Refused: the body is JSON but not an object.
            WireError: the body is not JSON.
        """
        tree = json_codec.loads(self.body, whole_text=True) if self.body else {}
        if not isinstance(tree, dict):
            raise Refused(422, [{"loc": ["body"], "msg": "expected an object", "type": "dict_type"}])
        with json_codec.noting() as ignored:
            json_codec.note(tree.keys() - {*fields, "type"}, self.endpoint.name)
        self.ignored.update(ignored)
        return tree

    @cached_property
    def digest(self) -> bytes:
        """A checksum of the call and its body, by which a repeated request is recognised."""
        return hashlib.sha256(self.endpoint.name.encode() + self.body).digest()

    @property
    def sends_protobuf(self) -> bool:
        """True if the body is protobuf."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower() == PROTOBUF

    @property
    def wants_protobuf(self) -> bool:
        """True if the client accepts protobuf as the answer."""
        return PROTOBUF in self.headers.get("accept", "").lower()

    def number(self, name: str, default: int, *, least: int = 0, most: int = 10_000) -> int:
        """Return the whole number that the query has under a name, or `default` if it has none.

        Raises:
            Refused: the query has something else there, or a number below `least` or above `most`.
        """
        given = self.query.get(name, "")
        if not given:
            return default
        if not (_DIGITS.fullmatch(given) and least <= int(given) <= most):
            raise Refused(
                422, [{"loc": ["query", name], "msg": f"expected {least} to {most}", "type": "value_error"}]
            )
        return int(given)


Handler: TypeAlias = "Callable[[Service, Ask], Awaitable[Any]]"
"""A handler returns an `Answer`, or a value that has a JSON form."""


class Calls(dict[str, "Handler"]):
    """The handlers of one module, by the name of the call.

    >>> calls = Calls()
    >>> @calls.of("healthz")
    ... async def healthz(service, ask):
    ...     return {"status": "ok"}
    >>> list(calls)
    ['healthz']
    """

    def of(self, name: str) -> Callable[[Handler], Handler]:
        """Return a decorator that registers the handler of a call."""

        def register(handler: Handler) -> Handler:
            self[name] = handler
            return handler

        return register
