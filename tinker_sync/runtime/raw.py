"""Calls that users write themselves: routes that this client does not know, and fields of their own.

`Extra` holds what a user adds to a call of a public method, and the context of the user's trace as W3C
headers. `request` is a call of any route: it is sent like
the calls of the table (key, retries, errors), and its future ends with the parsed JSON of the answer, or of
the result if the answer is a promise. `later` makes any call that blocks, for clients too.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from tinker_sync._base.naming import carried, find_call_site
from tinker_sync._base.secret import HeaderMap
from tinker_sync.config.settings import header_problem
from tinker_sync.errors import InvalidInputError, WireError
from tinker_sync.runtime.calls import foreign_promise, odd_answer, read_promise
from tinker_sync.runtime.futures import APIFuture, settle
from tinker_sync.runtime.polls import Promise
from tinker_sync.transport.call import NO_HEADERS
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.endpoints import METHODS, raw_name, row_of
from tinker_sync.wire.paths import query_text

if TYPE_CHECKING:
    from tinker_sync.runtime.client import ClientRuntime
    from tinker_sync.transport.call import Reply

T = TypeVar("T")

_PATH: Final = re.compile(r"/[!$%&'()*+,\-./0-9:;=@A-Z_a-z~]*")
_NUMBER: Final = "seq_id"
_NO_TRACE: Final[dict[str, str]] = {}


class Extra(NamedTuple):
    """What is added to one call: fields of the JSON body and headers of the user, and the user's trace."""

    body: Mapping[str, Any] = {}
    headers: HeaderMap = NO_HEADERS
    asked: bool = False
    """True if the user has added something, so that a call with no place for it must refuse."""

    @classmethod
    def of(cls, call: str, body: Mapping[str, Any] | None, headers: Mapping[str, str] | None) -> Extra:
        """Check the arguments `extra_body` and `extra_headers` of a method, and return them as one value.

        If the user's code runs in an OpenTelemetry span, the headers name it, unless the user's own do.

        Raises:
            InvalidInputError: they cannot be sent.

        >>> Extra.of("sample", {"beta": 1}, None).applied(b'{"seq_id":3,"num_samples":1}')
        b'{"seq_id":3,"num_samples":1,"beta":1}'
        """
        traced = trace_headers()
        if body is None and headers is None and not traced:
            return NO_EXTRA
        if body is not None:
            body = checked_body(f"{call}: extra_body", body)
        own = checked_headers(f"{call}: extra_headers", headers)
        if traced and "traceparent" not in own and not header_problem(traced):
            own = HeaderMap({**traced, **own})
        return cls(body or {}, own, asked=body is not None or headers is not None)

    def applied(self, encoded: bytes) -> bytes:
        """Return an encoded JSON object with these fields, which replace those of the same name."""
        if not self.body:
            return encoded
        return wire_json.encode({**wire_json.loads(encoded), **self.body})


NO_EXTRA: Final = Extra()


