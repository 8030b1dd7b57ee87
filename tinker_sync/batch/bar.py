"""Progress bars of tqdm for a terminal or a notebook."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Final

SWITCH: Final = "TINKER_PROGRESS"
"""The environment variable that turns every bar off."""

_OFF: Final = frozenset({"0", "false", "no", "off"})


class ProgressBar:
    """A bar with the number of finished things, their rate and the time left.

    It is drawn on the standard error stream if that is a terminal or a notebook, tqdm is installed, and the
    variable `TINKER_PROGRESS` is not 0. Otherwise its methods do nothing.

    Args:
        wanted: False for no bar.
        total: the number of things to do; None if it is not known.
        words: the text before the bar.
    """

    def __init__(self, wanted: bool, total: int | None, words: str) -> None:
        self._bar = _make_bar(total, words) if wanted and _has_place() else None
        self._failed = 0

    def advance(self, *, failed: bool = False) -> None:
        """Count one finished thing."""
        if self._bar is None:
            return
        if failed:
            self._failed += 1
            self._bar.set_postfix(failed=self._failed, refresh=False)
        self._bar.update()

    def skip(self) -> None:
        """Count one thing that an earlier run finished; it does not change the rate."""
        if self._bar is None:
            return
        for count in ("initial", "n", "last_print_n"):
            setattr(self._bar, count, getattr(self._bar, count) + 1)

    def close(self) -> None:
        """Stop drawing. The bar stays on the screen."""
        if self._bar is not None:
            self._bar.close()


def _has_place() -> bool:
    stream = sys.stderr
    switched_off = os.environ.get(SWITCH, "").strip().lower() in _OFF
    # The standard error stream of a notebook counts as a terminal.
    return not switched_off and stream is not None and stream.isatty()


def _make_bar(total: int | None, words: str) -> Any:
    try:
        tqdm: Any = importlib.import_module("tqdm.auto")
    except ImportError:
        return None
    return tqdm.tqdm(total=total, desc=words, unit="", dynamic_ncols=True)
