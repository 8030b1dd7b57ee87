"""One file, fetched from a signed address in parallel parts.

- Bytes that have arrived stay: after a broken connection, with a new address, or in a new process, the
  download asks only for what is missing.
- A resumed download keeps only the bytes on the disk whose checksums are those with which they arrived.
- Parts of different versions never mix: each request names the version in `If-Range`, and each response is
  compared with the first. When the server names no version, a resumed download first compares some of the
  bytes on the disk with the server's bytes.
- A file with another size, or another checksum than the server sends, is fetched again.
- From a server without range requests, each attempt reads the whole file over one connection.

Memory holds one piece for each part under way. One thread calls `FileDownload.run`; workers help to fetch.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import IO, Final

from attrs import evolve, frozen

from tinker_sync._base.clock import Clock
from tinker_sync.errors import TransferError
from tinker_sync.transport.files.download_state import Coverage, DownloadState, FileVersion, Run, Stretch
from tinker_sync.transport.files.progress import ProgressReporter
from tinker_sync.transport.files.response_head import Attempts, FileChanged, FileHead, TryAgain, read_head
from tinker_sync.transport.files.signed import (
    Cancellation,
    ConnectionBroken,
    SignedHttp,
    SignedLinks,
    SignedResponse,
)

# Large enough that the round trip for each part does not matter, small enough to fetch several parts at once.
PART_BYTES: Final = 8 << 20
_PIECE: Final = 128 << 10
# The most bytes with one checksum of their own, which are fetched again if some of them were changed.
_RUN_BYTES: Final = 64 << 20
# A killed process loses at most the bytes that arrived in this time.
SAVE_EVERY_S: Final = 1.0
_MAX_VERSIONS: Final = 4
# The number of bytes to compare when the server names no version of the file.
_SAMPLE_BYTES: Final = 64 << 10

Keep = Callable[[int, bytes], int]
"""A function of a piece's offset and the piece, which returns the number of its bytes that were missing."""


@frozen
class Fetched:
    """The result of a file download: the size of the complete file, and the checksum that was compared."""

    size_bytes: int
    checked: str | None
    """The algorithm of the checksum that the file matches; None when the server sent none."""


@frozen(kw_only=True)
class FetchContext:
    """The objects and limits that all files of a download share."""

    links: SignedLinks
    http: SignedHttp
    run: Callable[[Callable[[], object]], object]
    """Runs a job on a worker. RuntimeError: there is no thread for it."""
    parts: int
    clock: Clock
    cancellation: Cancellation
    reporter: ProgressReporter
    draw: Callable[[], float] = random.random


