"""The console output that TINKER_LOG asks for. Nothing happens on import; any thread may call `show_logs`."""

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
_adding = threading.Lock()


class _Console(logging.Handler):
    """Writes our records to stderr for programs that have set up no logging of their own.

    Whether they have is asked at each record: a program may do it after its first client was made, and must
    not see every line twice then. `sys.stderr` is looked up each time, since programs replace it.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
        except Exception:  # noqa: BLE001 - logging never breaks the program; handleError obeys raiseExceptions
            self.handleError(record)


def show_logs(level: LogLevel | None) -> None:
    """Set the level of the logger `tinker_sync`, and print its records if nobody else does.

    The root logger is left alone. None changes nothing.
    """
    if level is None:
        return
    _LOGGER.setLevel(LOG_LEVELS[level])
    with _adding:
        if not any(isinstance(handler, _Console) for handler in _LOGGER.handlers):
            console = _Console()
            console.setFormatter(logging.Formatter(_FORMAT, _DATE_FORMAT))
            _LOGGER.addHandler(console)
