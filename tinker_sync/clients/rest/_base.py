"""What the families of calls share: one set of parts for each server and key, and one way to make a call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeVar

from tinker_sync._policy import NO_SUCH_CALL
from tinker_sync.clients import _deadlines
from tinker_sync.clients._shared import SharedCores
from tinker_sync.config import Settings
from tinker_sync.errors import (
    APIStatusError,
    ExperimentalWarning,
    InvalidInputError,
    UnsupportedByServerError,
)
from tinker_sync.runtime.core import Core
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.naming import carried
from tinker_sync.runtime.rate_limiter import key_fingerprint

T = TypeVar("T")
AccessScope = Literal["owned", "accessible"]

_SCOPES: Final = ("owned", "accessible")


class RestBase:
    """A client of calls that need no session."""

    def __init__(
        self, _holder: Core | None = None, *, base_url: str | None = None, api_key: str | None = None
    ) -> None:
        if _holder is not None and (base_url is not None or api_key is not None):
            raise InvalidInputError(
                f"{type(self).__name__}: give a holder, or base_url and api_key, not both"
            )
        self._core = _holder if _holder is not None else shared_core(base_url, api_key)

    def get_telemetry(self) -> Any:
        """Return the reporter of failures of the service client, or None when telemetry is off.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     service.create_rest_client().get_telemetry() is None
        True
        """
        return self._core.companion

    @property
    def holder(self) -> Core:
        """What is shared with other clients of the same server and key.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     service.create_rest_client().holder is service.holder
        True
        """
        return self._core

    def __repr__(self) -> str:
        core = getattr(self, "_core", None)  # None if the constructor has failed
        return f"<{type(self).__name__} {core.settings.base_url}>" if core else f"<{type(self).__name__}>"

    def _call(
        self,
        name: str,
        request: Any = None,
        *,
        kind: type[T] | None = None,
        path: Mapping[str, object] | None = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> APIFuture[T]:
        """Make a call on a worker."""
        del kind  # for the type checker: what the endpoint's row promises
        return self._later(
            lambda: self._core.call(
                name, request, path=path, query=query, headers=headers, usual_s=_deadlines.REST_S
            )
        )

    def _later(self, work: Callable[[], T]) -> APIFuture[T]:
        """Do `work` on a worker; its future cannot be cancelled once it has begun."""
        core = self._core
        core.refuse_closed()
        future: APIFuture[T] = core.future()

        def run() -> None:
            if not future.begin():
                return
            future.mark_sending()
            try:
                value = work()
            except Exception as error:  # noqa: BLE001  # it belongs to whoever waits
                future.fail(error)
            else:
                future.resolve(value)

        core.send_pool.run(carried(run))
        return future


# What servers answer that have no such call; 403 is a server that has it and does not let everybody.


def newer_call(core: Core, name: str, request: Any) -> Any:
    """Make a call that only the newest servers have.

    Raises:
        UnsupportedByServerError: this one has not.
    """
    try:
        return core.call(name, request, usual_s=_deadlines.REST_S)
    except APIStatusError as error:
        if error.status_code not in NO_SUCH_CALL:
            raise
        raise UnsupportedByServerError(
            f"this server does not offer {name} (it answers {error.status_code})", feature=name
        ) from error


def warn_experimental(name: str) -> None:
    """Say that a call may change; to whoever called the public method that says so."""
    warnings.warn(f"{name} is experimental and may change", ExperimentalWarning, stacklevel=3)


def checked_scope(access_scope: str) -> str:
    """The scope, if it is one."""
    if access_scope not in _SCOPES:
        raise InvalidInputError(f"access_scope: expected one of {', '.join(_SCOPES)}, got {access_scope!r}")
    return access_scope


def checked_id(name: str, value: str) -> str:
    """An id that is not empty: an empty one would address the whole list."""
    if not value:
        raise InvalidInputError(f"{name}: expected an id, got ''")
    return value


_cores: Final = SharedCores({})


def shared_core(base_url: str | None, api_key: str | None) -> Core:
    """The parts all clients of a server and key share in this process; they are never closed by us."""
    settings = Settings.resolve(base_url=base_url, api_key=api_key)
    key = settings.api_key
    place = (settings.base_url, key_fingerprint(key.reveal() if key is not None else ""))
    return _cores.get(place, lambda: Core(settings))
