"""`RequestOptions`, a name that scripts import to annotate what they hand around."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from tinker_sync.config.timeout import Timeout


class RequestOptions(TypedDict, total=False):
    """Settings of one request, as scripts written for the reference client name them.

    No method here takes one: headers, retries and timeouts are settings of a client.

    >>> options: RequestOptions = {"max_retries": 2, "timeout": 5.0}
    """

    headers: Mapping[str, str]
    max_retries: int
    timeout: float | Timeout | None
    params: Mapping[str, object]
    extra_json: Mapping[str, object]
    idempotency_key: str
    follow_redirects: bool
