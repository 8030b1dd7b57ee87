from __future__ import annotations

from tinker_sync.errors import APIStatusError
from tinker_sync.runtime.failures import copy_exception


class Stubborn(Exception):
    """An exception that cannot be created again from its arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:  # noqa: BLE001
        return caught


def test_a_copy_has_everything_but_the_traceback() -> None:
    error = APIStatusError.from_reply(429, {"x-request-id": "r-1"}, b"slow down", attempts=3)
    error.__cause__ = KeyError("a")
    copied = copy_exception(raised(error))
    assert copied is not error
    assert (type(copied), str(copied), copied.attempts) == (type(error), str(error), 3)
    assert copied.__cause__ is error.__cause__
    assert error.__traceback__ is not None
    assert copied.__traceback__ is None


def test_what_cannot_be_copied_is_passed_on() -> None:
    error = Stubborn("a", "b")
    assert copy_exception(error) is error


def test_a_copy_of_another_kind_is_no_copy() -> None:
    class Disguised(Exception):
        def __reduce__(self) -> tuple[type[Exception], tuple[str]]:
            return KeyError, ("a",)

    error = Disguised()
    assert copy_exception(error) is error
