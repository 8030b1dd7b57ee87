"""Lists across pages: the next page is fetched while the caller uses the present one.

The service counts pages by offset, so an entry that appears or vanishes in front moves all that follow.
Each page therefore begins with the last entries of the page before it:

- If a page begins with a known entry, no entry between was missed, because entries keep their order. Known
  entries are skipped.
- If a page begins with an unknown entry, entries in front have vanished, and the following ones have moved to
  lower offsets. Earlier pages are read until one begins with a known entry.
- If the list has changed (another count, or another entry in the place of a known one), its front is read
  again at the end, because a run that was used meanwhile may have moved there.

So an entry that is in the list all the time comes exactly once, and no entry comes twice. An entry that
appears or vanishes meanwhile comes once or not at all. This requires that entries keep their order unless
they move to the front, as in lists by age. If the server gives no count, as for sessions, two changes between
two pages can hide each other: if an entry in front vanishes and a later one moves to the front, the list
misses the second.

The list remembers only the ids, as 8-byte hashes. Workers of the client fetch pages, at most one ahead. One
thread at a time may use a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import Any, Final, Generic, TypeVar

from attrs import frozen

from tinker_sync._base.displays import to_pandas
from tinker_sync.errors import BadRequestError, InvalidInputError, UnprocessableEntityError

T = TypeVar("T")

PAGE_SIZE: Final = 1000
# Some servers refuse larger pages; all known ones give this one.
_MODEST_PAGE_SIZE: Final = 100
# The number of entries that may vanish between two pages before earlier pages are read again.
_OVERLAP: Final = 16
# The most steps back in a row, for a server whose pages never begin at the end of the page before.
_MAX_RETREATS: Final = 100
# A later page equals the first one if as many entries have appeared as were read. If that happens more often
# than this, the server ignores offsets.
_MAX_REPEATED: Final = 2


@frozen
class Page(Generic[T]):
    """A part of a list, with the length of the whole list if the server gives it."""

    entries: Sequence[T]
    total: int | None = None


Fetch = Callable[[int, int], Future[Any]]
"""A function that begins to fetch a page, given its size and offset."""


class Listing(Iterator[T], Generic[T]):
    """An iterator over a whole list, page by page. For one thread at a time.

    The first page is fetched when the caller takes the first entry. When the caller stops, no more pages are
    fetched. If a page cannot be fetched, the entries before it come first; then the error is raised and the
    iteration ends.

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
        """Make an iterator at the front of the list.

        Args:
            fetch: starts to fetch a page, by size and offset.
            read: makes a page from the answer.
            identity: returns the id of an entry.
            limit: the largest number of entries; None: all.
            page_size: the number of entries to request at once; 100 if the server refuses it.

        Raises:
            InvalidInputError: `limit` is negative.
        """
        if limit is not None and limit < 0:
            raise InvalidInputError(f"limit: expected 0 or more, or None, got {limit}")
        self._fetch = fetch
        self._read = read
        self._identity = identity
        self._size = page_size if limit is None else max(1, min(page_size, limit))
        self._limit = limit
        self._seen: set[int] = set()
        self._longest = 0  # the largest page so far; a server may give smaller pages than requested
        self._changed = False
        self._retreats = 0  # since the last entry
        self._ahead: tuple[int, Future[Any]] | None = None
        self._total: int | None = None
        self._entries = islice(self._all(), limit)

    @property
    def total(self) -> int | None:
        """The length of the whole list in the newest answer; None before the first page.

        None also if the server does not give the length.
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
        """Stop the iteration. A page that arrives later is dropped."""
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
        """Yield the entries that were not yielded before, from the front of the list.

        With `whole`, continue to the end; otherwise stop at the first page without a new entry.
        """
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
        """Return True if unseen entries may lie just before this page; False after too many steps back."""
        if not offset or self._retreats >= _MAX_RETREATS:
            return False
        return not names or names[0] not in self._seen

    def _give(
        self, entries: Sequence[T], names: list[int], places: list[int], next_offset: int | None
    ) -> Iterator[T]:
        for count, place in enumerate(places):
            # Not for the first entry: a caller that takes only one fetches one page.
            if count == 1 and next_offset is not None and self._wants_more(len(places) - 1):
                self._ahead = (next_offset, self._fetch(self._size, next_offset))
            if names[place] not in self._seen:  # some servers repeat an entry within a page
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
        # The last page is shorter than another one. The requested size proves nothing, because some
        # servers limit it.
        return length < longest

    @staticmethod
    def _step(length: int) -> int:
        """Return the number of entries from the begin of a page of `length` entries to that of the next."""
        overlap = min(_OVERLAP, length // 8 or int(length > 1))
        return length - overlap

    def _name(self, entry: T) -> int:
        return hash(self._identity(entry))

    def _drop_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead[1].cancel()
