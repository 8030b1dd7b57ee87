"""The download of one checkpoint, as files or as one archive. The target appears, or is replaced,
only when the download is complete.

An unfinished download keeps a directory `<target>.partial`: the bytes that arrived, a state for each file,
and a note of what was created on the server. A download of the same checkpoint to the same target goes on
from there, in this process or a later one. The last step moves the result to the target and removes the
directory.

One thread runs `CheckpointFetch.run`. A lock file keeps other downloads of any process from the target.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from tinker_sync._base.clock import Clock
from tinker_sync.config import Settings
from tinker_sync.errors import TransferError, UnsafeArchiveError
from tinker_sync.transport.files.archive import unpack
from tinker_sync.transport.files.download_state import PartialDirectory, read_json, remove, write_json
from tinker_sync.transport.files.file import FetchContext, FileDownload
from tinker_sync.transport.files.names import Names, Parts, UnsafeName, safe_parts
from tinker_sync.transport.files.progress import ProgressReporter
from tinker_sync.transport.files.signed import Cancellation, SignedHttp, SignedLinks, SignedUrls

ARCHIVE: Final = "archive"
# The space to leave free on the disk, because a full disk breaks other programs.
_SPARE_BYTES: Final = 64 << 20


class DownloadSource:
    """The calls of the service that a download makes: they prepare the files and sign their addresses."""

    archive = False
    """True when the files come in one archive, named `ARCHIVE`."""

    def begin(self, memory: dict[str, Any]) -> None:
        """Prepare the files if the server lacks them, and note in `memory` what a later attempt needs."""

    def sign(self) -> SignedUrls:
        """Return new addresses of the files."""
        raise NotImplementedError

    def finish(self) -> None:
        """Delete what `begin` created on the server, if it created something."""


@frozen
class DownloadedFile:
    """A complete file of a downloaded checkpoint."""

    name: str
    size_bytes: int
    checked: str | None = None
    """The algorithm of the checksum that the file, or its archive, matches; None if the server sent none."""


@frozen(kw_only=True)
class CheckpointDownload:
    """A downloaded checkpoint.

    >>> CheckpointDownload(tinker_path="tinker://r/weights/a", path=Path("a"), files=()).size_bytes
    0
    """

    tinker_path: str
    path: Path
    """The directory with the files, or the archive if there is one and `unpack` is false."""
    files: tuple[DownloadedFile, ...]
    bytes_resumed: int = 0
    """Bytes left by an earlier attempt."""
    interruptions: int = 0
    """The number of failed attempts that were repeated, such as after a broken connection."""
    size_bytes: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "size_bytes", sum(file.size_bytes for file in self.files))


@frozen(kw_only=True)
class DownloadRequest:
    """The checkpoint to download, its target, and the options."""

    tinker_path: str
    target: Path
    unpacked: bool = True
    """True to unpack an archive; False makes the archive itself the target."""
    overwrite: bool = False
    parts: int = 4


class CheckpointFetch:
    """The download of one checkpoint.

    Args:
        request: the checkpoint and the options.
        source: prepares the files on the server and signs their addresses.
        settings: timeouts and the user's session.
        clock: the current time.
        cancellation: stops the download.
        reporter: receives the progress.
        run: runs a job on a worker, to fetch parts of a file beside the thread of `run`.
    """

    def __init__(
        self,
        request: DownloadRequest,
        source: DownloadSource,
        settings: Settings,
        *,
        clock: Clock,
        cancellation: Cancellation,
        reporter: ProgressReporter,
        run: Callable[[Callable[[], object]], object],
    ) -> None:
        self._request = request
        self._source = source
        self._settings = settings
        self._clock = clock
        self._cancellation = cancellation
        self._reporter = reporter
        self._run = run
        self._remembers = False  # the note names something created on the server
        self._partial = PartialDirectory(request.target)
        self._work = self._partial.path

    def run(self) -> CheckpointDownload:
        """Download the checkpoint.

        Raises:
            TransferError: the target exists, or the download failed; the bytes that arrived are kept.
            UnsafeArchiveError: the archive must not be unpacked.
            TinkerError: the service refused a call.
        """
        self._refuse_existing()
        try:
            with self._partial.hold() as partial:
                self._refuse_existing()  # again: another download may have created the target meanwhile
                try:
                    result = self._download()
                except BaseException:
                    self._drop_if_empty()
                    raise
                partial.remove()
        except OSError as error:
            raise TransferError(
                f"{self._request.target} cannot be written: {error.strerror or error}"
            ) from error
        self._reporter.change(stage="done", file=None)
        return result

    def _refuse_existing(self) -> None:
        if not self._request.overwrite and os.path.lexists(self._request.target):
            raise TransferError(
                f"{self._request.target} exists already, and nothing was done; "
                "give another `to`, or overwrite=True to replace it"
            )

    def _download(self) -> CheckpointDownload:
        self._begin()
        http = SignedHttp(self._settings)
        try:
            context = FetchContext(
                links=SignedLinks(self._source.sign, self._clock),
                http=http,
                run=self._run,
                parts=self._request.parts,
                clock=self._clock,
                cancellation=self._cancellation,
                reporter=self._reporter,
            )
            files = self._fetch_archive(context) if self._source.archive else self._fetch_files(context)
        finally:
            http.close()
        self._source.finish()
        state = self._reporter.state
        return CheckpointDownload(
            tinker_path=self._request.tinker_path,
            path=self._request.target,
            files=tuple(files),
            bytes_resumed=state.bytes_resumed,
            interruptions=state.interruptions,
        )

    def _drop_if_empty(self) -> None:
        """Remove the working directory if it has no bytes and no path of an export for a later attempt."""
        kept = [self._work / "archive", *(self._work / "files").rglob("*")]
        begun = any(place.is_file() and place.stat().st_size for place in kept)
        if not begun and not self._remembers:
            self._partial.remove()

    def _begin(self) -> None:
        """Prepare the files on the server, or continue with those that an earlier attempt has prepared."""
        note = self._work / "download.json"
        wanted = {"tinker_path": self._request.tinker_path, "base_url": self._settings.base_url}
        memory = dict(read_json(note))
        if {name: memory.get(name) for name in wanted} != wanted:
            self._partial.clear()
            memory = dict(wanted)
        before = dict(memory)
        self._source.begin(memory)
        if memory != before or not note.exists():
            write_json(note, memory)
        self._remembers = memory != wanted

    # ---------------------------------------------------------------------------- files

    def _fetch_files(self, context: FetchContext) -> list[DownloadedFile]:
        names = _check_names(context.links.names())
        files, states = self._work / "files", self._work / "journals"
        files.mkdir(exist_ok=True)
        self._drop_others(files, set(names.values()))
        self._reporter.change(stage="downloading", files_total=len(names))
        done = []
        for name, parts in names.items():
            self._reporter.change(file=name)
            state_file = states.joinpath(*parts[:-1], f"{parts[-1]}.json")
            file = FileDownload(
                name,
                files.joinpath(*parts),
                state_file,
                context,
                size_known=lambda _, missing: self._require_space(missing),
            )
            fetched = file.run()
            done.append(DownloadedFile("/".join(parts), fetched.size_bytes, fetched.checked))
            self._reporter.add(files_done=1)
        self._reveal(files)
        return done

    @staticmethod
    def _drop_others(files: Path, wanted: set[Parts]) -> None:
        """Remove files of an earlier attempt that the server no longer lists."""
        for path in files.rglob("*"):
            if not path.is_dir() and path.relative_to(files).parts not in wanted:
                path.unlink()

    # ---------------------------------------------------------------------------- one archive

    def _fetch_archive(self, context: FetchContext) -> list[DownloadedFile]:
        archive = self._work / "archive"
        self._reporter.change(stage="downloading", file=ARCHIVE, files_total=1)
        file = FileDownload(
            ARCHIVE,
            archive,
            self._work / "archive.json",
            context,
            # The unpacked files are usually at least as large as the archive.
            size_known=lambda size, missing: self._require_space(
                missing + (size if self._request.unpacked else 0)
            ),
            encoded=True,
        )
        fetched = file.run()
        self._reporter.add(files_done=1)
        if not self._request.unpacked:
            self._reveal(archive)
            return [DownloadedFile(self._request.target.name, fetched.size_bytes, fetched.checked)]
        into = self._work / "unpacked"
        remove(into)
        self._reporter.change(stage="unpacking")
        try:
            sizes = unpack(archive, into, on_progress=lambda _: self._cancellation.refuse_stopped())
        except UnsafeArchiveError:
            remove(self._work / "archive.json")  # so that a later attempt fetches the archive again
            remove(archive)
            raise
        self._reveal(into)
        return [DownloadedFile(name, size, fetched.checked) for name, size in sizes.items()]

    # ---------------------------------------------------------------------------- the disk

    def _require_space(self, needed: int) -> None:
        free, wanted = shutil.disk_usage(self._work).free, needed + _SPARE_BYTES
        if needed > 0 and wanted > free:
            raise TransferError(
                f"the disk of {self._request.target} has {free} bytes left, and {wanted} are needed"
            )

    def _reveal(self, whole: Path) -> None:
        """Move the complete file or directory to the target. An existing target is moved away first."""
        self._refuse_existing()
        target = self._request.target
        if os.path.lexists(target):
            old = self._work / "old"
            remove(old)
            os.replace(target, old)
        os.replace(whole, target)


def _check_names(given: list[str]) -> dict[str, Parts]:
    """Return a mapping from each name to its parts, in the given order.

    Raises:
        TransferError: there are no names, or one is not safe.
    """
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
