"""Programs at a real terminal (a pty) of a given width, and the text on its screen."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence

from support.clock import PATIENCE_S

_STEP = re.compile(r"\x1b\[\?25[lh]|\x1b\[(\d*)([AKm])|\x1b\[[0-9;]*m|\r|\n|[^\x1b\r\n]+|\x1b")
# Makes the pty the controlling terminal, so that Ctrl-C reaches the program.
_LEAD = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


def at_terminal(
    arguments: Sequence[str],
    *,
    width: int,
    height: int = 50,
    env: Mapping[str, str],
    typed: str = "",
    after: str = "",
) -> tuple[int, str]:
    """Run this Python with all three streams at a terminal. Return its exit code, and the terminal's text.

    When the terminal shows `after`, type `typed`.
    """
    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    usual = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
    }
    process = subprocess.Popen(
        [sys.executable, "-c", _LEAD, *arguments],
        stdin=its,
        stdout=its,
        stderr=its,
        env={**usual, "TERM": "xterm-256color", "PYTHONUNBUFFERED": "1", **env},
        start_new_session=True,
    )
    os.close(its)
    got = bytearray()
    try:
        while True:
            assert select.select([ours], [], [], PATIENCE_S)[0], f"it is silent after: {got.decode()}"
            try:
                data = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            got += data
            if typed and after.encode() in got:
                os.write(ours, typed.encode())
                typed = ""
        code = process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return code, got.decode().replace("\r\n", "\n")


def plain(text: str) -> str:
    """Return the text of a terminal without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def frames(text: str) -> list[str]:
    """Return the states of a progress bar in order: each line that the text of a terminal draws."""
    shown: list[str] = []
    line = ""
    for match in _STEP.finditer(text):
        piece, kind = match.group(), match.group(2)
        if piece in ("\r", "\n") or kind == "K":
            if line.strip():
                shown.append(line.rstrip())
            line = ""
        elif not piece.startswith("\x1b"):
            line += piece
    return [*shown, line.rstrip()] if line.strip() else shown
