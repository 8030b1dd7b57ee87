"""Folders of files that appear whole or not at all, whatever happens to the process or the machine.

A folder is written in `staging/`, every file and the folder itself are flushed to the disk, and then it is
moved to `checkpoints/` under its final name, which is random. Its files never change again. Who knows the
name of a folder owns it; those nobody knows are swept at the start.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from tinker_sync.local.store.errors import StoreError, translated

Content = Callable[[], Iterable[Any]]
"""Makes the pieces of one file, each bytes-like."""

_WRITE_BYTES: Final = 1 << 24


@frozen
class FileFact:
    """What was written, to be compared with what is read."""

    size_bytes: int
    sha256: str


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk. Windows has no such thing and needs none."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Shelf:
    """The folders. Thread-safe: each belongs to whoever put it there."""

    def __init__(self, directory: Path) -> None:
        self._staging = directory / "staging"
        self._shelf = directory / "checkpoints"
        with translated(f"{directory} cannot be used"):
            self._staging.mkdir(exist_ok=True)
            self._shelf.mkdir(exist_ok=True)
            sync_folder(directory)

    def put(self, contents: Mapping[str, Content], what: str) -> tuple[str, dict[str, FileFact]]:
        """Write a folder.

        Args:
            contents: by file name; names are ours.
            what: how to begin the sentence when it cannot be done.

        Returns:
            The name of the folder, and what was written.

        Raises:
            StoreError: it could not be done; nothing is left of it.
        """
        folder = uuid.uuid4().hex
        beside = self._staging / folder
        try:
            with translated(what):
                beside.mkdir()
                facts = {name: _write(beside / name, content) for name, content in contents.items()}
                sync_folder(beside)
                beside.rename(self._shelf / folder)
                sync_folder(self._shelf)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            self.discard(folder)
            raise
        return folder, facts

    def path(self, folder: str, name: str) -> Path:
        """Where a file lies."""
        return self._shelf / folder / name

    def take(self, folder: str, name: str, fact: FileFact) -> bytearray:
        """The content of a file.

        Raises:
            FileNotFoundError: it is gone.
            StoreError: it cannot be read, or is not what was written.
        """
        path = self.path(folder, name)
        content = bytearray(fact.size_bytes)
        try:
            with path.open("rb") as file:
                complete = file.readinto(content) == len(content) and not file.read(1)
        except FileNotFoundError:
            raise
        except OSError as problem:
            raise StoreError("damaged", f"{path} cannot be read: {problem.strerror}") from problem
        if not complete or hashlib.sha256(content).hexdigest() != fact.sha256:
            raise StoreError("damaged", f"{path} is not what was written")
        return content

    def discard(self, folder: str) -> None:
        """Remove a folder. What cannot be removed now is swept at the next start."""
        shutil.rmtree(self._shelf / folder, ignore_errors=True)

    def sweep(self, known: Collection[str]) -> int:
        """Remove what was never finished and what nobody knows; say how many folders that were."""
        unfinished = list(self._staging.iterdir())
        unknown = [path for path in self._shelf.iterdir() if path.name not in known]
        for path in (*unfinished, *unknown):
            shutil.rmtree(path, ignore_errors=True)
        return len(unfinished) + len(unknown)


def _write(path: Path, content: Content) -> FileFact:
    digest, size = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for piece in content():
            view = memoryview(piece).cast("B")
            digest.update(view)
            size += len(view)
            while view:
                view = view[file.write(view[:_WRITE_BYTES]) :]
        os.fsync(file.fileno())
    return FileFact(size, digest.hexdigest())
