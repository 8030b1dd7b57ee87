"""The base class of all REST calls, and the runtimes that clients for one server and key share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeVar

from tinker_sync._base.naming import warn_caller
from tinker_sync._base.policy import NO_SUCH_CALL
from tinker_sync.clients._arguments import check_is_path
from tinker_sync.clients._base import REST_S, BaseClient, SharedRuntimes
from tinker_sync.config import Settings
from tinker_sync.errors import (
    APIStatusError,
    ExperimentalWarning,
    InvalidInputError,
    UnsupportedByServerError,
)
from tinker_sync.runtime.client import ClientRuntime
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.handshake import explain_missing_route
from tinker_sync.runtime.rate_limiter import key_fingerprint
from tinker_sync.runtime.raw import later
from tinker_sync.types import ParsedCheckpointTinkerPath
from tinker_sync.wire.endpoints import NEWER, row_of
from tinker_sync.wire.paths import segment, segments

T = TypeVar("T")
AccessScope = Literal["owned", "accessible"]

_SCOPES: Final = ("owned", "accessible")


class RestBase(BaseClient):
    """The base class of clients whose calls need no session. It makes each call on a worker."""

    def __init__(
        self, _holder: ClientRuntime | None = None, *, base_url: str | None = None, api_key: str | None = None
    ) -> None:
        if _holder is not None and (base_url is not None or api_key is not None):
            raise InvalidInputError(
                f"{type(self).__name__}: give a holder, or base_url and api_key, not both"
            )
        self._runtime = _holder if _holder is not None else shared_runtime(base_url, api_key)

    def _call(
        self,
        name: str,
        request: Any = None,
        *,
        path: Mapping[str, object] | None = None,
        query: Mapping[str, Any] | None = None,
    ) -> APIFuture[T]:
        """Make a call on a worker, and return its future."""
        runtime = self._runtime
        return self._later(
            lambda: call_offered(runtime, name, request, path=path, query=query), changes=row_of(name).changes
        )

    def _later(self, work: Callable[[], T], *, changes: bool = False) -> APIFuture[T]:
        """Run `work` on a worker, and return its future, which cannot be cancelled once the work has begun.

        Args:
            work: makes the call.
            changes: True if the call changes something at the server, so that the end of the client waits for
                it.
        """
        return later(self._runtime, work, changes=changes)


def call_offered(runtime: ClientRuntime, name: str, request: Any = None, **options: Any) -> Any:
    """Make a call, and distinguish a route that the server lacks from an object that does not exist.

    Args:
        runtime: the runtime of the client.
        name: the name of the endpoint.
        request: the body.
        options: further arguments of `Server.call`.

    Raises:
        UnsupportedByServerError: the server has no such route; the message may name a call to use instead.
        TinkerError: the call failed.
    """
    try:
        return runtime.server.call(name, request, usual_s=REST_S, **options)
    except APIStatusError as error:
        missing = missing_route(runtime, name, error)
        if missing is None:
            raise
        raise missing from error


def missing_route(
    runtime: ClientRuntime, name: str, error: APIStatusError
) -> UnsupportedByServerError | None:
    """Return the error to raise if `error` shows that the server has no route for a call, else None."""
    newer = name in NEWER and error.status_code in NO_SUCH_CALL
    if not newer and not runtime.server.published.lacks_route(
        name, error, runtime.server.start().facts.dialect
    ):
        return None
    return explain_missing_route(name, error, row_of(name).instead)


def parse_path(runtime: ClientRuntime, tinker_path: str) -> ParsedCheckpointTinkerPath:
    """Return the parts of a checkpoint's path.

    Open servers also name a sampler checkpoint `tinker://RUN/NAME`.

    Raises:
        InvalidInputError: the text is not such a path.
    """
    check_is_path(tinker_path)
    bare = not runtime.settings.is_vendor_host
    return ParsedCheckpointTinkerPath.from_tinker_path(tinker_path, bare=bare)


def warn_experimental(name: str) -> None:
    """Warn the caller of a public method that the service may change the call."""
    warn_caller(f"{name} is experimental and may change", ExperimentalWarning)


def checked_scope(access_scope: str) -> str:
    """Return the scope.

    Raises:
        InvalidInputError: the scope is unknown.
    """
    if access_scope not in _SCOPES:
        raise InvalidInputError(f"access_scope: expected one of {', '.join(_SCOPES)}, got {access_scope!r}")
    return access_scope


def checked_id(name: str, value: object) -> str:
    """Return the id, or refuse a value that would address another object.

    Raises:
        InvalidInputError: the value is not a string, is empty, is the path of a checkpoint, or
            cannot be part of a URL.

    >>> checked_id("session_id", "s-1")
    's-1'
    """
    if not isinstance(value, str) or not value:
        raise InvalidInputError(f"{name}: expected an id, got {value!r}")
    if value.startswith("tinker://"):
        raise InvalidInputError(f"{name}: expected an id, got the path {value!r}")
    try:
        (segments if name == "checkpoint_id" else segment)(value)
    except InvalidInputError as error:
        raise InvalidInputError(f"{name}: expected an id, but {error}") from None
    return value


_runtimes: Final = SharedRuntimes({})


def shared_runtime(base_url: str | None, api_key: str | None) -> ClientRuntime:
    """Return the runtime that REST clients of one server and key share in this process. It stays open."""
    settings = Settings.resolve(base_url=base_url, api_key=api_key)
    key = settings.api_key
    place = (settings.base_url, key_fingerprint(key.reveal() if key is not None else ""))
    return _runtimes.get(place, lambda: ClientRuntime(settings))
