"""`Timeout`, the limits on silence of a server, and `RequestOptions`, a type for annotations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypedDict

from attrs import Attribute, field, frozen

from tinker_sync.errors import ConfigurationError


def _positive(_: object, attribute: Attribute[float], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigurationError(f"timeout.{attribute.name} must be a number of seconds, not {value!r}")
    if not (value > 0 and math.isfinite(value)):
        raise ConfigurationError(
            f"timeout.{attribute.name} must be a positive number of seconds, not {value!r}"
        )


def _positive_or_none(instance: object, attribute: Attribute[float | None], value: object) -> None:
    if value is not None:
        _positive(instance, attribute, value)  # type: ignore[arg-type]  # only the attribute's name is read


_CONNECT_S, _READ_S, _NO_LIMIT_S = 5.0, 60.0, 86_400.0
_UNSET: Any = object()


@frozen
class Timeout:
    """Limits on the silence of a server, in seconds. A transfer may take any time while data arrives.

    None in place of a number is one day. `httpx.Timeout` has the same parameters except `idle`.

    Args:
        timeout: a number for both `connect` and `read`, or a pair or an object as `of` takes it.
        connect: the limit for each step of opening a connection: TCP, the tunnel of a proxy, TLS.
        read: the limit from the end of the request to the first byte of the response. While the request is
            sent, the limit for the server to take each piece of it.
        idle: the limit between two pieces of a response; the default is `read`.
        write, pool: have no effect.

    >>> Timeout(read=120), Timeout(60, connect=10)
    (Timeout(connect=5.0, read=120.0, idle=None), Timeout(connect=10.0, read=60.0, idle=None))
    >>> Timeout.of(30), Timeout.of((3.05, 27))
    (Timeout(connect=5.0, read=30.0, idle=None), Timeout(connect=3.05, read=27.0, idle=None))
    """

    connect: float = field(default=_CONNECT_S, validator=_positive)
    read: float = field(default=_READ_S, validator=_positive)
    idle: float | None = field(default=None, validator=_positive_or_none)

    def __init__(
        self,
        timeout: Any = _UNSET,
        *,
        connect: float | None = _UNSET,
        read: float | None = _UNSET,
        idle: float | None = None,
        write: float | None = None,  # noqa: ARG002
        pool: float | None = None,  # noqa: ARG002
    ) -> None:
        defaults: tuple[Any, Any] = _CONNECT_S, _READ_S
        if timeout is None or isinstance(timeout, (int, float)):
            defaults = timeout, timeout
        elif timeout is not _UNSET:
            base = Timeout.of(timeout)
            defaults, idle = (base.connect, base.read), base.idle if idle is None else idle
        pairs = zip((connect, read), defaults, strict=True)
        limits = [default if given is _UNSET else given for given, default in pairs]
        self.__attrs_init__(  # type: ignore[attr-defined]
            *(_NO_LIMIT_S if limit is None else limit for limit in limits), idle
        )

    def __attrs_post_init__(self) -> None:
        for name in ("connect", "read", "idle"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, float(value))

    @property
    def idle_s(self) -> float:
        """The longest pause within a response."""
        return self.read if self.idle is None else self.idle

    @classmethod
    def of(cls, value: Any) -> Timeout:
        """Convert a number (read), a pair (connect, read), or None (defaults) to a `Timeout`.

        A `Timeout` stays as it is. Another object with `connect` and `read`, such as an `httpx.Timeout`,
        gives these two.

        Raises:
            ConfigurationError: the value has another form, or is not positive.
        """
        if isinstance(value, Timeout):
            return value
        if value is None:
            return cls()
        if isinstance(value, (tuple, list)):
            if len(value) != 2:
                raise ConfigurationError(f"timeout takes a pair (connect, read), not {len(value)} values")
            return cls(connect=value[0], read=value[1])
        if hasattr(value, "connect") and hasattr(value, "read"):
            return cls(connect=value.connect, read=value.read)
        return cls(read=value)


class RequestOptions(TypedDict, total=False):
    """Settings of one request, for annotations in scripts written for the reference client.

    No method of this package takes them: headers, retries and timeouts are settings of a client.

    >>> options: RequestOptions = {"max_retries": 2, "timeout": 5.0}
    """

    headers: Mapping[str, str]
    max_retries: int
    timeout: float | Timeout | None
    params: Mapping[str, object]
    extra_json: Mapping[str, object]
    idempotency_key: str
    follow_redirects: bool
