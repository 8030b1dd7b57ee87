"""Lists that come in pages, with a bar where there are many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tinker_sync.cli.output import Sink

T = TypeVar("T")


def fetched(
    sink: Sink, page: Callable[[int, int], tuple[Sequence[T], int | None]], limit: int, size: int, noun: str
) -> tuple[list[T], int]:
    """The first entries of a list, and how many there are in all.

    >>> fetched(Sink(), lambda count, offset: (range(offset, min(offset + count, 5)), 5), 4, 2, "numbers")
    ([0, 1, 2, 3], 5)

    Args:
        sink: where a bar is shown.
        page: gives so many entries from an offset on, and how many there are in all if it knows.
        limit: how many at most; 0: all.
        size: of a page, at most.
        noun: what they are.
    """
    got: list[T] = []
    total: int | None = None
    with sink.progress(f"Fetching {noun}", limit or None, unit=noun) as bar:
        while not limit or len(got) < limit:
            asked = min(size, limit - len(got)) if limit else size
            entries, total = page(asked, len(got))
            got += entries
            bar.update(len(got), min(limit or total, total) if total is not None else None)
            if len(entries) < asked or len(got) == total:
                break
    return got, len(got) if total is None else total
