"""Signals at every moment at which the interpreter can handle one, without chance.

The interpreter handles signals on the main thread between two instructions: when a function begins, after a
call, and when a loop goes back. A trace function sees each of these moments and can do there what a signal
handler does. `at_every_moment` repeats a call, and does that at another moment each time.
"""

from __future__ import annotations

import dis
import os
import sys
import threading
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any

import tinker_sync

_OURS = os.path.join(os.path.dirname(tinker_sync.__file__), "")
_LIBRARY = os.path.dirname(threading.__file__)
# The parts of the standard library in whose functions the main thread may hold a lock.
_NAMES = ("threading.py", "queue.py", "weakref.py", "_weakrefset.py", "concurrent", "logging")
_TRACED = (_OURS, *(os.path.join(_LIBRARY, name) for name in _NAMES))

Moment = tuple[CodeType, int]


@cache
def _offsets(code: CodeType) -> frozenset[int]:
    """Return the offsets of the instructions before which the interpreter may handle a signal.

    It handles none after a `with` has called `__enter__`, unless that is a method of the interpreter on
    Python 3.14, for which the client has `_clock.make_lock`.
    """
    found, handles, before = {0}, False, ""
    for each in dis.get_instructions(code):
        if handles:
            found.add(each.offset)
        calls = each.opname.startswith("CALL") and not each.opname.startswith("CALL_INTRINSIC")
        handles = (calls and before != "LOAD_SPECIAL") or each.opname == "RESUME"
        before = each.opname
        if each.opname.startswith("JUMP") and isinstance(each.argval, int) and each.argval <= each.offset:
            found.add(each.argval)
    return frozenset(found)


def _describe(moment: Moment) -> str:
    code, offset = moment
    line = next((line for begin, end, line in code.co_lines() if begin <= offset < end), None)
    return f"{os.path.basename(code.co_filename)}:{line}, {code.co_name}"


class _Interruption:
    """A trace function that runs `act` once, at the first moment that was not met before."""

    def __init__(self, act: Callable[[], object], met: set[Moment]) -> None:
        self._act = act
        self._met = met
        self.moment: Moment | None = None
        # One object each: the interpreter borrows its reference to a trace function while it calls it, and a
        # new bound method, which may be gone by then, once was a traceback in its place.
        self.begin, self._step = self._begin, self._take_step

    def _begin(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self.moment is not None or not frame.f_code.co_filename.startswith(_TRACED):
            return None
        frame.f_trace = self._step  # from Python 3.13 on, the next line has no effect without it
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _take_step(self, frame: FrameType, event: str, arg: Any) -> Any:
        moment = frame.f_code, frame.f_lasti
        if event == "opcode" and self.moment is None and moment not in self._met:
            self._met.add(moment)
            if frame.f_lasti in _offsets(frame.f_code):
                self.moment = moment
                self._act()
        return self._step


def at_every_moment(
    call: Callable[[], object], act: Callable[[], object], check: Callable[[Any, str], object]
) -> int:
    """Make a call again and again on this thread, and run `act` at another moment of it each time.

    Args:
        call: the call.
        act: what happens at the moment: what a signal handler does, or the raise of a KeyboardInterrupt.
        check: called after each call, with its value, or None if it raised a KeyboardInterrupt, and with
            words for the moment.

    Returns:
        The number of moments.
    """
    met: set[Moment] = set()
    count = 0
    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = (
        True  # Python 3.12 traces instructions only if a frame wanted that before
    )
    while True:
        interruption = _Interruption(act, met)
        value = None
        sys.settrace(interruption.begin)
        try:
            value = call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        if interruption.moment is None:
            return count
        count += 1
        check(value, _describe(interruption.moment))
