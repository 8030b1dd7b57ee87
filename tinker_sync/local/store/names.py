"""Checks of names and ids from clients. Pure functions.

Names never become part of a path on the disk; the rules keep clients' `tinker://` paths unambiguous.
"""

from __future__ import annotations

import re
from typing import Final, get_args

from tinker_sync.local.store.errors import StoreError
from tinker_sync.local.store.rows import CheckpointKind

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,255}")
_ID: Final = re.compile(r"[A-Za-z0-9._:@+-]{1,255}")


def check_name(name: str) -> str:
    """Return the name of a checkpoint unchanged. Raises `StoreError` if it is not a valid name.

    >>> check_name("step-0100")
    'step-0100'
    >>> check_name("../../etc")
    Traceback (most recent call last):
        ...
    tinker_sync.local.store.errors.StoreError: '../../etc' cannot name a checkpoint: use 1 to 255 letters, ...
    """
    if not _NAME.fullmatch(name) or not name.strip("."):
        raise StoreError(
            "bad_name", f"{name[:80]!r} cannot name a checkpoint: use 1 to 255 letters, digits and . _ -"
        )
    return name


def check_id(value: str, what: str) -> str:
    """Return the id of a session, run or sampler unchanged. Raises `StoreError` if it is not a valid id.

    `what` names the object in the message, such as "a session".

    >>> check_id("s-1:train:0", "a run")
    's-1:train:0'
    """
    if not _ID.fullmatch(value) or not value.strip("."):
        raise StoreError("bad_name", f"{value[:80]!r} cannot be the id of {what}")
    return value


def check_kind(kind: str) -> CheckpointKind:
    """Return the kind of a checkpoint unchanged. Raises `StoreError` if there is no such kind."""
    if kind not in get_args(CheckpointKind):
        raise StoreError("bad_name", f"{str(kind)[:80]!r} is not a kind of checkpoint")
    return kind  # type: ignore[return-value]  # checked above
