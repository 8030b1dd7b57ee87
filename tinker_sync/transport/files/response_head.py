"""Status and headers of a response that carries a file or a part of one, and retries of a part. Pure."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from typing import Final, Protocol

from attrs import evolve, frozen

from tinker_sync._base.policy import Ledger, Meaning, Stage, delay_s, rule_for
from tinker_sync._base.secret import HeaderMap
from tinker_sync.errors import TransferError
from tinker_sync.transport.files.download_state import FileVersion
from tinker_sync.transport.retries import retry_after_s

# No file has a size of more digits, and Python refuses to convert thousands of them.
_SIZE: Final = r"[0-9]{1,18}"
_LENGTH: Final = re.compile(_SIZE)
_CONTENT_RANGE: Final = re.compile(rf"bytes (?:({_SIZE})-({_SIZE})|\*)/({_SIZE}|\*)")

# Headers with a checksum of the whole file. The value is base64 or hexadecimal.
_WHOLE: Final = {
    "x-amz-checksum-sha256": "sha256",
    "x-checksum-sha256": "sha256",
    "x-content-sha256": "sha256",
    "x-checksum-md5": "md5",
    "x-ms-blob-content-md5": "md5",
}
_LISTS: Final = ("repr-digest", "digest", "x-goog-hash")
# Headers with a checksum of the body: the whole file or one part.
_BODY: Final = {"content-md5": "md5"}
_BODY_LISTS: Final = ("content-digest",)
_NAMES: Final = {"sha-256": "sha256", "sha256": "sha256", "sha-512": "sha512", "md5": "md5"}
_BEST: Final = ("sha256", "sha512", "md5")


class ResponseHead(Protocol):
    """The part of a response that this module reads."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> HeaderMap: ...


@frozen
class FileHead:
    """The head of a response: the version of the file, and the range of its bytes in the body."""

    version: FileVersion
    begin: int
    end: int | None
    """None: the size is unknown before the body ends."""
    whole: bool
    """True if the server sends the whole file although the request named a part."""
    checksum: tuple[str, str] | None


def read_head(answer: ResponseHead, at: int, until: int, now_s: float, *, encoded: bool) -> FileHead:
    """Read the head of the response to a request for a part.

    Args:
        answer: the response.
        at: the first byte of the part.
        until: the byte after the last one.
        now_s: the time of day.
        encoded: accept a file that is compressed in transit.

    Raises:
        TryAgain: the response cannot be used, but the next one may be.
        FileChanged: the file ends before the part begins.
        TransferError: another attempt would get the same response.
    """
    rule = rule_for(answer.status, Stage.FILE)
    if rule.meaning is Meaning.MOVED:
        raise TryAgain(f"the server refuses with status {answer.status}", refused=True)
    if rule.passes:
        after_s = retry_after_s(answer.headers, now_s)
        raise TryAgain(
            f"the server answers with status {answer.status}", after_s=after_s, status=answer.status
        )
    if answer.status not in _READERS:
        raise TransferError(f"the server answers with status {answer.status}")
    if answer.headers.get("content-encoding", "identity") != "identity" and not encoded:
        raise TransferError("the server compresses the file although the request forbids it")
    head = _READERS[answer.status](answer, at, until)
    version = evolve(
        head.version, etag=answer.headers.get("etag"), modified=answer.headers.get("last-modified")
    )
    return evolve(head, version=version, checksum=find_checksum(answer.headers, whole=head.whole))


def _read_empty(answer: ResponseHead, at: int, until: int) -> FileHead:
    """Read a 416 for an empty file. Raise FileChanged if the file is only shorter than before."""
    del at, until
    match = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
    if match is None or match[3] != "0":
        raise FileChanged
    return FileHead(FileVersion(size=0), 0, 0, False, None)


def _read_part(answer: ResponseHead, at: int, until: int) -> FileHead:
    match = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
    if match is None or match[1] is None or int(match[1]) != at:
        raise TryAgain("the server sends another part than the one asked for")
    if match[3] == "*":
        raise TransferError("the server does not state the size of the file")
    end, size = int(match[2]) + 1, int(match[3])
    if not at < end <= size:
        raise TryAgain("the server sends a part that is empty or ends after the end of the file")
    return FileHead(FileVersion(size=size), at, min(end, until), False, None)


def _read_whole(answer: ResponseHead, at: int, until: int) -> FileHead:
    """Read a 200 with the whole file: the server ignores ranges, or the file has changed.

    Some servers answer with 200 to a range and send the part alone, which only `Content-Range` shows. If
    `Content-Length` is the size of the file, the body is whole nevertheless.
    """
    length = answer.headers.get("content-length", "")
    match = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
    if match is not None and match[1] is not None:
        part_bytes = int(match[2]) + 1 - int(match[1])
        if match[3] not in (str(part_bytes), length):
            return _read_part(answer, at, until)
    size = int(length) if _LENGTH.fullmatch(length) else None
    if size is None and "chunked" not in answer.headers.get("transfer-encoding", "").lower():
        raise TransferError("the server does not state the size of the file")
    return FileHead(FileVersion(size=size), 0, size, True, None)


