"""How patiently samples are tried again."""

from __future__ import annotations

from attrs import field, frozen

from tinker_sync.errors import InvalidInputError


@frozen
class RetryConfig:
    """Settings of a sampling client's retries.

    Pauses follow the package's own schedule and the server's wishes, so the fields about them are only kept;
    a sample ends at its deadline, whatever else goes on.

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
    """How often one submit is tried, and how often a sample is submitted anew."""

    def __attrs_post_init__(self) -> None:
        if self.max_connections is not None and self.max_connections <= 0:
            raise InvalidInputError(
                f"RetryConfig.max_connections: expected more than 0 or None, got {self.max_connections}"
            )
        if self.max_attempts < 1:
            raise InvalidInputError(f"RetryConfig.max_attempts: expected 1 or more, got {self.max_attempts}")

    @property
    def attempts(self) -> int:
        """How often a submit is tried."""
        return self.max_attempts if self.enable_retry_logic else 1
