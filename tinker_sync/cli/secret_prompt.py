"""Asking for a key at the terminal: what is pasted shows as stars, and never in an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

_CTRL_C, _CTRL_D, _ESCAPE = "\x03", "\x04", "\x1b"
_BACKSPACES = ("\b", "\x7f")


def ask_for_key(question: str) -> str:
    """Ask for a key; from a pipe it is a line."""
    if not sys.stdin.isatty():
        return sys.stdin.readline()
    try:
        import termios
        import tty
    except ImportError:  # not a terminal of the usual kind
        import getpass

        return getpass.getpass(question)
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        # Before the question, and keeping what was typed early: a pasted key must neither show nor be lost.
        tty.setcbreak(descriptor, termios.TCSADRAIN)
        attributes = termios.tcgetattr(descriptor)
        attributes[3] &= ~termios.ISIG  # Ctrl-C must first give the terminal back
        termios.tcsetattr(descriptor, termios.TCSADRAIN, attributes)
        sys.stderr.write(question)
        sys.stderr.flush()
        return read_masked(lambda: os.read(descriptor, 4096).decode("utf-8", "replace"), sys.stderr.write)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        sys.stderr.write("\n")
        sys.stderr.flush()


def read_masked(read: Callable[[], str], write: Callable[[str], object]) -> str:
    """What is typed up to the end of the line, with a star for each character.

    >>> typed = iter(["tml-ab", "x", "\\x7f", "c\\r"])
    >>> shown = []
    >>> read_masked(lambda: next(typed), shown.append), "".join(shown).count("*")
    ('tml-abc', 8)
    """
    typed: list[str] = []
    while True:
        entered = read()
        if entered.startswith(_ESCAPE):
            continue  # an arrow key or the like
        for character in entered or _CTRL_D:
            if character in "\r\n":
                return "".join(typed)
            if character == _CTRL_C:
                raise KeyboardInterrupt
            if character == _CTRL_D:
                raise EOFError
            if character in _BACKSPACES:
                if typed:
                    typed.pop()
                    write("\b \b")
            elif character.isprintable():
                typed.append(character)
                write("*")
        sys.stderr.flush()
