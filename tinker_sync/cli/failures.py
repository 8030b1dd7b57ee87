"""What went wrong, in words for people, and the exit codes."""

from __future__ import annotations

from typing import Final

DONE: Final = 0
FAILED: Final = 1
MISUSED: Final = 2
"""The command line makes no sense; nothing was tried."""
PARTIAL: Final = 3
"""Some of what was asked for is done; what is not was listed."""
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

EXIT_CODES: Final = {
    DONE: "done; also when you said no to a question",
    FAILED: "failed; stderr says why and what to do",
    MISUSED: "the command line makes no sense, such as an unknown option; nothing was tried",
    PARTIAL: "done in part; each failure is listed",
    INTERRUPTED: "Ctrl-C; no half-written file is left",
    BROKEN_PIPE: "the reader of the output went away",
}


class CliError(Exception):
    """A command cannot go on.

    Args:
        message: what happened.
        advice: what to do about it.
        code: the exit code.

    >>> CliError("no such run", "See tinker-sync run list.").code
    1
    """

    def __init__(self, message: str, advice: str = "", *, code: int = FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice
        self.code = code


# What to do, beyond what errors say themselves. By name: errors are not loaded until there is one. The first
# that fits counts.
_ADVICE: Final = (
    ("AuthenticationError", "tinker-sync auth status tells which key is in use."),
    ("APITimeoutError", "tinker-sync doctor finds out what is slow."),
    ("APIConnectionError", "tinker-sync doctor finds out why."),
    ("UnsupportedByServerError", "tinker-sync probe shows what the server offers."),
    ("CredentialError", "tinker-sync auth login stores a key."),
)


def explained(error: BaseException) -> CliError:
    """Any error, in words for people.

    >>> from tinker_sync.errors import CredentialError
    >>> explained(CredentialError("there is no API key")).advice
    'tinker-sync auth login stores a key.'
    """
    from tinker_sync import errors

    if isinstance(error, CliError):
        return error
    if isinstance(error, errors.TinkerError):
        fitting = (advice for name, advice in _ADVICE if isinstance(error, getattr(errors, name)))
        return CliError(str(error), next(fitting, ""))
    if isinstance(error, OSError):
        return CliError(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
    return CliError(f"Unexpected error: {type(error).__name__}: {error}")
