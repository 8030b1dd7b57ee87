"""Paths and queries of the API: construction from ids, and extraction of the ids.

Pure functions. An id from a user or a server stays within its own segment of a path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import cached_property
from typing import Final
from urllib.parse import quote, unquote

from tinker_sync.errors import InvalidInputError

# The characters that RFC 3986 allows unencoded in a segment; ids like `s:sample:0` stay readable.
_SEGMENT_SAFE: Final = "-._~!$&'()*+,;=:@"
_QUERY_SAFE: Final = "-._~,:"
_SLOT: Final = re.compile(r"\{(\*?)(\w+)\}")
_ID: Final = "[^/]+"
# A checkpoint is `weights/name`; some older servers use the bare name.
_MAX_PARTS: Final = 2
_KIND: Final = "(?:weights|sampler_weights|external_weights)/"
_CHECKPOINT: Final = f"(?:{_KIND}[^/]+|(?!{_KIND})[^/]+)"

QueryValue = str | int | float | bool | datetime | Sequence[str] | None


def segment(value: object) -> str:
    """Encode an id as one segment of a path.

    Raises:
        InvalidInputError: The id is empty or consists of dots, which would give another path.

    >>> segment("s:sample:0"), segment("a/b c?"), segment(7)
    ('s:sample:0', 'a%2Fb%20c%3F', '7')
    """
    text = str(value)
    if not text or text in (".", ".."):
        raise InvalidInputError(f"{text!r} cannot be part of an address")
    try:
        return quote(text, safe=_SEGMENT_SAFE)
    except UnicodeEncodeError:
        raise InvalidInputError(f"{text!r} holds half a character") from None


def segments(value: object) -> str:
    """Encode an id of up to two parts, such as `weights/name`, as segments of a path.

    >>> segments("weights/final 1")
    'weights/final%201'
    """
    parts = str(value).split("/")
    if len(parts) > _MAX_PARTS:
        raise InvalidInputError(f"{value!r} has more than {_MAX_PARTS} parts")
    return "/".join(segment(part) for part in parts)


def encode_query(values: Mapping[str, QueryValue]) -> str:
    """Encode a query: lists joined by commas, booleans in lower case, moments in RFC 3339.

    The result has no question mark. Values of None and empty ones are left out.

    >>> encode_query({"limit": 20, "flag": True, "ids": ["a", "b"], "project_id": None, "q": "x&y"})
    'limit=20&flag=true&ids=a,b&q=x%26y'
    """
    written = ((name, _query_text(value)) for name, value in values.items())
    return "&".join(f"{quote(name)}={quote(text, safe=_QUERY_SAFE)}" for name, text in written if text)


def _query_text(value: QueryValue) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        moment = value if value.tzinfo else value.replace(tzinfo=timezone.utc)
        return moment.astimezone(timezone.utc).isoformat().replace("+00:00", "Z")
    if isinstance(value, (str, int, float)):
        return str(value)
    return ",".join(str(item) for item in value)


class PathTemplate:
    """A path with slots for ids. `{run}` is one segment; `{*checkpoint}` is a name, or a kind and a name.

    >>> template = PathTemplate("/runs/{run}/checkpoints/{*checkpoint}")
    >>> template.fill({"run": "r 1", "checkpoint": "weights/a"})
    '/runs/r%201/checkpoints/weights/a'
    >>> template.match("/runs/r%201/checkpoints/weights/a")
    {'run': 'r 1', 'checkpoint': 'weights/a'}
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.names = tuple(name for _, name in _SLOT.findall(text))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """The expression for paths that match; servers need it, clients do not."""
        pattern, end = "", 0
        for slot in _SLOT.finditer(self.text):
            pattern += (
                f"{re.escape(self.text[end : slot.start()])}(?P<{slot[2]}>{_CHECKPOINT if slot[1] else _ID})"
            )
            end = slot.end()
        return re.compile(pattern + re.escape(self.text[end:]))

    def fill(self, ids: Mapping[str, object]) -> str:
        """Return the path for ids.

        Raises:
            TypeError: The ids do not match the template's names.
            InvalidInputError: An id cannot be part of a path.
        """
        if set(ids) != set(self.names):
            raise TypeError(f"{self.text} takes {', '.join(self.names) or 'no ids'}, not {', '.join(ids)}")
        return _SLOT.sub(lambda slot: (segments if slot[1] else segment)(ids[slot[2]]), self.text)

    def match(self, path: str) -> dict[str, str] | None:
        """Return the decoded ids in a path by name, or None if the path does not match."""
        found = self._pattern.fullmatch(path)
        return {name: unquote(value) for name, value in found.groupdict().items()} if found else None
