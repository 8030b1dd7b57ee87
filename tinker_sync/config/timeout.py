"""`Timeout`, the limits on silence of a server, and `RequestOptions`, a name for annotations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypedDict

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


@frozen
class Timeout:
    """Limits on silence, in seconds. A transfer may take any time while data arrives.

    Args:
        connect: until the connection is ready, TLS included.
        read: from the end of the request to the first byte of the response.
        idle: between two pieces of a response; the default is `read`.

    >>> Timeout(read=120)
    Timeout(connect=5.0, read=120.0, idle=None)
    >>> Timeout.of(30), Timeout.of((3.05, 27))
    (Timeout(connect=5.0, read=30.0, idle=None), Timeout(connect=3.05, read=27.0, idle=None))
    """

    connect: float = field(default=5.0, validator=_positive)
    read: float = field(default=60.0, validator=_positive)
    idle: float | None = field(default=None, validator=_positive_or_none)

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
    def of(cls, value: Timeout | float | tuple[float, float] | None) -> Timeout:
        """Convert a number (read), a pair (connect, read), a `Timeout` or None to a `Timeout`.

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
