"""One file, fetched from a signed address in parts, side by side, until it is whole.

- Whatever breaks, what has arrived stays, and only what is missing is asked for again: after a dropped
  connection, with a new address, in a new process.
- Parts of different versions are never put together: each request names the version by `If-Range`, and each
  answer is compared with the first. Where the server names no version, a new process compares the end of what
  it finds with the server's before it goes on.
- The size, and the checksum where the server sends one, are right at the end, or it begins again.
- A server that knows no parts is read from the front each time, and still gets there if a connection holds.

Memory is one piece for each part under way. `run` belongs to one thread; the parts run on workers.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Final

from attrs import evolve, frozen

from tinker_sync._clock import Clock
from tinker_sync.errors import TransferError
from tinker_sync.runtime.naming import carried
from tinker_sync.runtime.workers import Workers
from tinker_sync.transfer.control import Control
from tinker_sync.transfer.coverage import Coverage, Stretch
from tinker_sync.transfer.heads import Head, read_head
from tinker_sync.transfer.journal import Identity, Journal
from tinker_sync.transfer.progress import Teller
from tinker_sync.transfer.signed import Answer, Broken, Links, SignedHttp
from tinker_sync.transfer.tries import Again, Changed, Tries

# Large enough that the way to the server and back does not count, small enough for several at once.
PART_BYTES: Final = 8 << 20
_PIECE: Final = 128 << 10
# So much is lost when the process is killed.
_SAVE_EVERY_S: Final = 1.0
_MAX_VERSIONS: Final = 4
# Compared where nothing else tells whether the server still has the same file.
_SAMPLE_BYTES: Final = 64 << 10

Keep = Callable[[int, bytes], int]
"""Takes a piece and its place, and says how much of it was missing."""


@frozen
class Fetched:
    """A file that is whole."""

    size_bytes: int
    checked: str | None
    """Which checksum it was compared with; None where the server sent none."""


@frozen(kw_only=True)
class Means:
    """What fetching a file takes, the same for all files of a download."""

    links: Links
    http: SignedHttp
    workers: Workers
    parts: int
    clock: Clock
    control: Control
    teller: Teller
    draw: Callable[[], float] = random.random


class FileDownload:
    """One file on its way.

    Args:
        name: what its address is known by.
        place: where it comes to be, piece by piece.
        journal: where is kept how far it is.
        means: what it takes.
        size_known: told how large it is, once that is known, and how much is missing; may raise to refuse.
        encoded: the file may be compressed on its way and stays so.
    """

    def __init__(
        self,
        name: str,
        place: Path,
        journal: Path,
        means: Means,
        *,
        size_known: Callable[[int, int], object] = lambda *_: None,
        encoded: bool = False,
    ) -> None:
        self._name = name
        self._place = place
        self._journal = journal
        self._means = means
        self._size_known = size_known
        self._encoded = encoded
        self._lock = threading.Lock()
        self._have = Coverage()  # guarded by _lock
        self._taken: dict[int, Stretch] = {}  # guarded by _lock; by the number of who fetches it
        self._identity: Identity | None = None  # guarded by _lock
        self._checksum: tuple[str, str] | None = None  # guarded by _lock
        self._in_parts = True  # guarded by _lock; until the server shows otherwise
        self._fetching = False  # guarded by _lock; not while what is there is compared
        self._helping = 0  # guarded by _lock
        self._failure: BaseException | None = None  # guarded by _lock; the first one
        self._alone = threading.Event()
        self._saved_at = 0.0  # guarded by _lock

    def run(self) -> Fetched:
        """Fetch what is missing.

        Raises:
            TransferError: it cannot be had; what has arrived is kept.
            TinkerError: the service gives no address.
        """
        self._resume()
        for _ in range(_MAX_VERSIONS):
            try:
                self._fetch()
                return self._checked()
            except Changed:
                self._begin_again()
        raise TransferError(f"{self._name}: the server has another file each time it is asked")

    # ---------------------------------------------------------------------------- beginning

    def _resume(self) -> None:
        """Take up what an earlier try has left."""
        journal = Journal.load(self._journal)
        if journal is None or not self._place.exists():
            self._begin_again()
            return
        end = max((end for _, end in journal.have), default=0)
        if self._place.stat().st_size < end:
            self._begin_again()
            return
        with self._lock:
            self._have, self._identity, self._checksum = (
                Coverage(journal.have),
                journal.identity,
                journal.checksum,
            )
            done = self._have.total
        size = journal.identity.size
        self._means.teller.add(bytes_done=done, bytes_resumed=done, bytes_total=size or 0)
        if size is not None:
            self._size_known(size, size - done)
        # Nothing else would tell: no further request names the version, or none is made at all.
        if journal.have and (not journal.identity.named or done == size):
            self._compare_sample(journal.have[0])

    def _begin_again(self) -> None:
        self._journal.unlink(missing_ok=True)
        self._place.parent.mkdir(parents=True, exist_ok=True)
        self._journal.parent.mkdir(parents=True, exist_ok=True)
        self._place.open("wb").close()
        with self._lock:
            done, size = self._have.total, self._identity.size if self._identity else None
            self._have, self._identity, self._checksum = Coverage(), None, None
            self._in_parts, self._failure, self._taken = True, None, {}
        if done or size:
            self._means.teller.add(bytes_done=-done, bytes_total=-(size or 0))

    def _compare_sample(self, stretch: Stretch) -> None:
        """Begin again unless the server still has the end of what is there."""
        sample = (max(stretch[0], stretch[1] - _SAMPLE_BYTES), stretch[1])
        with self._place.open("rb") as file:
            file.seek(sample[0])
            ours = file.read(sample[1] - sample[0])
        found = bytearray()

        def keep(at: int, piece: bytes) -> int:
            del found[at - sample[0] :]  # where it begins anew, after a break
            found.extend(piece)
            return len(piece)

        try:
            self._persist(sample, keep)
        except Changed:
            found.clear()
        if found[: len(ours)] != ours:
            self._begin_again()

    # ---------------------------------------------------------------------------- all parts

    def _fetch(self) -> None:
        self._alone.set()
        with self._lock:
            self._fetching = True
        try:
            self._work(0)
        finally:
            self._alone.wait()  # the others see what made us stop, or the same end
            with self._lock:
                self._fetching = False
            self._save()
        if self._failure is not None:
            raise self._failure

    def _help(self) -> None:
        """Start the other workers; the server has given a first part."""
        with self._lock:
            if not self._fetching or self._helping or not self._in_parts or self._means.parts < 2:
                return
            size = self._identity.size if self._identity else None
            missing = sum(end - begin for begin, end in self._have.gaps(size or 0))
            count = min(self._means.parts - 1, -(-missing // PART_BYTES) - 1)
            if count < 1:
                return
            self._helping = count
            self._alone.clear()
        for number in range(1, count + 1):
            try:
                self._means.workers.run(carried(partial(self._work_along, number)))
            except RuntimeError:  # the system gives no more threads: fewer will do
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
        """Fetch parts until none is left. The first failure ends it for all."""
        try:
            with self._place.open("r+b", buffering=0) as file:
                while (part := self._take(number)) is not None:
                    self._persist(part, partial(self._keep, file))
        except BaseException as error:  # noqa: BLE001  # raised by `_fetch`, on its thread
            with self._lock:
                self._failure = self._failure or error
        finally:
            with self._lock:
                self._taken.pop(number, None)

    def _take(self, number: int) -> Stretch | None:
        """The next part for somebody; None when there is none left, or somebody has failed."""
        with self._lock:
            self._taken.pop(number, None)
            if self._failure is not None:
                return None
            size = self._identity.size if self._identity else None
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
        """Write a piece to its place, and say how much of it is new."""
        file.seek(at)
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:
            raise TransferError(f"{self._place.name} cannot be written: {error.strerror}") from error
        now = self._means.clock.now()
        with self._lock:
            before = self._have.total
            self._have.add(at, at + len(piece))
            grown = self._have.total - before
            due = now - self._saved_at >= _SAVE_EVERY_S
            if due:
                self._saved_at = now
            failed = self._failure is not None
        self._means.teller.moved(grown)
        if due:
            self._save()
        if failed:
            raise Again("another part has failed")
        return grown

    def _save(self) -> None:
        """Write down what is there, once it is on the disk."""
        with self._lock:
            if self._identity is None:
                return
            journal = Journal(self._identity, self._checksum, tuple(self._have))
        with self._place.open("r+b") as file:
            os.fsync(file.fileno())
        journal.save(self._journal)  # an older one may come last, and is true as well

    # ---------------------------------------------------------------------------- one part

    def _persist(self, part: Stretch, keep: Keep) -> None:
        """Fetch a part, with as many tries as it takes while anything moves."""
        clock, control = self._means.clock, self._means.control
        tries = Tries(clock.now())

        def count(at: int, piece: bytes) -> int:
            grown = keep(at, piece)
            tries.moved = tries.moved or bool(grown)
            return grown

        at = part[0]
        while True:
            control.refuse_stopped()
            try:
                self._try(part, at, count)
            except (Again, Broken) as error:
                if self._failure is not None:
                    return
                if tries.are_over(error, clock.now()):
                    raise TransferError(f"{self._name}: {error}") from None
                self._means.teller.interrupted()
                self._save()
                control.pause(clock, tries.pause_s(error, self._means.draw()))
                at = self._reached(part, at)
            else:
                return

    def _reached(self, part: Stretch, at: int) -> int:
        """How far a part has come."""
        with self._lock:
            return next((begin for begin, _ in self._have.gaps(part[1]) if begin >= part[0]), at)

    def _try(self, part: Stretch, at: int, keep: Keep) -> None:
        """Ask once for what is missing of a part."""
        url, number = self._means.links.of(self._name)
        headers = {"Range": f"bytes={at}-{part[1] - 1}"}
        with self._lock:
            condition = self._identity.condition if self._identity else None
        if condition is not None:
            headers["If-Range"] = condition
        with self._means.control.reading(self._means.http.get(url, headers)) as answer:
            try:
                head = read_head(answer, at, part[1], self._means.clock.time(), encoded=self._encoded)
            except Again as again:
                if again.refused:
                    self._means.links.renew(number)
                raise
            except TransferError as error:
                raise TransferError(f"{self._name}: {error}") from None
            self._learn(head)
            self._help()
            self._read_body(answer, head.begin, head.end, keep)

    def _learn(self, head: Head) -> None:
        """Compare with what is known of the file, and take up what is new."""
        found = head.identity
        with self._lock:
            known = self._identity
            self._in_parts = self._in_parts and not head.whole
            if known is not None and not known.fits(found):
                raise Changed
            self._checksum = self._checksum or head.checksum
            if known is not None and known.size is not None:
                found = known
            self._identity = found
            size, have = found.size, self._have.total
        if size is not None and (known is None or known.size is None):
            self._means.teller.add(bytes_total=size)
            self._size_known(size, size - have)

    def _read_body(self, answer: Answer, begin: int, end: int | None, keep: Keep) -> None:
        at = begin
        while end is None or at < end:
            self._means.control.refuse_stopped()
            piece = answer.read(_PIECE if end is None else min(_PIECE, end - at))
            if not piece:
                if end is not None:
                    raise Broken("the server ended the file early")
                with self._lock:  # it ends here, and nobody had said where
                    self._identity = evolve(self._identity or Identity(), size=at)
                self._means.teller.add(bytes_total=at)
                break
            keep(at, piece)
            at += len(piece)

    # ---------------------------------------------------------------------------- the end

    def _checked(self) -> Fetched:
        """Compare the file on the disk with what the server said of it."""
        with self._lock:
            size, checksum = (self._identity.size if self._identity else None), self._checksum
        if size is None or list(Coverage(self._have).gaps(size)):
            raise TransferError(f"{self._name}: parts of it are missing")
        os.truncate(self._place, size)
        if checksum is None:
            return Fetched(size, None)
        algorithm, expected = checksum
        self._means.teller.change(stage="verifying")
        summed = hashlib.new(algorithm, usedforsecurity=False)
        with self._place.open("rb") as file:
            while piece := file.read(1 << 20):
                self._means.control.refuse_stopped()
                summed.update(piece)
        if summed.hexdigest() != expected:
            raise Changed
        self._means.teller.change(stage="downloading")
        return Fetched(size, algorithm)
