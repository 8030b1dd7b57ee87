"""A checkpoint on its way to the disk: its files, or its one archive, seen at the target only when whole.

Beside the target is a directory `<target>.partial` while it is not whole: the pieces, a journal for each
file, and what was done on the server for it. Whoever asks for the same checkpoint at the same target goes on
from there, in this process or the next. At the end the directory is gone and the target is there, in one
step.

`run` belongs to one thread; a target belongs to one download, of whatever process.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, Protocol

from attrs import field, frozen

from tinker_sync._clock import Clock
from tinker_sync.config import Settings
from tinker_sync.errors import TransferError, UnsafeArchiveError
from tinker_sync.runtime.workers import Workers
from tinker_sync.transfer.archive import ArchiveLimits, unpack
from tinker_sync.transfer.control import Control
from tinker_sync.transfer.file import FileDownload, Means
from tinker_sync.transfer.journal import read_json, write_json
from tinker_sync.transfer.names import Names, Parts, UnsafeName, safe_parts
from tinker_sync.transfer.progress import Teller
from tinker_sync.transfer.signed import Links, SignedHttp, SignedUrls

ARCHIVE: Final = "archive"
# What is left free on the disk: a full one harms everybody on the machine.
_SPARE_BYTES: Final = 64 << 20


class Source(Protocol):
    """Where the files of a checkpoint come from."""

    @property
    def archive(self) -> bool:
        """Whether they come in one archive, called `ARCHIVE`."""

    def begin(self, memory: dict[str, Any]) -> None:
        """Do what is needed before there are addresses, and remember it for a later try."""

    def sign(self) -> SignedUrls:
        """Addresses of the files."""

    def finish(self) -> None:
        """Clean up on the server; nothing is needed any more."""


@frozen
class DownloadedFile:
    """A file of a checkpoint, whole and in its place."""

    name: str
    size_bytes: int
    checked: str | None = None
    """Which checksum it, or the archive it was in, was compared with; None where the server sent none."""


@frozen(kw_only=True)
class CheckpointDownload:
    """A checkpoint that has been downloaded.

    >>> CheckpointDownload(tinker_path="tinker://r/weights/a", path=Path("a"), files=()).size_bytes
    0
    """

    tinker_path: str
    path: Path
    """The directory with its files, or the archive where that was asked for."""
    files: tuple[DownloadedFile, ...]
    bytes_resumed: int = 0
    """How much was there from an earlier try."""
    interruptions: int = 0
    """How often a connection broke or an address had to be signed anew."""
    size_bytes: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "size_bytes", sum(file.size_bytes for file in self.files))


@frozen(kw_only=True)
class Wish:
    """What is to be downloaded, and how."""

    tinker_path: str
    target: Path
    unpacked: bool = True
    """Take an archive apart."""
    overwrite: bool = False
    parts: int = 4
    limits: ArchiveLimits = field(factory=ArchiveLimits)


class Download:
    """One checkpoint on its way.

    Args:
        wish: what is wanted.
        source: where from.
        settings: how hosts are reached.
        clock: what time it is.
        control: what stops it.
        teller: told how it goes.
    """

    def __init__(
        self,
        wish: Wish,
        source: Source,
        settings: Settings,
        *,
        clock: Clock,
        control: Control,
        teller: Teller,
    ) -> None:
        self._wish = wish
        self._source = source
        self._settings = settings
        self._clock = clock
        self._control = control
        self._teller = teller
        self._remembers = False  # whether something was done on the server for it
        self._work = wish.target.with_name(f"{wish.target.name}.partial")

    def run(self) -> CheckpointDownload:
        """Download it.

        Raises:
            TransferError: it did not get to its end; what has arrived is kept.
            TinkerError: the service refused something.
        """
        self._refuse_existing()
        try:
            self._work.mkdir(parents=True, exist_ok=True)
            with _locked(self._work / "lock", self._wish.target):
                try:
                    result = self._download()
                except BaseException:
                    self._drop_if_empty()
                    raise
                shutil.rmtree(self._work, ignore_errors=True)
        except OSError as error:
            raise TransferError(
                f"{self._wish.target} cannot be written: {error.strerror or error}"
            ) from error
        self._teller.change(stage="done", file=None)
        return result

    def _refuse_existing(self) -> None:
        if not self._wish.overwrite and os.path.lexists(self._wish.target):
            raise TransferError(f"{self._wish.target} exists already; nothing was done")

    def _download(self) -> CheckpointDownload:
        self._begin()
        http, workers = SignedHttp(self._settings), Workers("part", max(self._wish.parts - 1, 1))
        try:
            means = Means(
                links=Links(self._source.sign, self._clock),
                http=http,
                workers=workers,
                parts=self._wish.parts,
                clock=self._clock,
                control=self._control,
                teller=self._teller,
            )
            files = self._fetch_archive(means) if self._source.archive else self._fetch_files(means)
        finally:
            workers.close(0)
            http.close()
        self._source.finish()
        state = self._teller.state
        return CheckpointDownload(
            tinker_path=self._wish.tinker_path,
            path=self._wish.target,
            files=tuple(files),
            bytes_resumed=state.bytes_resumed,
            interruptions=state.interruptions,
        )

    def _drop_if_empty(self) -> None:
        """Leave nothing behind where there is nothing to go on from."""
        kept = [self._work / "archive", *(self._work / "files").rglob("*")]
        begun = any(place.is_file() and place.stat().st_size for place in kept)
        if not begun and not self._remembers:
            shutil.rmtree(self._work, ignore_errors=True)

    def _begin(self) -> None:
        """Take up what an earlier try has left, if it was for the same."""
        note = self._work / "download.json"
        wanted = {"tinker_path": self._wish.tinker_path, "base_url": self._settings.base_url}
        memory = dict(read_json(note))
        if {name: memory.get(name) for name in wanted} != wanted:
            for left in self._work.iterdir():
                if left.name != "lock":
                    _remove(left)
            memory = dict(wanted)
        before = dict(memory)
        self._source.begin(memory)
        if memory != before or not note.exists():
            write_json(note, memory)
        self._remembers = memory != wanted

    # ---------------------------------------------------------------------------- files

    def _fetch_files(self, means: Means) -> list[DownloadedFile]:
        names = _checked_names(means.links.names())
        files, journals = self._work / "files", self._work / "journals"
        files.mkdir(exist_ok=True)
        self._drop_others(files, set(names.values()))
        self._teller.change(stage="downloading", files_total=len(names))
        done = []
        for name, parts in names.items():
            self._teller.change(file=name)
            journal = journals.joinpath(*parts[:-1], f"{parts[-1]}.json")
            file = FileDownload(
                name,
                files.joinpath(*parts),
                journal,
                means,
                size_known=lambda _, missing: self._room(missing),
            )
            fetched = file.run()
            done.append(DownloadedFile("/".join(parts), fetched.size_bytes, fetched.checked))
            self._teller.add(files_done=1)
        self._reveal(files)
        return done

    @staticmethod
    def _drop_others(files: Path, wanted: set[Parts]) -> None:
        """Remove what an earlier try fetched and the server does not list any more."""
        for path in files.rglob("*"):
            if not path.is_dir() and path.relative_to(files).parts not in wanted:
                path.unlink()

    # ---------------------------------------------------------------------------- one archive

    def _fetch_archive(self, means: Means) -> list[DownloadedFile]:
        archive = self._work / "archive"
        self._teller.change(stage="downloading", file=ARCHIVE, files_total=1)
        file = FileDownload(
            ARCHIVE,
            archive,
            self._work / "archive.json",
            means,
            # What comes out of it is at least as large, as a rule.
            size_known=lambda size, missing: self._room(missing + (size if self._wish.unpacked else 0)),
            encoded=True,
        )
        fetched = file.run()
        self._teller.add(files_done=1)
        if not self._wish.unpacked:
            self._reveal(archive)
            return [DownloadedFile(self._wish.target.name, fetched.size_bytes, fetched.checked)]
        into = self._work / "unpacked"
        _remove(into)
        self._teller.change(stage="unpacking")
        try:
            found = unpack(
                archive, into, limits=self._wish.limits, went_on=lambda _: self._control.refuse_stopped()
            )
        except UnsafeArchiveError:
            _remove(self._work / "archive.json")  # another try shall not begin with the same bytes
            _remove(archive)
            raise
        self._reveal(into)
        return [DownloadedFile(file.name, file.size_bytes, fetched.checked) for file in found]

    # ---------------------------------------------------------------------------- the disk

    def _room(self, needed: int) -> None:
        free, wanted = shutil.disk_usage(self._work).free, needed + _SPARE_BYTES
        if needed > 0 and wanted > free:
            raise TransferError(
                f"the disk of {self._wish.target} has {free} bytes left, and {wanted} are needed"
            )

    def _reveal(self, whole: Path) -> None:
        """Put what is whole into its place."""
        self._refuse_existing()
        target = self._wish.target
        if os.path.lexists(target):
            old = self._work / "old"
            _remove(old)
            os.replace(target, old)
        os.replace(whole, target)


def _checked_names(given: list[str]) -> dict[str, Parts]:
    """Where each file goes, by the name the server gives it."""
    if not given:
        raise TransferError("the server lists no files of this checkpoint")
    names, found = Names(), {}
    for name in given:
        try:
            found[name] = safe_parts(name)
            names.add_file(found[name])
        except UnsafeName as problem:
            raise TransferError(f"the server gives a file the name {name!r}: {problem}") from None
    return found


def _remove(place: Path) -> None:
    """Remove a file, a directory with all in it, or nothing."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


@contextmanager
def _locked(place: Path, target: Path) -> Iterator[None]:
    """Keep a target to ourselves, until the end of the block or of the process."""
    with place.open("ab") as file:
        try:
            _lock(file)
        except OSError:
            raise TransferError(f"another download to {target} is under way") from None
        yield


def _lock(file: IO[bytes]) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        windows: Any = msvcrt
        windows.locking(file.fileno(), windows.LK_NBLCK, 1)
        return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def default_target(tinker_path: str) -> Path:
    """Where a checkpoint goes when nobody says.

    >>> default_target("tinker://run-1/weights/step 1").name
    'run-1_weights_step 1'
    """
    name = tinker_path.removeprefix("tinker://").replace("/", "_")
    return Path(name.replace(":", "_") if os.name == "nt" else name)
