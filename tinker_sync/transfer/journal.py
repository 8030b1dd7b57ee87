"""What is known of a file that is not whole yet, kept beside it for whoever goes on from there.

A journal is replaced as a whole, and only after the bytes it tells of are on the disk, so whatever ends the
process, or the machine, it never claims too much.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import frozen

from tinker_sync.transfer.coverage import Coverage, Stretch

_VERSION = 1


@frozen(kw_only=True)
class Identity:
    """Which file it is: another one under the same name differs in one of these.

    >>> Identity(size=5, etag='"a"').fits(Identity(size=5, etag='"b"'))
    False
    """

    size: int | None = None
    etag: str | None = None
    modified: str | None = None

    @property
    def condition(self) -> str | None:
        """The value of `If-Range`, where there is a strong one."""
        if self.etag is not None:
            return None if self.etag.startswith("W/") else self.etag
        return self.modified

    @property
    def named(self) -> bool:
        """Whether the server says which version it is."""
        return self.etag is not None or self.modified is not None

    def fits(self, other: Identity) -> bool:
        """Whether both may be the same file, by what is known of both."""
        pairs = (
            (self.size, other.size),
            (self.etag, other.etag),
            (self.modified, other.modified),
        )
        return all(one is None or two is None or one == two for one, two in pairs)


@frozen
class Journal:
    """What is there of which file."""

    identity: Identity
    checksum: tuple[str, str] | None
    have: tuple[Stretch, ...]

    def save(self, place: Path) -> None:
        """Replace the journal at a place."""
        tree = {
            "version": _VERSION,
            "size": self.identity.size,
            "etag": self.identity.etag,
            "modified": self.identity.modified,
            "checksum": self.checksum,
            "have": self.have,
        }
        write_json(place, tree)

    @classmethod
    def load(cls, place: Path) -> Journal | None:
        """The journal at a place; None where there is none that makes sense."""
        try:
            tree = read_json(place)
            if tree["version"] != _VERSION:
                return None
            checksum = tree["checksum"]
            stretches = tuple((int(begin), int(end)) for begin, end in tree["have"])
            if any(not 0 <= begin < end for begin, end in stretches):
                return None
            return cls(
                Identity(size=tree["size"], etag=tree["etag"], modified=tree["modified"]),
                (str(checksum[0]), str(checksum[1])) if checksum else None,
                tuple(Coverage(stretches)),
            )
        except (ValueError, LookupError, TypeError):
            return None


def write_json(place: Path, tree: Mapping[str, Any]) -> None:
    """Replace a small file by another, whole."""
    # Several threads may do so at once: each draft is whole, and the last one stays.
    draft = place.with_name(f"{place.name}.{threading.get_ident()}.new")
    with draft.open("w", encoding="utf-8") as file:
        json.dump(tree, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, place)


def read_json(place: Path) -> Mapping[str, Any]:
    """What such a file says; nothing where it cannot be read."""
    with suppress(OSError, ValueError):
        tree = json.loads(place.read_text(encoding="utf-8"))
        if isinstance(tree, dict):
            return tree
    return {}
