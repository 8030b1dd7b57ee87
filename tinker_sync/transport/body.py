"""A large body in pieces: views of the user's arrays, with a few bytes of framing around each.

The pieces go to the socket as they are, so no copy of the data is made. A retry must send the same bytes as
the first try, and a user's program may have changed an array in between. So the first try takes a checksum,
and each later one compares. One thread at a time.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

from tinker_sync.errors import InvalidInputError

Piece: TypeAlias = bytes | bytearray | memoryview

# zlib lets go of the interpreter lock for more bytes than this. A busy main thread would then keep the lock
# for a switch interval, which takes far longer than the checksum of one piece.
_SUM_BYTES: Final = 5120


class PiecedBody:
    """A body that is sent without a copy of its pieces.

    >>> body = PiecedBody([b"tokens: ", memoryview(b"1234")])
    >>> len(body), b"".join(body.to_send())
    (12, b'tokens: 1234')
    """

    __slots__ = ("_checksum", "_pieces", "_size")

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = [piece for piece in pieces if len(piece)]
        self._size = sum(map(len, self._pieces))
        self._checksum: int | None = None  # that of the first try

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._pieces)

    def to_send(self) -> list[Piece]:
        """Return the pieces, in a new list, for one try to send them.

        Raises:
            InvalidInputError: an array has changed since an earlier try, so the body cannot be sent again.

        >>> weights = bytearray(8)
        >>> body = PiecedBody([weights])
        >>> _ = body.to_send()
        >>> weights[3] = 1
        >>> body.to_send()
        Traceback (most recent call last):
        tinker_sync.errors.InvalidInputError: data: an array has changed since the request was first sent...
        """
        checksum = 0
        for piece in self._pieces:
            if len(piece) <= _SUM_BYTES:
                checksum = zlib.crc32(piece, checksum)
                continue
            view = memoryview(piece)
            for at in range(0, len(view), _SUM_BYTES):
                checksum = zlib.crc32(view[at : at + _SUM_BYTES], checksum)
        if self._checksum is None:
            self._checksum = checksum
        elif checksum != self._checksum:
            raise InvalidInputError(
                "data: an array has changed since the request was first sent, so it cannot be sent again; "
                "keep the arrays of a call as they are until its result is there"
            )
        return list(self._pieces)
