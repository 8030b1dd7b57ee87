"""A higher limit of open files, for tests that need more than the system's usual limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_OTHERS = 256


@contextmanager
def room_for(count: int) -> Iterator[None]:
    """Raise the limit of open files by `count` for the block, or skip the test if that is not allowed."""
    import resource  # not on Windows; such tests do not run there

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _OTHERS
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"the system allows {hard} open files")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
