"""Exit codes, and errors as messages for the user of the command line."""

from __future__ import annotations

from typing import Final

DONE: Final = 0
FAILED: Final = 1
MISUSED: Final = 2
PARTIAL: Final = 3
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

EXIT_CODES: Final = {
    DONE: "done; also when you answered no to a question",
    FAILED: "failed; stderr has the reason and what to do",
    MISUSED: "the command line is wrong, such as an unknown option; nothing was tried",
    PARTIAL: "done in part; each failure is listed",
    INTERRUPTED: "Ctrl-C; no half-written file is left",
    BROKEN_PIPE: "the reader of the output went away",
}


class CliError(Exception):
    """An error that ends a command, with advice for the user.

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


# Advice beyond the text of the error itself; the first matching class counts. The names are strings because
# the module of errors loads only when there is an error.
_ADVICE: Final = (
    (
        "CredentialError",
        "Set TINKER_API_KEY, or unset it and run tinker-sync auth login; or --base-url local.",
    ),
    ("AuthenticationError", "tinker-sync auth status shows whether the key in use works."),
    ("APITimeoutError", "tinker-sync doctor finds out what is slow."),
    ("APIConnectionError", "tinker-sync doctor finds out why."),
    ("UnsupportedByServerError", "tinker-sync probe shows what the server offers."),
)


def explain(error: BaseException) -> CliError:
    """Return a `CliError` for any error, with a message and, for some errors, advice for the user.

    >>> from tinker_sync.errors import UnsupportedByServerError
    >>> explain(UnsupportedByServerError("the server has no search")).advice
    'tinker-sync probe shows what the server offers.'
    """
    from tinker_sync import errors

    if isinstance(error, CliError):
        return error
    if isinstance(error, errors.TinkerError):
        matching = (advice for name, advice in _ADVICE if isinstance(error, getattr(errors, name)))
        return CliError(str(error), next(matching, ""))
    if isinstance(error, OSError):
        return CliError(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
    return CliError(f"Unexpected error: {type(error).__name__}: {error}")
