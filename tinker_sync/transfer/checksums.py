"""Checksums that servers send along, found in the headers of an answer. Pure.

Only those of the whole file count: of a part of it, an answer says the sum of the part.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from typing import Final

# By header: how to find the algorithm; the value is base64 unless it is hexadecimal.
_WHOLE: Final = {
    "x-amz-checksum-sha256": "sha256",
    "x-checksum-sha256": "sha256",
    "x-content-sha256": "sha256",
    "x-checksum-md5": "md5",
    "x-ms-blob-content-md5": "md5",
}
_LISTS: Final = ("repr-digest", "digest", "x-goog-hash")
# Of what the answer itself holds, which is the whole file or a part of it.
_HELD: Final = {"content-md5": "md5"}
_HELD_LISTS: Final = ("content-digest",)
_NAMES: Final = {"sha-256": "sha256", "sha256": "sha256", "sha-512": "sha512", "md5": "md5"}
_ITEM: Final = re.compile(r"\s*([A-Za-z0-9-]+)\s*=\s*:?([A-Za-z0-9+/=_-]+?):?\s*(?:,|$)")
_BEST: Final = ("sha256", "sha512", "md5")


def checksum_of(headers: Mapping[str, str], *, whole: bool) -> tuple[str, str] | None:
    """The best checksum of the whole file in an answer's headers: algorithm and hexadecimal value.

    Args:
        headers: of the answer, found under any case.
        whole: whether the answer holds the whole file.

    >>> checksum_of({"content-md5": "1B2M2Y8AsgTpgAmY7PhCfg=="}, whole=True)
    ('md5', 'd41d8cd98f00b204e9800998ecf8427e')
    """
    found: dict[str, str] = {}
    named = {**_WHOLE, **(_HELD if whole else {})}
    for header, algorithm in named.items():
        _note(found, algorithm, headers.get(header, ""))
    generic = headers.get("x-checksum", "")
    for algorithm in _BEST:
        if len(generic) == 2 * hashlib.new(algorithm, usedforsecurity=False).digest_size:
            _note(found, algorithm, generic)
    for header in (*_LISTS, *(_HELD_LISTS if whole else ())):
        for name, value in _ITEM.findall(headers.get(header, "")):
            if name.lower() in _NAMES:
                _note(found, _NAMES[name.lower()], value)
    return next(((algorithm, found[algorithm]) for algorithm in _BEST if algorithm in found), None)


def _note(found: dict[str, str], algorithm: str, text: str) -> None:
    size = hashlib.new(algorithm, usedforsecurity=False).digest_size
    text = text.strip().strip('"')
    try:
        raw = bytes.fromhex(text) if len(text) == 2 * size else base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return  # such as the sum of sums of a file that was sent in parts, "…-7"
    if len(raw) == size:
        found.setdefault(algorithm, raw.hex())
