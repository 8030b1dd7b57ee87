"""Tests over tables of values, as one item of pytest. An item for each value would cost more."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any


def for_each(names: str | tuple[str, ...], values: Collection[Any]) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that runs a test for every value of a table, as one item of pytest.

    It has the arguments of `pytest.mark.parametrize`. The error lists the values that fail. All values share
    the same fixtures, so the test must not change the objects that fixtures return.

    Args:
        names: the argument of the test that takes a value, or the arguments that take a row.
        values: the table; a row is a tuple when there are several names.
    """
    arguments = (names,) if isinstance(names, str) else names

    def decorate(test: Callable[..., None]) -> Any:
        @functools.wraps(test)
        def run(*own: Any, **fixtures: Any) -> None:
            assert values
            failures: list[tuple[str, Exception]] = []
            for value in values:
                row = (value,) if isinstance(names, str) else value
                try:
                    test(*own, **fixtures, **dict(zip(arguments, row, strict=True)))
                except Exception as error:  # noqa: BLE001  # the error lists the other failures too
                    failures.append((f"{value!r:.100}: {type(error).__name__}: {error!s:.200}", error))
            if failures:
                listed = "\n".join(text for text, _ in failures)
                raise AssertionError(f"{len(failures)} of {len(values)} fail:\n{listed}") from failures[0][1]

        signature = inspect.signature(test)
        kept = [each for name, each in signature.parameters.items() if name not in arguments]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate
