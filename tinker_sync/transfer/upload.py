"""Files on their way to signed addresses.

Such an address takes a file as a whole: what breaks is sent again from its beginning. When the addresses end
before all files are there, a new upload begins.

`run` belongs to one thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Final, TypeVar

from tinker_sync._clock import Clock
from tinker_sync._secret import Secret
from tinker_sync.errors import InvalidInputError, TransferError
from tinker_sync.transfer.control import Control
from tinker_sync.transfer.heads import EXPIRED, LATER
from tinker_sync.transfer.names import UnsafeName, safe_parts
from tinker_sync.transfer.progress import Teller
from tinker_sync.transfer.signed import Answer, Broken, SignedHttp
from tinker_sync.transport.backoff import delay_s
from tinker_sync.transport.verdict import retry_after_s

T = TypeVar("T")

_MAX_TRIES: Final = 8
_MAX_UPLOADS: Final = 3


class Expired(Exception):
    """The addresses are good no more."""


class _Watched:
    """A file that is read from its beginning, and counted. Belongs to one try."""

    def __init__(self, file: IO[bytes], control: Control, teller: Teller) -> None:
        self._file = file
        self._control = control
        self._teller = teller
        self.count = 0

    def read(self, size: int = -1) -> bytes:
        self._control.refuse_stopped()
        piece = self._file.read(size)
        self.count += len(piece)
        self._teller.moved(len(piece))
        return piece


class Upload:
    """The files of a directory on their way to where the service wants them.

    Args:
        directory: where they are.
        http: how hosts are reached.
        clock: what time it is.
        control: what stops it.
        teller: told how it goes.
        draw: random numbers from 0 to 1, for the jitter of pauses.
    """

    def __init__(
        self,
        directory: Path,
        http: SignedHttp,
        *,
        clock: Clock,
        control: Control,
        teller: Teller,
        draw: Callable[[], float],
    ) -> None:
        self._directory = directory
        self._http = http
        self._clock = clock
        self._control = control
        self._teller = teller
        self._draw = draw

    def run(self, begin: Callable[[], tuple[T, Mapping[str, str]]]) -> T:
        """Send all files that an upload wants, and give what the upload is known by.

        Args:
            begin: begins an upload: what it is known by, and its addresses by name of the file.

        Raises:
            InvalidInputError: files are missing.
            TransferError: they did not get there.
        """
        for _ in range(_MAX_UPLOADS):
            upload, urls = begin()
            secret = {name: Secret(url) for name, url in urls.items()}
            del urls  # tracebacks show local variables
            files = self._found(list(secret))
            sizes = {name: file.stat().st_size for name, file in files.items()}
            self._teller.change(
                stage="uploading",
                bytes_done=0,
                bytes_total=sum(sizes.values()),
                files_done=0,
                files_total=len(files),
            )
            try:
                for name, file in files.items():
                    self._teller.change(file=name)
                    self._send(name, file, secret[name], sizes[name])
                    self._teller.add(files_done=1)
            except Expired:
                self._teller.interrupted()
                continue
            return upload
        raise TransferError("the addresses to upload to are refused each time")

    def _found(self, names: list[str]) -> dict[str, Path]:
        """The files that are wanted. A server may only ask for what is in the directory."""
        files: dict[str, Path] = {}
        missing = []
        root = os.path.realpath(self._directory)
        for name in sorted(names):
            try:
                file = self._directory.joinpath(*safe_parts(name))
            except UnsafeName as problem:
                raise TransferError(f"the server asks for a file {name!r}: {problem}") from None
            if os.path.commonpath([root, os.path.realpath(file)]) != root:
                raise TransferError(f"{name!r} is a link to outside of {self._directory}")
            if file.is_file():
                files[name] = file
            else:
                missing.append(f"{self._directory}: there is no {name!r}, which the server asks for")
        if missing:
            raise InvalidInputError(missing)
        return files

    def _send(self, name: str, file: Path, url: Secret, size: int) -> None:
        failures = 0
        while True:
            self._control.refuse_stopped()
            watched, hint_s = None, None
            try:
                with file.open("rb") as opened:
                    watched = _Watched(opened, self._control, self._teller)
                    with self._control.reading(self._put(url, watched, size)) as answer:
                        problem = self._judged(name, answer)
                        hint_s = retry_after_s(answer.headers, self._clock.time())
            except Broken as error:
                problem = str(error)
            if problem is None:
                return
            failures += 1
            if failures >= _MAX_TRIES:
                raise TransferError(f"{name}: {problem}")
            if watched is not None:
                self._teller.moved(-watched.count)
            self._teller.interrupted()
            self._control.pause(self._clock, delay_s(failures, hint_s=hint_s, draw=self._draw()))

    def _put(self, url: Secret, watched: _Watched, size: int) -> Answer:
        return self._http.put(url.reveal(), watched, size)

    @staticmethod
    def _judged(name: str, answer: Answer) -> str | None:
        """What is wrong, if another try may help; None where nothing is."""
        if 200 <= answer.status < 300:
            return None
        if answer.status in EXPIRED:
            raise Expired
        if answer.status in LATER:
            return f"the server answers with status {answer.status}"
        raise TransferError(f"{name}: the server refuses it with status {answer.status}")
