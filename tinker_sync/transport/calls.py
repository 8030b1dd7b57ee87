"""From a row of the endpoint table to a `Call`: the one place where the two meet. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinker_sync.transport.call import Call
from tinker_sync.types._model import Model
from tinker_sync.wire.adapt import json_body
from tinker_sync.wire.dialect import Dialect
from tinker_sync.wire.endpoints import Endpoint
from tinker_sync.wire.paths import QueryValue, encode_query


def call_for(
    endpoint: Endpoint,
    dialect: Dialect,
    *,
    ids: Mapping[str, object] | None = None,
    query: Mapping[str, QueryValue] | None = None,
    request: Model | None = None,
    body: bytes | None = None,
    **others: Any,
) -> Call:
    """Make the call of an endpoint.

    Args:
        endpoint: Which one.
        dialect: What the server speaks.
        ids: What goes into the path.
        query: What goes behind it; None and empty values are left out.
        request: Goes into the body as JSON, shaped for the dialect.
        body: A body that is encoded already, in place of `request`.
        others: Fields of `Call`.

    Raises:
        InvalidInputError: An id cannot be part of a path, or the request cannot be written.

    >>> from tinker_sync.types import FutureRetrieveRequest
    >>> from tinker_sync.wire.endpoints import ENDPOINTS
    >>> call = call_for(
    ...     ENDPOINTS["retrieve_future"], Dialect.of_vendor(), request=FutureRetrieveRequest(request_id="r-1")
    ... )
    >>> call, call.max_retries
    (<Call POST /api/v1/retrieve_future, 48 bytes>, 0)
    """
    if request is not None:
        body = json_body(request, dialect)
    columns: dict[str, Any] = {
        "method": endpoint.method,
        "path": endpoint.path_for(**(ids or {})),
        "query": encode_query(query or {}),
        "body": body,
        "read_s": endpoint.timeout_s,
        "max_retries": endpoint.max_retries,
        "repeatable": dialect.may_repeat(endpoint),
        "follow_redirects": endpoint.follow_redirects,
        "credential": endpoint.credential,
    }
    return Call(**{**columns, **others})
