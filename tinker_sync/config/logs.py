"""The console output of TINKER_LOG. Importing this module has no effect; any thread may call `show_logs`."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Final, Literal

LogLevel = Literal["info", "debug", "curl"]
LOG_LEVELS: Final[dict[str, int]] = {"info": logging.INFO, "debug": logging.DEBUG, "curl": logging.DEBUG}

_LOGGER: Final = logging.getLogger("tinker_sync")
_FORMAT: Final = "[%(asctime)s - %(name)s:%(lineno)d - %(levelname)s] %(message)s"
_DATE_FORMAT: Final = "%Y-%m-%d %H:%M:%S"
_lock = threading.Lock()


class _Console(logging.Handler):
    """A log handler that prints this package's records on stderr in programs without their own logging.

    `emit` checks the root logger each time: a program may configure logging after its first client, and then
    each line would be printed twice. It also looks up `sys.stderr` each time, because programs replace it.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
        except Exception:  # noqa: BLE001 - logging never breaks the program; handleError follows raiseExceptions
            self.handleError(record)


def show_logs(level: LogLevel | None) -> None:
    """Set the level of the logger `tinker_sync`, and print its records unless the program handles them.

    The root logger stays as it is. A level of None has no effect.
    """
    if level is None:
        return
    _LOGGER.setLevel(LOG_LEVELS[level])
    with _lock:
        if not any(isinstance(handler, _Console) for handler in _LOGGER.handlers):
            console = _Console()
            console.setFormatter(logging.Formatter(_FORMAT, _DATE_FORMAT))
            _LOGGER.addHandler(console)
