"""Paths and queries of the API: their construction from ids and values, and the ids in a received path.

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
from tinker_sync.types._moment import format_moment

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
        InvalidInputError: the id is "", "." or "..", which would give another path, or is not valid text.

    >>> segment("s:sample:0"), segment("a/b c?"), segment(7)
    ('s:sample:0', 'a%2Fb%20c%3F', '7')
    """
    text = str(value)
    if not text or text in (".", ".."):
        raise InvalidInputError(f"{text!r} cannot be part of an address")
    return _quote(text, _SEGMENT_SAFE)


def _quote(text: str, safe: str) -> str:
    try:
        return quote(text, safe=safe)
    except UnicodeEncodeError:
        raise InvalidInputError(f"{text!r} holds half a character") from None


def segments(value: object) -> str:
    """Encode an id of up to two parts, such as `weights/name`, as segments of a path.

    Raises:
        InvalidInputError: the id has more parts, or a part cannot be a segment.

    >>> segments("weights/final 1")
    'weights/final%201'
    """
    parts = str(value).split("/")
    if len(parts) > _MAX_PARTS:
        raise InvalidInputError(f"{value!r} has more than {_MAX_PARTS} parts")
    return "/".join(segment(part) for part in parts)


def encode_query(values: Mapping[str, QueryValue]) -> str:
    """Encode a query: lists joined by commas, booleans in lower case, datetimes in RFC 3339 and UTC.

    The result has no question mark. Values of None and empty ones are left out. Naive datetimes count as UTC.

    Raises:
        InvalidInputError: a value is not valid text.

    >>> encode_query({"limit": 20, "flag": True, "ids": ["a", "b"], "project_id": None, "q": "x&y"})
    'limit=20&flag=true&ids=a,b&q=x%26y'
    """
    written = ((name, query_text(value)) for name, value in values.items())
    return "&".join(f"{quote(name)}={_quote(text, _QUERY_SAFE)}" for name, text in written if text)


def query_text(value: QueryValue) -> str:
    """Return a value of a query as text, which is empty for None.

    >>> query_text(True), query_text([1, 2]), query_text(None)
    ('true', '1,2', '')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        moment = value if value.tzinfo else value.replace(tzinfo=timezone.utc)
        return format_moment(moment.astimezone(timezone.utc))
    if isinstance(value, (str, int, float)):
        return str(value)
    return ",".join(str(item) for item in value)


class PathTemplate:
    """A path with slots for ids. It makes the path for given ids, and finds the ids in a given path.

    `{run}` is a slot for one segment, `{*checkpoint}` a slot for a name, or for a kind and a name.

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
        """The regular expression for paths that match. It is compiled on first use; only servers use it."""
        pattern, end = "", 0
        for slot in _SLOT.finditer(self.text):
            pattern += (
                f"{re.escape(self.text[end : slot.start()])}(?P<{slot[2]}>{_CHECKPOINT if slot[1] else _ID})"
            )
            end = slot.end()
        return re.compile(pattern + re.escape(self.text[end:]))

    def fill(self, ids: Mapping[str, object]) -> str:
        """Return the path with these ids in its slots.

        Raises:
            TypeError: the names of the ids are not those of the slots.
            InvalidInputError: an id cannot be part of a path.
        """
        if set(ids) != set(self.names):
            raise TypeError(f"{self.text} takes {', '.join(self.names) or 'no ids'}, not {', '.join(ids)}")
        return _SLOT.sub(lambda slot: (segments if slot[1] else segment)(ids[slot[2]]), self.text)

    def match(self, path: str) -> dict[str, str] | None:
        """Return the decoded ids in a path by name, or None if the path does not match."""
        found = self._pattern.fullmatch(path)
        return {name: unquote(value) for name, value in found.groupdict().items()} if found else None