class FileDownload:
    """The download of one file.

    Args:
        name: the server's name of the file.
        place: the path that the file is written to.
        state_file: the path of the file that keeps the state of the download until it is complete.
        context: shared by all files of the download.
        size_known: called when the size is known, with the size and the number of missing bytes; may raise
            an error to stop the download.
        encoded: accept a file compressed in transit, and keep it compressed.
    """

    def __init__(
        self,
        name: str,
        place: Path,
        state_file: Path,
        context: FetchContext,
        *,
        size_known: Callable[[int, int], object] = lambda *_: None,
        encoded: bool = False,
    ) -> None:
        self._name = name
        self._place = place
        self._state_file = state_file
        self._context = context
        self._size_known = size_known
        self._encoded = encoded
        self._lock = threading.Lock()
        self._have = Coverage()  # guarded by _lock
        self._runs: dict[int, Run] = {}  # guarded by _lock; by their ends
        self._taken: dict[int, Stretch] = {}  # guarded by _lock; by the number of the worker, 0 for `run`
        self._version = FileVersion()  # guarded by _lock; all None before the first response
        self._checksum: tuple[str, str] | None = None  # guarded by _lock
        self._in_parts = True  # guarded by _lock; False if the last answer ignored the range
        self._fetching = False  # guarded by _lock; False during the comparison of a resumed file
        self._helping = 0  # guarded by _lock; workers that fetch parts
        self._failure: BaseException | None = None  # guarded by _lock; the first one
        self._alone = threading.Event()
        self._saved_at = 0.0  # guarded by _lock

    def run(self) -> Fetched:
        """Fetch the missing bytes, and compare the complete file with the server's checksum, if there is one.

        Raises:
            TransferError: the download failed; the bytes that arrived are kept.
            TinkerError: the service gives no address.
        """
        self._resume()
        for _ in range(_MAX_VERSIONS):
            try:
                self._fetch()
                return self._check()
            except FileChanged:
                self._begin_again()
        raise TransferError(f"{self._name}: the server sends a different file at each attempt")

    # ---------------------------------------------------------------------------- resuming

    def _resume(self) -> None:
        """Load the state that an earlier attempt left. Begin anew without a state, or if the file differs."""
        state = DownloadState.load(self._state_file)
        if state is None or not self._place.exists():
            self._begin_again()
            return
        runs = self._unchanged(state.runs)
        have = Coverage((begin, end) for begin, end, _ in runs)
        with self._lock:
            self._have, self._version, self._checksum = have, state.version, state.checksum
            self._runs = {run[1]: run for run in runs}
            done = have.total
        size = state.version.size
        self._context.reporter.add(bytes_done=done, bytes_resumed=done, bytes_total=size or 0)
        if size is not None:
            self._size_known(size, size - done)
        # Without a named version, or if no byte is missing, no later request would notice that the server has
        # another file.
        if done and (not state.version.named or done == size):
            self._compare_sample(next(iter(have)))

    def _unchanged(self, runs: Iterable[Run]) -> list[Run]:
        """Return those runs of bytes that are on the disk as they arrived."""
        kept = []
        with self._place.open("rb") as file:
            for begin, end, crc in runs:
                file.seek(begin)
                found, left = 0, end - begin
                while left and (piece := file.read(min(left, 1 << 20))):
                    self._context.cancellation.refuse_stopped()
                    found, left = zlib.crc32(piece, found), left - len(piece)
                if not left and found == crc:
                    kept.append((begin, end, crc))
        return kept

    def _begin_again(self) -> None:
        self._state_file.unlink(missing_ok=True)
        self._place.parent.mkdir(parents=True, exist_ok=True)
        self._state_file.parent.mkdir(parents=True, exist_ok=True)
        self._place.open("wb").close()
        with self._lock:
            done, size = self._have.total, self._version.size
            self._have, self._version, self._checksum = Coverage(), FileVersion(), None
            self._runs = {}
            self._in_parts, self._failure, self._taken = True, None, {}
        if done or size:
            self._context.reporter.add(bytes_done=-done, bytes_total=-(size or 0))

    def _compare_sample(self, stretch: Stretch) -> None:
        """Compare the last bytes of a range on the disk with the server's; begin again if they differ."""
        sample = (max(stretch[0], stretch[1] - _SAMPLE_BYTES), stretch[1])
        with self._place.open("rb") as file:
            file.seek(sample[0])
            local = file.read(sample[1] - sample[0])
        found = bytearray()

        def keep(at: int, piece: bytes) -> int:
            del found[at - sample[0] :]  # a retry after a break may repeat bytes
            found.extend(piece)
            return len(piece)

        try:
            self._persist(sample, keep)
        except FileChanged:
            found.clear()
        if found[: len(local)] != local:
            self._begin_again()

    # ---------------------------------------------------------------------------- all parts

    def _fetch(self) -> None:
        self._alone.set()
        with self._lock:
            self._fetching = True
        try:
            self._work(0)
        finally:
            self._alone.wait()  # until the workers have stopped, after a failure or when no part is left
            with self._lock:
                self._fetching = False
            self._save()
        if self._failure is not None:
            raise self._failure

    def _help(self) -> None:
        """Start workers for the other parts, if the size that the first response states leaves any."""
        with self._lock:
            if not self._fetching or self._helping or not self._in_parts or self._context.parts < 2:
                return
            missing = sum(end - begin for begin, end in self._have.gaps(self._version.size or 0))
            count = min(self._context.parts - 1, -(-missing // PART_BYTES) - 1)
            if count < 1:
                return
            self._helping = count
            self._alone.clear()
        for number in range(1, count + 1):
            try:
                self._context.run(partial(self._work_along, number))
            except RuntimeError:  # the system gives no more threads; fewer are enough
                self._leave()

    def _work_along(self, number: int) -> None:
        try:
            self._work(number)
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._helping -= 1
            last = not self._helping
        if last:
            self._alone.set()

    def _work(self, number: int) -> None:
        """Fetch parts until none is left. The first failure stops all workers."""
        try:
            with self._place.open("r+b", buffering=0) as file:
                while (part := self._take(number)) is not None:
                    self._persist(part, partial(self._keep, file))
        except BaseException as error:  # noqa: BLE001  # `_fetch` raises it on its own thread
            with self._lock:
                self._failure = self._failure or error
        finally:
            with self._lock:
                self._taken.pop(number, None)

    def _take(self, number: int) -> Stretch | None:
        """Return the next part for a worker, or None when no part is left or a worker has failed."""
        with self._lock:
            self._taken.pop(number, None)
            if self._failure is not None:
                return None
            size = self._version.size
            if size is None or not self._in_parts:
                whole = size is not None and self._have.total >= size
                if whole or number:
                    return None
                self._taken[number] = (0, PART_BYTES)
                return self._taken[number]
            busy = Coverage([*self._have, *self._taken.values()])
            gap = next(busy.gaps(size), None)
            if gap is None:
                return None
            part = (gap[0], min(gap[1], gap[0] + PART_BYTES))
            self._taken[number] = part
            return part

    def _keep(self, file: IO[bytes], at: int, piece: bytes) -> int:
        """Write a piece at the offset `at`, and return how many of its bytes were missing."""
        file.seek(at)
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:
            raise TransferError(f"{self._place.name} cannot be written: {error.strerror}") from error
        now, end = self._context.clock.now(), at + len(piece)
        with self._lock:
            begin, _, crc = self._runs.get(at, (at, at, 0))
        if end - begin > _RUN_BYTES:
            begin, crc = at, 0
        crc = zlib.crc32(piece, crc)
        with self._lock:
            if begin < at:
                self._runs.pop(at, None)
            self._runs[end] = (begin, end, crc)
            before = self._have.total
            self._have.add(at, end)
            grown = self._have.total - before
            due = now - self._saved_at >= SAVE_EVERY_S
            if due:
                self._saved_at = now
            failed = self._failure is not None
        self._context.reporter.move(grown)
        if due:
            self._save()
        if failed:
            raise TryAgain("another part has failed")
        return grown

    def _save(self) -> None:
        """Bring the bytes that have arrived to the disk, then save the state that lists them."""
        with self._lock:
            if self._version == FileVersion() and not self._have.total:
                return  # no response has begun
            state = DownloadState(self._version, self._checksum, tuple(self._runs.values()))
        with self._place.open("r+b") as file:
            os.fsync(file.fileno())
        state.save(self._state_file)  # another thread may overwrite it with an older state, which is true too

    # ---------------------------------------------------------------------------- one part

    def _persist(self, part: Stretch, keep: Keep) -> None:
        """Fetch a part. Try again after failures, as often as an `Attempts` object for this part allows."""
        clock, cancellation = self._context.clock, self._context.cancellation
        attempts = Attempts(clock.now())

        def count(at: int, piece: bytes) -> int:
            grown = keep(at, piece)
            attempts.progressed = attempts.progressed or bool(grown)
            return grown

        at = part[0]
        while True:
            cancellation.refuse_stopped()
            try:
                self._try(part, at, count)
            except (TryAgain, ConnectionBroken) as error:
                if self._failure is not None:
                    return
                if attempts.count_failure(error, clock.now()):
                    raise TransferError(f"{self._name}: {error}") from None
                self._context.reporter.add(interruptions=1)
                self._save()
                cancellation.pause(clock, attempts.pause_s(error, self._context.draw()))
                at = self._first_missing(part, at)
            else:
                return

    def _first_missing(self, part: Stretch, at: int) -> int:
        with self._lock:
            return next((begin for begin, _ in self._have.gaps(part[1]) if begin >= part[0]), at)

    def _try(self, part: Stretch, at: int, keep: Keep) -> None:
        """Make one request for the bytes of a part from the offset `at` on."""
        url, number = self._context.links.get(self._name)
        headers = {"Range": f"bytes={at}-{part[1] - 1}"}
        with self._lock:
            condition = self._version.condition
        if condition is not None:
            headers["If-Range"] = condition
        with self._context.cancellation.reading(self._context.http.get(url, headers)) as answer:
            try:
                head = read_head(answer, at, part[1], self._context.clock.time(), encoded=self._encoded)
            except TryAgain as again:
                if again.refused:
                    self._context.links.renew(number)
                raise
            except TransferError as error:
                raise TransferError(f"{self._name}: {error}") from None
            self._learn(head)
            self._help()
            self._read_body(answer, head.begin, head.end, keep)

    def _learn(self, head: FileHead) -> None:
        """Take the version of the file from a response; raise FileChanged if a known field of it differs."""
        found = head.version
        with self._lock:
            known = self._version
            # A cache in front of the server may send the whole file at first, and parts from then on.
            self._in_parts = not head.whole
            if not known.may_equal(found):
                raise FileChanged
            self._checksum = self._checksum or head.checksum
            if known.size is not None:
                found = known
            self._version = found
            size, have = found.size, self._have.total
        if size is not None and known.size is None:
            self._context.reporter.add(bytes_total=size)
            self._size_known(size, size - have)

    def _read_body(self, answer: SignedResponse, begin: int, end: int | None, keep: Keep) -> None:
        at = begin
        while end is None or at < end:
            self._context.cancellation.refuse_stopped()
            piece = answer.read(_PIECE if end is None else min(_PIECE, end - at))
            if not piece:
                if end is not None:
                    raise ConnectionBroken("the server ended the file early")
                with self._lock:  # the server sent no size, so it is known only at the end of the body
                    self._version = evolve(self._version, size=at)
                self._context.reporter.add(bytes_total=at)
                break
            keep(at, piece)
            at += len(piece)

    # ---------------------------------------------------------------------------- the end

    def _check(self) -> Fetched:
        """Cut the file to its size, and compare its checksum with the server's.

        Raises:
            FileChanged: the checksums differ.
            TransferError: bytes are missing.
        """
        with self._lock:
            size, checksum = self._version.size, self._checksum
            gaps = list(self._have.gaps(size or 0))
        if size is None or gaps:
            raise TransferError(f"{self._name}: parts of it are missing")
        os.truncate(self._place, size)
        if checksum is None:
            return Fetched(size, None)
        algorithm, expected = checksum
        self._context.reporter.change(stage="verifying")
        summed = hashlib.new(algorithm, usedforsecurity=False)
        with self._place.open("rb") as file:
            while piece := file.read(1 << 20):
                self._context.cancellation.refuse_stopped()
                summed.update(piece)
        if summed.hexdigest() != expected:
            raise FileChanged
        self._context.reporter.change(stage="downloading")
        return Fetched(size, algorithm)
