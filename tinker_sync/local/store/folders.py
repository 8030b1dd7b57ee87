"""The data directory: its lock, and folders of files that appear complete or not at all.

The operating system releases the lock when the process ends or is killed. The folders stay whole even after a
crash or a power failure.

A folder is written in `staging/`, every file and the folder itself are flushed to the disk, and then it is
moved to `checkpoints/` under its final name, which is random. Its files never change again. Folders that the
database does not refer to are deleted at the start. Any thread may write its own folders.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

from attrs import frozen

from tinker_sync._base.files import try_lock
from tinker_sync.local.store.database import StoreError, translate_errors

SizeAndSum = tuple[int, str]
Content = Callable[[], Iterable[Any]]
"""A function that yields the pieces of one file, each bytes-like."""

_WRITE_BYTES: Final = 1 << 24
# The names that `put` gives. Everything else in the data directory belongs to the user.
_OWN_NAME: Final = re.compile(r"[0-9a-f]{32}")


@frozen
class StoredFile:
    """A file in a folder, with the size and the SHA-256 checksum (in hexadecimal) of its content."""

    path: Path
    size_bytes: int
    sha256: str


class DirectoryLock:
    """An exclusive lock on a directory, held until `release`. Even the same process cannot lock it again.

    Raises:
        StoreError: of the kind `locked`, or a failure of the disk.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> lock = DirectoryLock(Path(folder.name))
    >>> DirectoryLock(Path(folder.name))
    Traceback (most recent call last):
        ...
    tinker_sync.local.store.database.StoreError: another server (process ...) uses ...
    >>> lock.release(); folder.cleanup()
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "lock"
        with translate_errors(f"{directory} cannot be used"):
            self._file = path.open("a+b")
        if not try_lock(self._file):
            holder = _holder(self._file)
            self._file.close()
            raise StoreError(
                "locked", f"another server{holder} uses {directory}; end that one, or use another directory"
            )
        # If this write fails, as on a full disk, another server's error message lacks the process id.
        with suppress(OSError):
            self._file.truncate(0)
            self._file.write(str(os.getpid()).encode())
            self._file.flush()

    def release(self) -> None:
        """Release the directory. Idempotent."""
        with suppress(OSError):  # an unwritten process id is flushed here
            self._file.close()


def _holder(file: BinaryIO) -> str:
    with suppress(OSError, ValueError):
        file.seek(0)
        return f" (process {int(file.read(20))})"
    return ""


def sync_folder(path: Path) -> None:
    """Flush the entries of a folder to the disk by fsync. Do nothing on Windows, which has no such call."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FolderStore:
    """The folders of checkpoints in a data directory. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._staging = directory / "staging"
        self._complete = directory / "checkpoints"
        with translate_errors(f"{directory} cannot be used"):
            self._staging.mkdir(exist_ok=True)
            self._complete.mkdir(exist_ok=True)
            sync_folder(directory)

    def put(self, contents: Mapping[str, Content], what: str) -> tuple[str, dict[str, SizeAndSum]]:
        """Write a folder of files under a new random name.

        Args:
            contents: the files by name. The names must come from the store, not from a client.
            what: the beginning of the error message.

        Returns:
            The name of the folder, and the size and checksum of each file.

        Raises:
            StoreError: the folder could not be written; it is removed as far as possible.
        """
        folder = uuid.uuid4().hex
        beside = self._staging / folder
        try:
            with translate_errors(what):
                beside.mkdir()
                files = {name: _write(beside / name, content) for name, content in contents.items()}
                sync_folder(beside)
                beside.rename(self._complete / folder)
                sync_folder(self._complete)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            self.discard(folder)
            raise
        return folder, files

    def path(self, folder: str, name: str) -> Path:
        """Return the path of a file in a folder."""
        return self._complete / folder / name

    def take(self, file: StoredFile) -> bytearray:
        """Return the content of a file, verified by its size and checksum.

        Raises:
            FileNotFoundError: the file has been deleted.
            StoreError: the file cannot be read, or its content has changed.
        """
        path, content = file.path, bytearray(file.size_bytes)
        try:
            with path.open("rb") as opened:
                complete = opened.readinto(content) == len(content) and not opened.read(1)
        except FileNotFoundError:
            raise
        except OSError as problem:
            raise StoreError("damaged", f"{path} cannot be read: {problem.strerror}") from problem
        if not complete or hashlib.sha256(content).hexdigest() != file.sha256:
            raise StoreError("damaged", f"{path} has changed since it was written")
        return content

    def discard(self, folder: str) -> None:
        """Remove a folder. If this fails, the next start of the server removes the rest of it."""
        shutil.rmtree(self._complete / folder, ignore_errors=True)

    def sweep(self, known: Collection[str]) -> int:
        """Remove incomplete folders and those not in `known`. Return the number of removed folders.

        The data directory may have had folders of the user with the names `staging` and `checkpoints`. So
        only folders with a name that `put` gives are removed from these two.
        """
        unfinished = _own_folders(self._staging)
        unknown = [path for path in _own_folders(self._complete) if path.name not in known]
        for path in (*unfinished, *unknown):
            shutil.rmtree(path, ignore_errors=True)
        return len(unfinished) + len(unknown)


def _own_folders(place: Path) -> list[Path]:
    return [path for path in place.iterdir() if _OWN_NAME.fullmatch(path.name) and not path.is_symlink()]


def _write(path: Path, content: Content) -> SizeAndSum:
    digest, size = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for piece in content():
            view = memoryview(piece).cast("B")
            digest.update(view)
            size += len(view)
            while view:
                view = view[file.write(view[:_WRITE_BYTES]) :]
        os.fsync(file.fileno())
    return size, digest.hexdigest()
