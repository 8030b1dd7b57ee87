"""A large body in pieces: the user's arrays, with a few bytes of framing around each.

Each try to send the body joins small pieces into blocks, because a system call for each piece would be slow.
It drops a block once the block is sent, so memory never holds a second copy of the whole body. Large arrays
go to the socket without a copy. A retry must send the same bytes as the first try, and a user's program may
have changed an array in between. So the first try keeps a checksum of each block, and later tries compare
their blocks with it. One thread at a time uses a body.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, Final, TypeAlias

from tinker_sync.errors import InvalidInputError

Piece: TypeAlias = Any
"""Bytes, or a contiguous array of any kind."""

# The processor's cache holds a block from the moment that it is gathered until it is sent.
BLOCK_BYTES: Final = 256 * 1024
# zlib releases the interpreter lock for more bytes than this. A busy main thread would then keep the lock
# for a switch interval, which takes far longer than the checksum of these bytes.
_SUM_BYTES: Final = 5120


class PiecedBody:
    """The body of a request as a list of contiguous pieces, which is sent without a copy of the whole.

    >>> body = PiecedBody([b"tokens: ", memoryview(b"1234")])
    >>> len(body), b"".join(body.to_send())
    (12, b'tokens: 1234')
    """

    __slots__ = ("_groups", "_pieces", "_size", "_sums")

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = [*pieces]
        sizes = [
            # Two pieces of three are bytes, and the first check is the quicker one.
            len(each) if type(each) is bytes or isinstance(each, (bytes, bytearray)) else each.nbytes
            for each in self._pieces
        ]
        self._groups = list(_groups(sizes))
        self._size = sum(sizes)
        self._sums: list[int] = []  # of the blocks that earlier tries have sent

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._pieces)

    def to_send(self) -> Iterator[bytes | memoryview]:
        """Yield the blocks of the body, for one try to send them.

        Raises:
            InvalidInputError: an array has changed since an earlier try, so the body cannot be sent again.

        >>> weights = bytearray(8)
        >>> body = PiecedBody([weights])
        >>> _ = list(body.to_send())
        >>> weights[3] = 1
        >>> list(body.to_send())
        Traceback (most recent call last):
        tinker_sync.errors.InvalidInputError: data: an array has changed since the request was first sent...
        """
        sums = self._sums
        for index, block in enumerate(self._blocks()):
            view, checksum = memoryview(block), 0
            for at in range(0, len(view), _SUM_BYTES):
                checksum = zlib.crc32(view[at : at + _SUM_BYTES], checksum)
            if index == len(sums):
                sums.append(checksum)
            elif checksum != sums[index]:
                raise InvalidInputError(
                    "data: an array has changed since the request was first sent, so it cannot be sent "
                    "again; keep the arrays of a call as they are until its result is there"
                )
            yield block

    def _blocks(self) -> Iterator[bytes | memoryview]:
        for first, last in self._groups:
            if last > first + 1:
                yield b"".join(self._pieces[first:last])
            elif whole := memoryview(self._pieces[first]).cast("B"):
                for at in range(0, len(whole), BLOCK_BYTES):
                    yield whole[at : at + BLOCK_BYTES]


def _groups(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Yield groups of pieces: the index of the first piece and the index after the last one.

    A group fits into one block. A piece that is larger than a block is a group of its own.
    """
    ends = list(accumulate(sizes))
    first = before = 0
    while first < len(ends):
        last = max(first + 1, bisect_right(ends, before + BLOCK_BYTES))
        yield first, last
        first, before = last, ends[last - 1]
