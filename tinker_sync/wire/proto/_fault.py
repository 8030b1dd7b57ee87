"""What does not fit and where, while the call stack that knows the path unwinds.

The place of a fault is known in pieces: the loop over sequences knows the index, the reader of one field
its name. Each puts its piece in front as the exception passes, so the good path pays nothing; the outermost
function turns the fault into the public error. Any thread may use this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tinker_sync.errors import InvalidInputError, WireError

_LONGEST_KEY = 60
"""A map key may be as long as the message; an error's path need not."""


def entry(name: str, key: object) -> str:
    """The path segment of a map's entry.

    >>> entry("fields", "logprobs")
    "fields['logprobs']"
    """
    shown = key if not isinstance(key, str) or len(key) <= _LONGEST_KEY else f"{key[:_LONGEST_KEY]}…"
    return f"{name}[{shown!r}]"


class Fault(Exception):
    """A value or a byte that does not fit; never leaves this package."""

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path

    def under(self, segment: str) -> Fault:
        """The same fault, seen from one level further out."""
        dot = "." if self.path and not self.path.startswith("[") else ""
        self.path = f"{segment}{dot}{self.path}"
        return self


@contextmanager
def refusals_of_types(segment: str) -> Iterator[None]:
    """A type that does not take what was read makes a fault at this place."""
    try:
        yield
    except Fault as fault:
        raise fault.under(segment) from None
    except InvalidInputError as error:
        raise Fault(str(error), segment) from None


class _Decoding:
    """A class, since a generator costs several times as much and every small answer enters here."""

    __slots__ = ("_message",)

    def __init__(self, message: str) -> None:
        self._message = message

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, Fault):
            raise WireError(
                f"cannot decode {self._message}: {error.reason}", path=error.path or "$"
            ) from None
        if isinstance(error, InvalidInputError):  # a type that is stricter than its message
            raise WireError(f"cannot decode {self._message}: {error}", path="$") from None


def decoding(message: str) -> _Decoding:
    """Faults inside become `WireError`: the bytes of a server are wrong."""
    return _Decoding(message)


@contextmanager
def encoding(message: str) -> Iterator[None]:
    """Faults inside become `InvalidInputError`: what the user gave cannot be sent."""
    try:
        yield
    except Fault as fault:
        raise InvalidInputError(f"{fault.path or message}: {fault.reason}") from None