def trace_headers() -> dict[str, str]:
    """Return `traceparent`, and `tracestate` if there is one, of the current span; empty without a span.

    OpenTelemetry is not imported for this, because a program that has not imported it has no span. Baggage is
    not sent, because users put data of their own into it.

    `OTEL_PROPAGATORS` without `tracecontext`, such as `none`, turns this off.

    >>> trace_headers()
    {}
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return _NO_TRACE
    try:
        context = trace.get_current_span().get_span_context()
        if not context.is_valid or "tracecontext" not in os.environ.get("OTEL_PROPAGATORS", "tracecontext"):
            return _NO_TRACE
        ids = f"{context.trace_id:032x}-{context.span_id:016x}"
        headers = {"traceparent": f"00-{ids}-{context.trace_flags & 0xFF:02x}"}
        if context.trace_state:
            headers["tracestate"] = context.trace_state.to_header()
    except Exception:  # noqa: BLE001  # it may be half imported, or another package of that name
        return _NO_TRACE
    return headers


def checked_body(what: str, body: object, *, numbered: bool = True) -> dict[str, Any]:
    """Return a JSON body of the user as it is now: it is sent later, and programs use one dictionary again.

    If the client numbers the call, the body must not do so.

    Raises:
        InvalidInputError: it is no mapping, has a number of its own, or has no JSON form.
    """
    if not isinstance(body, Mapping):
        raise InvalidInputError(f"{what}: expected a dictionary of JSON fields, got {type(body).__name__}")
    if numbered and _NUMBER in body:
        raise InvalidInputError(f"{what}: leave out {_NUMBER!r}; the client numbers its calls")
    try:
        copied: dict[str, Any] = wire_json.loads(wire_json.encode(body))
    except InvalidInputError as error:
        raise InvalidInputError(f"{what}: {error}") from error
    return copied


def checked_query(query: object) -> dict[str, str]:
    """Return the query parameters of the user as text.

    Raises:
        InvalidInputError: they are no mapping, or a value has no text.
    """
    if not isinstance(query, Mapping):
        raise InvalidInputError(f"request: query: expected a dictionary, got {type(query).__name__}")
    for name, value in query.items():
        known = value is None or isinstance(value, (str, int, float, datetime, Iterable))
        if not known or isinstance(value, (bytes, Mapping)):
            kind = type(value).__name__
            raise InvalidInputError(
                f"request: query: {name}: expected text, a number or a list of them, got {kind}"
            )
    return {str(name): query_text(value) for name, value in query.items()}


def refuse_lost(name: str) -> None:
    """Raise `InvalidInputError` if a body would not be sent, because calls of this row have none."""
    if row_of(name).body == "none":
        raise InvalidInputError(f"request: {name} has no body; parameters go into query=")


def checked_headers(what: str, headers: Mapping[str, str] | None) -> HeaderMap:
    """Return headers of the user for one call.

    Raises:
        InvalidInputError: they cannot be sent.
    """
    problem = header_problem(headers)
    if problem:
        raise InvalidInputError(f"{what}{problem}")
    return HeaderMap(headers) if headers else NO_HEADERS


def checked_name(method: str, path: str) -> str:
    """Return the name of the row of a raw call.

    Raises:
        InvalidInputError: there is no such method, or the path cannot be sent.
    """
    if method.upper() not in METHODS:
        raise InvalidInputError(f"request: the method is one of {', '.join(METHODS)}, not {method!r}")
    if not _PATH.fullmatch(str(path)):
        hint = "; parameters go into query=" if "?" in str(path) else ""
        raise InvalidInputError(
            f"request: expected a path below the base URL, such as '/api/v1/asample', got {path!r}{hint}"
        )
    return raw_name(method.upper(), path)


def read_plain(name: str, reply: Reply) -> Any:
    """Return the parsed JSON of an answer; None if it is empty."""
    if not reply.body:
        return None
    try:
        return wire_json.loads(reply.body)
    except WireError as error:
        raise odd_answer(row_of(name), reply, error, tuple) from error


def plain_result(name: str, reply: Reply, tree: Any) -> Any:
    """Return the result of a promise as JSON data: `tree`, or the conversion of its protobuf."""
    if tree is not None:
        return tree
    from tinker_sync.wire.proto.outputs import decode_forward_backward_output
    from tinker_sync.wire.proto.samples import decode_sample_response

    sampled = row_of(name).result == "SampleResponse"
    decode: Any = decode_sample_response if sampled else decode_forward_backward_output
    return wire_json.loads(wire_json.encode(decode(reply.body)))


def later(runtime: ClientRuntime, work: Callable[[], T], *, changes: bool) -> APIFuture[T]:
    """Run `work` on a worker, and return its future, which cannot be cancelled once the work has begun.

    Args:
        runtime: the runtime of the client.
        work: makes the call.
        changes: True if the call changes something at the server, so that the end of the client waits for it.
    """
    future: APIFuture[T] = _new_future(runtime, only_reads=not changes)

    def run() -> None:
        if not future._begin():
            return
        future._mark_sending()
        settle(future, work)

    runtime.pools.rest.run_call(carried(run))
    if changes:
        runtime.lifecycle.note_change(future)
    return future


def request(
    runtime: ClientRuntime,
    name: str,
    body: Mapping[str, Any] | None,
    *,
    promise: bool,
    query: Mapping[str, Any] | None,
    headers: HeaderMap,
    deadline_at: float,
) -> APIFuture[Any]:
    """Make a raw call on a worker, and return its future.

    If it is cancelled after the server has made a promise, the server is told.
    """
    row = row_of(name)
    send: Callable[..., Any] = partial(
        runtime.server.call, name, body, query=query, headers=headers, deadline_at=deadline_at
    )
    if not promise:
        return later(runtime, partial(send, read=partial(read_plain, name)), changes=row.changes)
    future: APIFuture[Any] = _new_future(runtime, only_reads=True)

    def accepted(reply: Reply) -> str:
        request_id, _ = read_promise(name, reply)
        if not runtime.lifecycle.accept(future, request_id):
            raise foreign_promise(name, reply, request_id)
        return request_id

    def run() -> None:
        if future.done():  # cancelled before it was sent
            return
        future._mark_sending()
        began_at = runtime.clock.now()
        try:
            request_id = send(read=accepted)
            promised = Promise(
                request_id,
                row.promises or name,
                wants_proto=row.result_as_protobuf,
                roundtrip_s=runtime.clock.now() - began_at,
            )
            future._when_done(lambda ended: runtime.server.abandon(request_id) if ended.cancelled() else None)
            polls = runtime.server.ready().polls
            polls.fetch(promised, future, partial(plain_result, name), deadline_at=deadline_at)
        except Exception as error:  # noqa: BLE001  # the future raises it
            future.fail(error)

    runtime.pools.rest.run_call(carried(run))
    if row.changes:
        runtime.lifecycle.note_change(future)
    return future


def _new_future(runtime: ClientRuntime, *, only_reads: bool) -> APIFuture[Any]:
    runtime.lifecycle.refuse_if_leaving()
    return runtime.lifecycle.make_future(only_reads=only_reads, call_site=find_call_site())
