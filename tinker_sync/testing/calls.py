"""`RecordedCall`: one request of a client, for asserts. It masks credentials, as test logs are shared."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Final
from urllib.parse import parse_qsl

from tinker_sync._base.secret import HeaderMap, mask_headers, mask_json, mask_text
from tinker_sync.errors import WireError
from tinker_sync.testing.faults import Fault

_PROTOBUF: Final = "application/x-protobuf"
# Far above the size of test data: a mistake must not fill the memory.
_LARGEST_BODY: Final = 1 << 30


class RecordedCall:
    """One request as it arrived, and its outcome. Any thread may read it.

    >>> from tinker_sync.testing import LocalServer
    >>> with LocalServer(model="tinker-sync/random") as server, server.service() as service:
    ...     capabilities = service.get_server_capabilities()
    >>> call = server.calls[-1]
    >>> call.endpoint, call.method, call.number, call.status, call.headers["x-api-key"]
    ('get_server_capabilities', 'GET', 1, 200, '***')
    """

    def __init__(
        self,
        *,
        order: int,
        number: int,
        endpoint: str,
        ids: Mapping[str, str],
        method: str,
        path: str,
        query: str,
        headers: Iterable[tuple[str, str]],
        content: bytes,
        at_s: float,
    ) -> None:
        self.order = order
        """The number of this request among all, from 1."""
        self.number = number
        """The number of this call among those of its endpoint, from 1."""
        self.endpoint = endpoint
        """The name in `tinker_sync.wire.endpoints`; empty for an unknown path."""
        self.ids = dict(ids)
        """The ids in the path, such as `run`."""
        self.method = method
        self.path = path
        self.query = dict(parse_qsl(mask_text(query), keep_blank_values=True))
        pairs = list(headers)
        self.headers: Mapping[str, str] = HeaderMap(mask_headers(pairs))
        """The headers; a key may be in upper or lower case. Credentials are masked."""
        self.at_s = at_s
        """The time of arrival, in seconds since the `LocalServer` was created."""
        self.fault: Fault | None = None
        """The fault that the plan chose, or None."""
        self.status: int | None = None
        """The status of the reply; None before the reply, and for a call without one."""
        self.over = threading.Event()
        """Set when the server has made its reply, before it sends it, or when it cuts the connection."""
        self._content = content
        self._is_protobuf = self.headers.get("content-type", "").startswith(_PROTOBUF)

    @cached_property
    def body(self) -> Any:
        """The body as JSON data, also if it came as protobuf; None if it is empty.

        Tokens and tensors of a protobuf body are arrays. In other bodies, secret fields are masked.

        Raises:
            WireError: the body cannot be decompressed, or is no protobuf request.
            ValueError: the body is not JSON.
            RecursionError: the JSON is nested too deeply.
        """
        content = self._plain_content()
        if not content:
            return None
        if self._is_protobuf:
            from tinker_sync.wire.json import to_plain

            request, forward_only, _ = self._decode_protobuf(content)
            return {**to_plain(request), "forward_only": forward_only}
        return mask_json(json.loads(content))

    @property
    def request(self) -> Any:
        """The body as a value of `tinker_sync.types`; None if it is empty or its call has no such type.

        Raises:
            WireError: the body does not fit the type of its call; the server refused it, too.
        """
        return self._decoded[0]

    @property
    def unknown_fields(self) -> tuple[str, ...]:
        """The fields that the server ignored because it does not know them, such as `SampleRequest.colour`.

        Fields of a protobuf body have a number in place of a name, such as `Datum.17`.

        Raises:
            WireError: the body does not fit the type of its call; the server refused it, too.
        """
        return tuple(sorted(self._decoded[1]))

    @cached_property
    def _decoded(self) -> tuple[Any, set[str]]:
        content = self._plain_content()
        if content and self._is_protobuf:
            request, _, unknown = self._decode_protobuf(content)
            return request, unknown
        from tinker_sync.wire.endpoints import row_of

        kind = row_of(self.endpoint).request_type if self.endpoint else None
        if kind is None or not content:
            return None, set()
        from tinker_sync.wire.json import read_leniently

        try:
            tree = self.body
        except (ValueError, RecursionError) as error:
            raise WireError(f"the body cannot be read as JSON: {error}") from None
        return read_leniently(tree, kind)

    def _decode_protobuf(self, content: bytes) -> tuple[Any, bool, set[str]]:
        from tinker_sync.wire.proto.requests import decode_forward_backward_request

        unknown: set[str] = set()
        return *decode_forward_backward_request(content, unknown), unknown

    def _plain_content(self) -> bytes:
        from tinker_sync.wire.http1.content import decode
        from tinker_sync.wire.http1.framing import MalformedMessage, MessageTooLarge

        encoding = self.headers.get("content-encoding")
        try:
            return decode(self._content, encoding, limit=_LARGEST_BODY)
        except (MalformedMessage, MessageTooLarge) as error:
            raise WireError(f"the body cannot be decoded as {encoding!r}, its content-encoding") from error

    def __repr__(self) -> str:
        outcome = self.status if self.status is not None else "cut off" if self.over.is_set() else "under way"
        fault = f", {self.fault!r}" if self.fault else ""
        return f"<{self.endpoint or self.path} {self.number}: {outcome}{fault}>"
