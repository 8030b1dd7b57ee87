"""The bodies of requests, as far as a journal reads them: their digests, and what a save makes or replaces.

All functions are pure.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, Final

# A text within the JSON has backslashes before its quotes.
_SAMPLER: Final = re.compile(rb'"sampling_session_seq_id":(\d+)')


def digest_of(call: str, body: Any) -> str:
    """Return a digest of a request, without the number of a sampler."""
    hashed = hashlib.sha256(call.encode() + b"\n")
    made = sampler_of(call, body)
    hidden = body if made is None else with_sampler(body, 0)
    for piece in [hidden] if isinstance(hidden, bytes) else hidden:
        hashed.update(piece)
    return hashed.hexdigest()[:32]


def replaced_by(call: str, body: Any) -> str | None:
    """Return the name of the checkpoint that a request replaces, a save with `overwrite`; None for others.

    >>> replaced_by("save_weights", b'{"path": "last", "overwrite": true}')
    'last'
    """
    request = json.loads(body) if call == "save_weights" else {}
    return request["path"] if request.get("overwrite") else None


def sampler_of(call: str, body: Any) -> int | None:
    """Return the number of the sampler that a request makes; None if it makes none.

    >>> sampler_of("save_weights_for_sampler", b'{"sampling_session_seq_id":3}')
    3
    """
    found = _SAMPLER.search(body) if call == "save_weights_for_sampler" else None
    return None if found is None else int(found[1])


def with_sampler(body: bytes, number: int) -> bytes:
    """Return a request with another number of the sampler that it makes.

    A restarted script draws other numbers for the samplers of its repeated calls.
    """
    return _SAMPLER.sub(b'"sampling_session_seq_id":%d' % number, body, count=1)
