"""The upload of a directory to signed addresses.

A signed address takes a file as a whole, so an interrupted file is sent again from its beginning. When the
addresses expire before all files have arrived, a new upload begins, at most three in all. `run` belongs to
one thread.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Final, TypeVar

from attrs import frozen

from tinker_sync._base.clock import Clock
from tinker_sync._base.policy import Ledger, Meaning, Stage, delay_s, rule_for
from tinker_sync._base.secret import Secret
from tinker_sync.errors import InvalidInputError, TransferError
from tinker_sync.transport.files.names import UnsafeName, safe_parts
from tinker_sync.transport.files.progress import ProgressReporter
from tinker_sync.transport.files.signed import Cancellation, ConnectionBroken, SignedHttp, SignedResponse
from tinker_sync.transport.retries import retry_after_s

T = TypeVar("T")

_MAX_TRIES: Final = 8
_MAX_UPLOADS: Final = 3


class AddressesExpired(Exception):
    """The error for a signed address that the server refuses, usually because its time is over."""


class _CountedFile:
    """A file that reports the bytes read from it. Belongs to one attempt."""

    def __init__(self, file: IO[bytes], cancellation: Cancellation, reporter: ProgressReporter) -> None:
        self._file = file
        self._cancellation = cancellation
        self._reporter = reporter
        self.count = 0

    def read(self, size: int = -1) -> bytes:
        self._cancellation.refuse_stopped()
        piece = self._file.read(size)
        self.count += len(piece)
        self._reporter.move(len(piece))
        return piece


@frozen
class DirectoryUpload:
    """The upload of the files of one directory. One thread uses it, and sends one file after the other."""

    directory: Path
    http: SignedHttp
    clock: Clock
    cancellation: Cancellation
    reporter: ProgressReporter
    draw: Callable[[], float] = random.random

    def run(self, begin: Callable[[], tuple[T, Mapping[str, str]]]) -> T:
        """Send all files that the service asks for, and return the id of the upload.

        Args:
            begin: begins an upload; returns its id and the addresses by file name.

        Raises:
            InvalidInputError: files are missing.
            TransferError: a file could not be sent, its name is not safe or leads outside of the directory,
                or the upload was stopped.
        """
        for _ in range(_MAX_UPLOADS):
            upload, urls = begin()
            secret = {name: Secret(url) for name, url in urls.items()}
            files = self._find(list(secret))
            sizes = {name: file.stat().st_size for name, file in files.items()}
            self.reporter.change(
                stage="uploading",
                bytes_done=0,
                bytes_total=sum(sizes.values()),
                files_done=0,
                files_total=len(files),
            )
            try:
                for name, file in files.items():
                    self.reporter.change(file=name)
                    self._send(name, file, secret[name], sizes[name])
                    self.reporter.add(files_done=1)
            except AddressesExpired:
                self.reporter.add(interruptions=1)
                continue
            return upload
        raise TransferError("the upload addresses were refused at each attempt")

    def _find(self, names: list[str]) -> dict[str, Path]:
        """Return the files by name, in the order of the names.

        Raises:
            InvalidInputError: files are missing.
            TransferError: a name is not safe, or leads outside of the directory.
        """
        files: dict[str, Path] = {}
        missing = []
        root = os.path.realpath(self.directory)
        for name in sorted(names):
            try:
                file = self.directory.joinpath(*safe_parts(name))
            except UnsafeName as problem:
                raise TransferError(f"the server asks for a file {name!r}: {problem}") from None
            if os.path.commonpath([root, os.path.realpath(file)]) != root:
                raise TransferError(f"{name!r} is a link to outside of {self.directory}")
            if file.is_file():
                files[name] = file
            else:
                missing.append(f"{self.directory}: there is no {name!r}, which the server asks for")
        if missing:
            raise InvalidInputError(missing)
        return files

    def _send(self, name: str, file: Path, url: Secret, size: int) -> None:
        failures, ledger = 0, Ledger(Stage.FILE)
        while True:
            self.cancellation.refuse_stopped()
            counted, hint_s = None, None
            try:
                with file.open("rb") as opened:
                    if os.fstat(opened.fileno()).st_size != size:
                        raise TransferError(f"{name}: it has changed since the upload began; upload again")
                    counted = _CountedFile(opened, self.cancellation, self.reporter)
                    with self.cancellation.reading(self.http.put(url.reveal(), counted, size)) as answer:
                        problem = self._find_problem(name, answer, ledger)
                        if problem is None and counted.count < size:
                            problem = "the server answers before it has the whole file"
                        hint_s = retry_after_s(answer.headers, self.clock.time())
            except ConnectionBroken as error:
                problem = str(error)
            except OSError as error:
                raise TransferError(f"{name}: it cannot be read: {error.strerror}") from error
            if problem is None:
                return
            failures += 1
            if failures >= _MAX_TRIES:
                raise TransferError(f"{name}: {problem}")
            if counted is not None:
                self.reporter.move(-counted.count)
            self.reporter.add(interruptions=1)
            self.cancellation.pause(self.clock, delay_s(failures, hint_s=hint_s, draw=self.draw()))

    @staticmethod
    def _find_problem(name: str, answer: SignedResponse, ledger: Ledger) -> str | None:
        """Return None after success, or the problem if a retry may help.

        Raises:
            AddressesExpired: the address is no longer valid.
            TransferError: a retry cannot help.
        """
        if 200 <= answer.status < 300:
            return None
        rule = rule_for(answer.status, Stage.FILE)
        if rule.meaning is Meaning.MOVED:
            raise AddressesExpired
        if rule.passes and not ledger.is_spent(answer.status):
            return f"the server answers with status {answer.status}"
        raise TransferError(f"{name}: the server refuses it with status {answer.status}")
