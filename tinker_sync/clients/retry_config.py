"""`RetryConfig`: the settings of a sampling client's retries."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from tinker_sync._base.policy import Meaning, Stage, rule_for
from tinker_sync.errors import APIConnectionError, InternalServerError, InvalidInputError, RateLimitError


# Scripts read the defaults from the class, which attrs would remove.
@dataclass(frozen=True)
class RetryConfig:
    """Settings of a sampling client's retries.

    Only `enable_retry_logic` and `max_attempts` have an effect; scripts of the reference client may set the
    other fields. The package and the server determine the pauses. A sample fails at its deadline at the
    latest.

    Raises:
        InvalidInputError: `max_connections` or `max_attempts` is less than 1.

    >>> RetryConfig(max_attempts=3).enable_retry_logic
    True
    """

    max_connections: int | None = 1000
    progress_timeout: float = 7200.0
    retry_delay_base: float = 0.5
    retry_delay_max: float = 10.0
    jitter_factor: float = 0.25
    enable_retry_logic: bool = True
    enable_stuck_detection: bool = True
    retryable_exceptions: tuple[type[Exception], ...] = (
        TimeoutError,
        APIConnectionError,
        InternalServerError,
        RateLimitError,
    )
    """The errors after which a repeated call may succeed."""
    max_attempts: int = field(default=10, kw_only=True)
    """The most tries of one submit, and the most submits of one sample."""

    def __post_init__(self) -> None:
        if self.max_connections is not None and self.max_connections <= 0:
            raise InvalidInputError(
                f"RetryConfig.max_connections: expected more than 0 or None, got {self.max_connections}"
            )
        if self.max_attempts < 1:
            raise InvalidInputError(f"RetryConfig.max_attempts: expected 1 or more, got {self.max_attempts}")

    @property
    def attempts(self) -> int:
        """`max_attempts`, or 1 without retries."""
        return self.max_attempts if self.enable_retry_logic else 1


def as_retry_config(given: Any) -> RetryConfig:
    """Return settings as they are, the defaults for None, or those of another package's `RetryConfig`.

    Raises:
        InvalidInputError: `given` is none of these.

    >>> as_retry_config(None) == RetryConfig()
    True
    """
    if given is None or isinstance(given, RetryConfig):
        return given or RetryConfig()
    if type(given).__name__ != "RetryConfig":
        raise InvalidInputError(f"retry_config: expected a RetryConfig, got {type(given).__name__}")
    names = (each.name for each in fields(RetryConfig))
    return RetryConfig(**{name: getattr(given, name) for name in names if hasattr(given, name)})


def is_retryable_status_code(status_code: int) -> bool:
    """Return True if a call that was answered with this status may succeed when it is repeated.

    >>> [is_retryable_status_code(status) for status in (404, 429, 503)]
    [False, True, True]
    """
    rule = rule_for(status_code, Stage.CALL)
    return rule.passes and rule.meaning is not Meaning.BLOCKED
