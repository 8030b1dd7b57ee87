"""Locks on files, which the operating system releases when the processes that hold them end or are killed.

A lock belongs to an open file. Child processes that inherit the file hold the lock too. Any thread may call
this module.
"""

from __future__ import annotations

import sys
from typing import BinaryIO

if sys.platform == "win32":
    import msvcrt

    def try_lock(file: BinaryIO, *, shared: bool = False) -> bool:  # noqa: ARG001  # see below
        """Lock an open file until it is closed; return False if another open file has the lock.

        Windows has no shared locks, so that `shared` has no effect there.
        """
        # Lock a byte far beyond the end, so that other processes can read the content.
        file.seek(1 << 30)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def try_lock(file: BinaryIO, *, shared: bool = False) -> bool:
        """Lock an open file until it is closed; return False if another open file has the lock.

        Any number of open files can have a shared lock at once.
        """
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            return False
        return True
