"""What the head of an answer says of a file and of the part of it that follows. Pure."""

from __future__ import annotations

import re
from typing import Final, Protocol

from attrs import evolve, frozen

from tinker_sync._secret import HeaderMap
from tinker_sync.errors import TransferError
from tinker_sync.transfer.checksums import checksum_of
from tinker_sync.transfer.journal import Identity
from tinker_sync.transfer.tries import Again, Changed
from tinker_sync.transport.verdict import retry_after_s

# What servers say of an address that has expired, or of one whose file was moved to another.
EXPIRED: Final = frozenset({400, 401, 403, 404, 410})
LATER: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONTENT_RANGE: Final = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


class Answered(Protocol):
    """As much of an answer as is read here."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> HeaderMap: ...


@frozen
class Head:
    """Which file it is, and which bytes of it follow."""

    identity: Identity
    begin: int
    end: int | None
    """None is to the end of the body, wherever that is."""
    whole: bool
    """The server sends the whole file, though a part was asked for."""
    checksum: tuple[str, str] | None


def read_head(answer: Answered, at: int, until: int, now_s: float, *, encoded: bool) -> Head:
    """Read the head of the answer to a request for a part.

    Args:
        answer: the answer.
        at: where the part begins.
        until: where it ends.
        now_s: the time of day.
        encoded: the file may be compressed on its way.

    Raises:
        Again: it is none; another may be.
        Changed: the file is shorter than the part's beginning.
        TransferError: another would be the same.
    """
    if answer.status in EXPIRED:
        raise Again(f"the server refuses with status {answer.status}", refused=True)
    if answer.status in LATER:
        after_s = retry_after_s(answer.headers, now_s)
        raise Again(f"the server answers with status {answer.status}", after_s=after_s)
    if answer.status not in (200, 206, 416):
        raise TransferError(f"the server answers with status {answer.status}")
    if answer.headers.get("content-encoding", "identity") != "identity" and not encoded:
        raise TransferError("the server compresses the file, though asked not to")
    head = _WAYS[answer.status](answer, at, until)
    return evolve(
        head,
        identity=evolve(
            head.identity, etag=answer.headers.get("etag"), modified=answer.headers.get("last-modified")
        ),
        checksum=checksum_of(answer.headers, whole=head.whole),
    )


def _nothing(answer: Answered, at: int, until: int) -> Head:
    """Nothing is there: the file is empty, or shorter than was thought."""
    del at, until
    match = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
    if match is None or match[3] != "0":
        raise Changed
    return Head(Identity(size=0), 0, 0, False, None)


def _part(answer: Answered, at: int, until: int) -> Head:
    match = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
    if match is None or match[1] is None or int(match[1]) != at:
        raise Again("the server sends another part than was asked for")
    if match[3] == "*":
        raise TransferError("the server does not say how large the file is")
    return Head(Identity(size=int(match[3])), at, min(int(match[2]) + 1, until), False, None)


def _whole(answer: Answered, at: int, until: int) -> Head:
    """The server knows no parts, or none of the version that was asked for."""
    del at, until
    length = answer.headers.get("content-length", "")
    size = int(length) if length.isdecimal() else None
    if size is None and "chunked" not in answer.headers.get("transfer-encoding", "").lower():
        raise TransferError("the server does not say how large the file is")
    return Head(Identity(size=size), 0, size, True, None)


_WAYS: Final = {200: _whole, 206: _part, 416: _nothing}
