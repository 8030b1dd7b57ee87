"""Locks on files, and atomic replacement of files. Any thread may call this module."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from tinker_sync._base.log import Log

_log = Log("tinker_sync.files")


def try_lock(file: IO[Any], *, shared: bool = False) -> bool:
    """Lock an open file until it is closed or the process ends; return False if another one has the lock.

    A forked child shares the lock. Windows has no shared locks and takes an exclusive one. On a file system
    without locks every call returns True.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(1 << 30)  # far beyond the end, so that other processes can read the content
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        _log.debug("%s cannot be locked: %s", file.name, error)
    return True


@contextmanager
def replacing(path: Path, *, mode: int | None = None) -> Iterator[IO[bytes]]:
    """Yield a new file for writing, which replaces `path` when the block ends without an error.

    The content is flushed to the disk before the file appears. Of several threads, the last one wins.

    Args:
        path: the file. Its directory must exist.
        mode: the permissions of the new file; None stands for those of an ordinary new file.

    Raises:
        OSError: the file cannot be written.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "a.csv"
    >>> with replacing(target) as file:
    ...     _ = file.write(b"1,2")
    ...     target.exists()
    False
    >>> target.read_bytes()
    b'1,2'
    """
    import tempfile  # slow to import, and most programs replace no file

    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".new")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(draft, _ordinary_mode() if mode is None else mode)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise


def _ordinary_mode() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
