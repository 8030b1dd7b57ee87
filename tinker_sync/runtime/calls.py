"""Functions that make calls from the rows of the endpoint table (`wire.endpoints`), and read their answers.

An answer is read as the type that the row declares. Two functions are not pure: `make_call` looks up the
public method that runs in this thread, and `odd_answer` may change the text of the error that it gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from tinker_sync._base.naming import current
from tinker_sync._base.secret import Secret, mask_headers, mask_text
from tinker_sync.config import Settings, Timeout
from tinker_sync.config.settings import MAX_BODY_BYTES
from tinker_sync.errors import APIResponseValidationError, InvalidInputError, ResponseInfo, WireError
from tinker_sync.transport.body import PiecedBody
from tinker_sync.transport.call import ANSWER_BYTES, NO_HEADERS, PROMISE_BYTES, Call, Reply
from tinker_sync.types._model import Model
from tinker_sync.types.future import UntypedAPIFuture
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.adapt import json_body
from tinker_sync.wire.dialect import Dialect
from tinker_sync.wire.endpoints import ENDPOINTS, Endpoint, row_of
from tinker_sync.wire.paths import QueryValue, encode_query

_UNQUOTED: Final = "it does not have the expected form; it is not quoted, because it repeats a secret"
_IDS: Final = ("request_id", "session_id", "sampling_session_id")


def make_call(
    name: str,
    settings: Settings,
    request: Any = None,
    *,
    path: Mapping[str, object] | None = None,
    query: Mapping[str, QueryValue] | None = None,
    headers: Mapping[str, str] | None = None,
    body: bytes | PiecedBody | None = None,
    content_type: str = "application/json",
    deadline_s: float | None = None,
    dialect: Dialect | None = None,
    idempotency_key: str | None = None,
    sdk_method: str | None = None,
) -> Call:
    """Return one call of the API, ready to be sent.

    Args:
        name: the name of the endpoint.
        settings: the source of the connect and idle timeouts.
        request: the request, as one of the `tinker_sync.types`, or as a mapping, whose None values are sent
            as nulls; None for an empty request.
        path: the ids to fill into the path, by the names in the row.
        query: the query parameters; None and empty ones are left out.
        headers: extra headers for this call alone.
        body: the encoded body, instead of `request`.
        content_type: the content type of the body.
        deadline_s: the time that the call may take in all; None for the deadline of the settings.
        dialect: the dialect of the server; None before it is known, or if it makes no difference.
        idempotency_key: the key to send; None to let the sender (`transport.retries.Caller`) make one.
        sdk_method: the public method that the call is made for; None for the one that runs in this thread.
    """
    row = ENDPOINTS.get(name) or row_of(name)
    if body is None and row.body != "none":
        if dialect is not None and isinstance(request, Model):
            body = json_body(request, dialect)
        else:
            body = wire_json.encode({} if request is None else request)
    return Call(
        method=row.method,
        path=row.path_for(**(path or {})) if path or row.path.names else row.path.text,
        query=encode_query(query) if query else "",
        body=body,
        headers=NO_HEADERS if headers is None else headers,
        content_type=content_type,
        sdk_method=(current() if sdk_method is None else sdk_method) if row.named else "",
        credential=row.credential,
        timeout=_timeout(row, settings),
        # The transport retries a patient call for minutes. Other calls are repeated by the code that makes
        # them.
        max_retries=None if row.patient else row.max_retries,
        patient=row.patient,
        deadline_s=deadline_s,
        # The server recognises a repetition of a numbered call, if it keeps the numbers.
        repeatable=row.repeatable
        or (row.number is not None and dialect is not None and dialect.keeps_numbers),
        needed=row.needed,
        follow_redirects=row.follow_redirects,
        idempotency_key=idempotency_key,
        answer_bytes=PROMISE_BYTES if row.promises else MAX_BODY_BYTES if row.large else ANSWER_BYTES,
    )


def _timeout(row: Endpoint, settings: Settings) -> Timeout | None:
    if row.timeout_s is None:
        return None
    return Timeout(connect=settings.timeout.connect, read=row.timeout_s, idle=settings.timeout.idle)


def read_reply(name: str, reply: Reply, secrets: Callable[[], Iterable[Secret]] = tuple) -> Any:
    """Return an answer as the type that its row of the endpoint table declares; None if it declares none.

    Args:
        name: the name of the endpoint.
        reply: the answer.
        secrets: returns the values that must not appear in an error.

    Raises:
        APIResponseValidationError: the answer does not have that type, or an id in it is empty.
    """
    row = row_of(name)
    kind = row.reply_type
    if kind is None:
        return None
    try:
        answer = wire_json.decode(reply.body, kind)
        _refuse_empty_ids(answer)
    except WireError as error:
        raise odd_answer(row, reply, error, secrets) from error
    return answer


def _refuse_empty_ids(answer: Any) -> None:
    for field in _IDS:
        if getattr(answer, field, None) == "":
            raise WireError("is empty", f"$.{field}")


def read_promise(
    name: str, reply: Reply, secrets: Callable[[], Iterable[Secret]] = tuple
) -> tuple[str, Sequence[str] | None]:
    """Return the request id of a promise, and the ids of the sequences that a sample will have.

    The second value is None if the promise names no sequences, as for every call other than a sample.

    Args:
        name: the name of the endpoint.
        reply: the answer.
        secrets: returns the values that must not appear in an error.

    Raises:
        APIResponseValidationError: the answer is not a promise.
    """
    try:
        tree = wire_json.loads(reply.body)
    except WireError as error:
        raise odd_answer(row_of(name), reply, error, secrets) from error
    if type(tree) is dict:  # the usual form; it needs no converter
        request_id, ids = tree.get("request_id"), tree.get("sample_sequence_ids")
        fits = ids is None or (type(ids) is list and set(map(type, ids)) <= {str})
        fits = fits and type(tree.get("model_id")) in (str, type(None))
        if type(request_id) is str and request_id and fits:
            return request_id, ids
    promise: UntypedAPIFuture = read_reply(name, reply, secrets)
    return promise.request_id, promise.sample_sequence_ids


def foreign_promise(name: str, reply: Reply, request_id: str) -> APIResponseValidationError:
    """Return the error for a promise that belongs to another call of this client.

    Args:
        name: the name of the endpoint.
        reply: the answer.
        request_id: the id in the promise.
    """
    wrong = WireError(f"{request_id} is the request of another call", "$.request_id")
    return odd_answer(row_of(name), reply, wrong, tuple)


def odd_answer(
    row: Endpoint, reply: Reply, error: WireError, secrets: Callable[[], Iterable[Secret]]
) -> APIResponseValidationError:
    """Return the error to raise for an answer that cannot be read.

    Args:
        row: the row of the call.
        reply: the answer.
        error: the reason. If the answer contains a secret, this function replaces the text of `error` by one
            that quotes nothing, so that the returned error can have `error` as its cause.
        secrets: returns the values that must not appear in an error.
    """
    known = tuple(secrets())
    redact_exception(error, reply.body, known)
    request_id = reply.headers.get("x-request-id")
    return APIResponseValidationError(
        f"the answer of {row.name} cannot be read: {error}",
        response=ResponseInfo(status_code=reply.status, headers=mask_headers(reply.headers, known)),
        request_id=mask_text(request_id, known) if request_id else None,
        method=row.method,
        path=row.path.text,
    )


def redact_exception(
    error: WireError | InvalidInputError, content: bytes, secrets: Iterable[Secret]
) -> BaseException:
    """If an answer contains a secret, replace the text of `error`, which quotes the answer. Return `error`.

    The error quotes pieces of the answer. A piece may end in the middle of a secret, and a search for the
    secret in the message would not find that.

    Args:
        error: the error, which is returned; its text is replaced in place.
        content: the answer.
        secrets: the secrets of the client.

    >>> error = WireError("expected a number, got 'hello hunt…'", "$.a")
    >>> print(redact_exception(error, b"hello hunter22", []))
    $.a: expected a number, got 'hello hunt…'
    >>> print(redact_exception(error, b"hello hunter22", [Secret("hunter22")]))
    it does not have the expected form; it is not quoted, because it repeats a secret
    """
    if any(secret.reveal().encode("utf-8", "surrogatepass") in content for secret in secrets):
        error.args = (_UNQUOTED,)
        if isinstance(error, WireError):
            error.message, error.path = _UNQUOTED, ""
        else:
            error.problems = (_UNQUOTED,)
    return error
