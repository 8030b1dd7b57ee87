"""`RetryConfig`: the settings of a sampling client's retries."""

from __future__ import annotations

from attrs import field, frozen

from tinker_sync.errors import InvalidInputError


@frozen
class RetryConfig:
    """Settings of a sampling client's retries.

    The fields about pauses have no effect: pauses follow the schedule of the package and the requests of the
    server. A sample fails at its deadline at the latest.

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
    retryable_exceptions: tuple[type[Exception], ...] = ()
    max_attempts: int = field(default=10, kw_only=True)
    """The number of tries of one submit, and the number of submits of one sample."""

    def __attrs_post_init__(self) -> None:
        if self.max_connections is not None and self.max_connections <= 0:
            raise InvalidInputError(
                f"RetryConfig.max_connections: expected more than 0 or None, got {self.max_connections}"
            )
        if self.max_attempts < 1:
            raise InvalidInputError(f"RetryConfig.max_attempts: expected 1 or more, got {self.max_attempts}")

    @property
    def attempts(self) -> int:
        """The number of tries of a submit."""
        return self.max_attempts if self.enable_retry_logic else 1
