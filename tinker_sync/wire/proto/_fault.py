"""Faults in messages, with a path that grows while the exception unwinds.

The parts of a path are known at different levels: a loop over sequences knows the index, the reader of a
    field the
name. Each level prepends its part as the exception passes, so valid messages cost nothing extra. The
outermost function converts the fault to the public error. Any thread may use this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tinker_sync.errors import InvalidInputError, WireError

_LONGEST_KEY = 60
"""The longest map key in a path; keys can be as long as the message."""


def name_entry(name: str, key: object) -> str:
    """Return the path segment of a map entry.

    >>> name_entry("fields", "logprobs")
    "fields['logprobs']"
    """
    shown = key if not isinstance(key, str) or len(key) <= _LONGEST_KEY else f"{key[:_LONGEST_KEY]}…"
    return f"{name}[{shown!r}]"


class FieldFault(Exception):
    """A value or a byte that does not fit its field; this package converts it before it returns."""

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path

    def under(self, segment: str) -> FieldFault:
        """Prepend a segment to the path; return the fault."""
        dot = "." if self.path and not self.path.startswith("[") else ""
        self.path = f"{segment}{dot}{self.path}"
        return self


@contextmanager
def translate_refusals(segment: str) -> Iterator[None]:
    """Convert a type's refusal of a value in the block to a fault at this segment."""
    try:
        yield
    except FieldFault as fault:
        raise fault.under(segment) from None
    except InvalidInputError as error:
        raise FieldFault(str(error), segment) from None


class _Decoding:
    """A context manager written as a class, because a generator costs several times as much per answer."""

    __slots__ = ("_message",)

    def __init__(self, message: str) -> None:
        self._message = message

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, FieldFault):
            raise WireError(
                f"cannot decode {self._message}: {error.reason}", path=error.path or "$"
            ) from None
        if isinstance(error, InvalidInputError):  # the type is stricter than the message
            raise WireError(f"cannot decode {self._message}: {error}", path="$") from None


def decoding(message: str) -> _Decoding:
    """Convert faults in the block to `WireError`: the received bytes are wrong."""
    return _Decoding(message)


@contextmanager
def encoding(message: str) -> Iterator[None]:
    """Convert faults in the block to `InvalidInputError`: the user's values cannot be sent."""
    try:
        yield
    except FieldFault as fault:
        raise InvalidInputError(f"{fault.path or message}: {fault.reason}") from None