_READERS: Final = {200: _read_whole, 206: _read_part, 416: _read_empty}


def find_checksum(headers: Mapping[str, str], *, whole: bool) -> tuple[str, str] | None:
    """Return the best checksum of the whole file, as algorithm and hexadecimal value; None without any.

    Args:
        headers: of the response; the mapping ignores case.
        whole: True if the body is the whole file; then a checksum of the body counts too.

    >>> find_checksum({"content-md5": "1B2M2Y8AsgTpgAmY7PhCfg=="}, whole=True)
    ('md5', 'd41d8cd98f00b204e9800998ecf8427e')
    """
    found: dict[str, str] = {}
    for header, algorithm in {**_WHOLE, **(_BODY if whole else {})}.items():
        _add_checksum(found, algorithm, headers.get(header, ""))
    generic = headers.get("x-checksum", "")
    for algorithm in _BEST:
        if len(generic) == 2 * _digest_size(algorithm):
            _add_checksum(found, algorithm, generic)
    for header in (*_LISTS, *(_BODY_LISTS if whole else ())):
        for item in headers.get(header, "").split(","):
            name, _, value = item.partition("=")
            if name.strip().lower() in _NAMES:
                _add_checksum(found, _NAMES[name.strip().lower()], value.strip().strip(":"))
    return next(((algorithm, found[algorithm]) for algorithm in _BEST if algorithm in found), None)


def _add_checksum(found: dict[str, str], algorithm: str, text: str) -> None:
    size = _digest_size(algorithm)
    text = text.strip().strip('"')
    try:
        raw = bytes.fromhex(text) if len(text) == 2 * size else base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return  # such as "...-7": a checksum over the checksums of 7 uploaded parts
    if len(raw) == size:
        found.setdefault(algorithm, raw.hex())


def _digest_size(algorithm: str) -> int:
    return hashlib.new(algorithm, usedforsecurity=False).digest_size


# A part fails after this long without a byte: the service is down, or the file is gone.
PATIENCE_S: Final = 300.0
_MAX_REFUSALS: Final = 4


class TryAgain(Exception):
    """A failure after which another attempt may succeed.

    Args:
        message: the description of the failure.
        after_s: the pause that the server asked for.
        refused: True if the signed address is no longer valid.
        status: the status of the answer, if it is one that may pass.
    """

    def __init__(
        self, message: str, *, after_s: float | None = None, refused: bool = False, status: int | None = None
    ) -> None:
        super().__init__(message)
        self.after_s = after_s
        self.refused = refused
        self.status = status


class FileChanged(Exception):
    """The error for a file that has changed on the server or is damaged here, and is fetched again."""


class Attempts:
    """The failures in a row to fetch one part, and whether another attempt is allowed. For one thread.

    No further attempt is allowed after four refused signed addresses without a new byte in between, or if a
    failure comes more than five minutes after the first failure since the last new byte. If no byte has come
    yet, the five minutes count from the start.

    >>> attempts, refused = Attempts(0.0), TryAgain("403", refused=True)
    >>> given_up = attempts.count_failure(refused, 1.0)
    >>> given_up, attempts.pause_s(refused, draw=1.0)  # a fresh address is tried at once
    (False, 0.0)
    >>> given_up = attempts.count_failure(refused, 2.0)
    >>> given_up, attempts.pause_s(refused, draw=1.0)
    (False, 1.0)
    """

    def __init__(self, now_s: float) -> None:
        self.progressed = False
        """True if new bytes have arrived since the last failure."""
        self._progressed_at = now_s
        self._failures = 0
        self._refusals = 0
        self._ledger = Ledger(Stage.FILE)

    def count_failure(self, error: Exception, now_s: float) -> bool:
        """Count a failure. Return True if no further attempt is allowed."""
        if self.progressed:
            self._progressed_at, self._failures, self._refusals, self.progressed = now_s, 0, 0, False
            self._ledger.forget()
        else:
            self._failures += 1
        self._refusals += isinstance(error, TryAgain) and error.refused
        if isinstance(error, TryAgain) and error.status and self._ledger.is_spent(error.status):
            return True
        return self._refusals >= _MAX_REFUSALS or now_s - self._progressed_at > PATIENCE_S

    def pause_s(self, error: Exception, draw: float) -> float:
        """Return the pause before the next attempt. `draw` is a random number from 0 to 1.

        After progress and after the first refused address the pause is 0, unless the server asks for one.
        """
        hint_s, refused = (error.after_s, error.refused) if isinstance(error, TryAgain) else (None, False)
        if not hint_s and (not self._failures or (refused and self._refusals == 1)):
            return 0.0
        return delay_s(self._failures, hint_s=hint_s, draw=draw)
