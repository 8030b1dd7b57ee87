"""A `caplog` that first waits for the records that threads of a client have handed over.

Such a record reaches the handlers a moment later, on another thread. A test that looks at the log after the
call that caused it would otherwise pass or fail by chance.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from _pytest.logging import LogCaptureHandler

from tinker_sync._base.log import Log

_PATIENCE_S = 30.0
_changed = threading.Condition()
_under_way: list[logging.LogRecord] = []  # guarded by _changed
_handle, _pass_on = Log.handle, Log._pass_on


def install() -> None:
    """Count the records on their way to the handlers."""
    setattr(Log, "handle", _counting)  # noqa: B010  # a plain assignment does not pass the type checker
    setattr(Log, "_pass_on", _discounting)  # noqa: B010


def _counting(log: Log, record: logging.LogRecord) -> None:
    with _changed:
        _under_way.append(record)
    _handle(log, record)


def _discounting(log: Log, record: logging.LogRecord) -> None:
    try:
        _pass_on(log, record)
    finally:
        with _changed:
            _under_way[:] = [each for each in _under_way if each is not record]
            _changed.notify_all()


def wait_for_handlers() -> None:
    """Wait until the handlers have got all records, except those that a client dropped when it ended."""
    with _changed:
        _changed.wait_for(lambda: not _under_way or not _has_threads(), _PATIENCE_S)
        _under_way.clear()


def _has_threads() -> bool:
    return any(thread.name.startswith("tinker-") for thread in threading.enumerate())


class SettledCaplog(pytest.LogCaptureFixture):
    """The fixture `caplog`, complete at each look."""

    @property
    def handler(self) -> LogCaptureHandler:
        wait_for_handlers()
        return super().handler

    def get_records(self, when: Any) -> list[logging.LogRecord]:
        """Return the records of a phase of the test, complete."""
        wait_for_handlers()
        return super().get_records(when)


@pytest.fixture
def caplog(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The fixture of the same name, which waits for records that are on their way."""
    fixture = SettledCaplog(request.node, _ispytest=True)
    yield fixture
    fixture._finalize()
