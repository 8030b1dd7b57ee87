"""Lists that do not end at a page: the next page is fetched while its reader is busy with this one.

The service counts pages by offset, so whatever appears or vanishes in front of our place moves what follows.
Each page therefore begins with the last entries of the page before it:

- If it begins with an entry that was seen, nothing between can have been passed over: entries keep their
  order. What was seen is left out.
- If it begins with one that was not, entries in front have vanished, and what followed ours has moved to
  offsets below. Pages further in front are read until one begins with a seen entry.
- Where anything has changed at all (another count, another entry where a known one was), the front of the
  list is read once more at the end: a run that was used meanwhile may have moved there.

So an entry that is in the list all the time comes exactly once, and none comes twice. One that appears or
vanishes meanwhile comes once or not at all. For this the list must keep the order of entries that do not
move to its front; what the service lists by age, newest first, does. Where the server gives no count, as for
sessions, one that moves to the front in the same moment as one in front vanishes may be missed.

Of the entries only their ids are remembered, as 8-byte hashes. Pages are fetched by the client's own workers,
at most one ahead; there is no thread here. One thread at a time may iterate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import Any, Final, Generic, TypeVar

from attrs import frozen

from tinker_sync._display import to_pandas
from tinker_sync.errors import BadRequestError, InvalidInputError, UnprocessableEntityError

T = TypeVar("T")

PAGE_SIZE: Final = 1000
# Some servers refuse to give that many at once; none known refuses this.
_MODEST_PAGE_SIZE: Final = 100
# So many entries may vanish in front of our place between two pages before we have to look further in front.
_OVERLAP: Final = 16
# A server whose pages never begin where the last one ended cannot be followed any better.
_MAX_RETREATS: Final = 100
# A page further on may equal the first one, when as many entries have come as we went on. More often than
# this it is because the server knows no offsets.
_MAX_REPEATED: Final = 2


@frozen
class Page(Generic[T]):
    """A part of a list, and how long the whole list is where the server says so."""

    entries: Sequence[T]
    total: int | None = None


Fetch = Callable[[int, int], Future[Any]]
"""Begins to fetch a page, given its size and offset."""


class Listing(Iterator[T], Generic[T]):
    """Goes through a whole list, page by page. Not for several threads at once.

    Nothing is fetched before the first entry is asked for, and nothing more after the last one that was. An
    error of the server is raised once all entries before it were given; then the iteration is over.

    >>> from concurrent.futures import Future
    >>> def fetch(size, offset):
    ...     answer = Future()
    ...     answer.set_result("abcdefghij"[offset : offset + size])
    ...     return answer
    >>> letters = Listing(fetch, lambda answer: Page(answer, 10), str, limit=3)
    >>> letters.total, list(letters), letters.total
    (None, ['a', 'b', 'c'], 10)
    """

    def __init__(
        self,
        fetch: Fetch,
        read: Callable[[Any], Page[T]],
        identity: Callable[[T], str],
        *,
        limit: int | None = None,
        page_size: int = PAGE_SIZE,
    ) -> None:
        """Begin at the front.

        Args:
            fetch: begins to fetch a page.
            read: what its answer says.
            identity: what an entry is known by.
            limit: how many entries at most; None: all.
            page_size: how many to ask for at once.
        """
        if limit is not None and limit < 0:
            raise InvalidInputError(f"limit: expected 0 or more, or None, got {limit}")
        self._fetch = fetch
        self._read = read
        self._identity = identity
        self._size = page_size if limit is None else max(1, min(page_size, limit))
        self._limit = limit
        self._seen: set[int] = set()
        self._longest = 0  # of the pages so far: a server may give less than asked for
        self._changed = False
        self._retreats = 0  # since an entry was given
        self._ahead: tuple[int, Future[Any]] | None = None
        self._total: int | None = None
        self._entries = islice(self._all(), limit)

    @property
    def total(self) -> int | None:
        """How long the whole list is, as the server said last; None before the first page, or where it does
        not say.
        """
        return self._total

    def __iter__(self) -> Listing[T]:
        return self

    def __next__(self) -> T:
        return next(self._entries)

    def __length_hint__(self) -> int:
        counts = [count for count in (self._total, self._limit) if count is not None]
        return max(min(counts, default=0) - len(self._seen), 0)

    to_pandas = to_pandas

    def close(self) -> None:
        """Stop here. A page under way is dropped when it comes."""
        self._entries = islice(self._entries, 0)
        self._drop_ahead()

    def _all(self) -> Iterator[T]:
        try:
            yield from self._sweep(whole=True)
            if self._changed:
                yield from self._sweep(whole=False)
        finally:
            self._drop_ahead()

    def _sweep(self, *, whole: bool) -> Iterator[T]:
        """The entries not seen before, from the front on: to the end, or to the first page without any."""
        offset, expected, repeated = 0, None, 0
        front: list[int] = []
        while True:
            page = self._page(offset)
            names = [self._name(entry) for entry in page.entries]
            if self._may_have_gap(offset, names):
                self._changed = True
                self._retreats += 1
                offset, expected = max(0, offset - max(self._step(self._longest), 1)), None
                continue
            front = front if offset else names
            repeated = repeated + 1 if offset and names == front and page.total is None else 0
            self._changed |= expected is not None and names[0] != expected
            fresh = [place for place, name in enumerate(names) if name not in self._seen]
            last = self._is_last(page, offset) or repeated >= _MAX_REPEATED or not (whole or fresh)
            step = self._step(len(names))
            yield from self._give(page.entries, names, fresh, None if last else offset + step)
            if last:
                return
            expected, offset = names[step] if step < len(names) else None, offset + step

    def _may_have_gap(self, offset: int, names: list[int]) -> bool:
        """Whether entries may lie between what was seen and this page."""
        if not offset or self._retreats >= _MAX_RETREATS:
            return False
        return not names or names[0] not in self._seen

    def _give(
        self, entries: Sequence[T], names: list[int], places: list[int], next_offset: int | None
    ) -> Iterator[T]:
        for count, place in enumerate(places):
            # Not for the first one: who wants only that pays for one page.
            if count == 1 and next_offset is not None and self._wants_more(len(places) - 1):
                self._ahead = (next_offset, self._fetch(self._size, next_offset))
            if names[place] not in self._seen:  # it may be in a page twice, where servers lose count
                self._seen.add(names[place])
                self._retreats = 0
                yield entries[place]

    def _wants_more(self, pending: int) -> bool:
        return self._limit is None or self._limit - len(self._seen) > pending

    def _page(self, offset: int) -> Page[T]:
        ahead, self._ahead = self._ahead, None
        future = ahead[1] if ahead is not None and ahead[0] == offset else self._fetch(self._size, offset)
        try:
            answer = future.result()
        except (BadRequestError, UnprocessableEntityError):
            if self._longest or self._size <= _MODEST_PAGE_SIZE:
                raise
            self._size = _MODEST_PAGE_SIZE
            answer = self._fetch(self._size, offset).result()
        page = self._read(answer)
        if page.total is not None:
            self._changed |= self._total not in (None, page.total)
            self._total = page.total
        return page

    def _is_last(self, page: Page[T], offset: int) -> bool:
        length, longest = len(page.entries), self._longest
        self._longest = max(longest, length)
        if not length or page.total is not None:
            return offset + length >= (page.total or 0) or not length
        # A page shorter than another is the last one. Shorter than asked for tells nothing: some servers
        # never give more than so many.
        return length < longest

    @staticmethod
    def _step(length: int) -> int:
        """How far on the next page begins."""
        overlap = min(_OVERLAP, length // 8 or int(length > 1))
        return length - overlap

    def _name(self, entry: T) -> int:
        return hash(self._identity(entry))

    def _drop_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead[1].cancel()
