"""The base of all errors, and the family of `APIError`: failures between client and server.

`errors` re-exports the classes; that is their public path.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final, TypeVar

from tinker_sync._base.clock import in_seconds
from tinker_sync._base.error_details import (
    RequestInfo,
    ResponseInfo,
    find_server_message,
    hint_wrong_server,
    name_status,
    read_body,
)
from tinker_sync._base.secret import Secret, mask_headers, mask_text


def _rebuild(cls: type[TinkerError], args: tuple[object, ...]) -> TinkerError:
    return cls.__new__(cls, *args)


class TinkerError(Exception):
    """The base class of the errors of this package.

    >>> try:
    ...     raise RequestFailedError("out of memory", "req-1", "server")
    ... except TinkerError as error:
    ...     print(error)
    out of memory (request req-1, server). This is the server's fault; try again later.
    """

    ambiguous = False
    """True if the server may have executed the failed call in its last or an earlier try.

    False for a forward pass that a training client sends again, because it changes nothing.
    """

    # Constructors differ, so copies are made from the attributes. This works for subclasses of users too.
    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args), {**self.__dict__}


class APIError(TinkerError):
    """A request to the server failed.

    Args:
        message: the cause, as the server's answer or the client describes it.
        request: the request; any object with `method`, `url` and `headers`. It may also come first, and the
            message second.
        body: the body of the answer: parsed JSON, else text, else None.
        request_id: the server's id of the request.
        method, path: taken from `request` unless given.
        attempts: the number of tries.

    >>> print(APIError("odd answer", method="GET", path="/api/v1/x", attempts=3))
    odd answer (GET /api/v1/x, 3 attempts)
    """

    advice: ClassVar[str] = ""
    default_message: ClassVar[str] = "The request failed."

    message: str
    request: RequestInfo | None
    body: Any
    request_id: str | None
    method: str | None
    path: str | None
    attempts: int | None

    def __init__(
        self,
        message: str | None = None,
        request: Any = None,
        *,
        body: Any = None,
        request_id: str | None = None,
        method: str | None = None,
        path: str | None = None,
        attempts: int | None = None,
    ) -> None:
        given: Any = message
        if given is not None and not isinstance(given, str):
            # As in the connection errors of the reference client.
            message, request = request, given
        # Messages often quote an HTTP library, and those quote addresses with passwords.
        self.message = mask_text(message or self.default_message)
        super().__init__(self.message)
        self.request = RequestInfo.of(request)
        self.body = body
        self.request_id = request_id
        self.method = method or (self.request.method if self.request else None)
        self.path = path or (self.request.path if self.request else None)
        self.attempts = attempts

    def __str__(self) -> str:
        return append_advice(self._headline() + self._whereabouts(), self._advice())

    def _headline(self) -> str:
        return self.message.rstrip(".")

    def _advice(self) -> str:
        return self.advice

    def _whereabouts(self) -> str:
        """Return call, request id and attempts as text: ` (POST /api/v1/x, request req-1, 3 attempts)`."""
        call = " ".join(part for part in (self.method, self.path) if part)
        known = [
            call,
            f"request {self.request_id}" if self.request_id else "",
            f"{self.attempts} attempts" if self.attempts and self.attempts > 1 else "",
        ]
        listed = ", ".join(part for part in known if part)
        return f" ({listed})" if listed else ""


def append_advice(statement: str, advice: str) -> str:
    if not advice:
        return statement
    return f"{statement.rstrip('.')}. {advice}"


class APIResponseValidationError(APIError):
    """The server's answer does not have the expected form.

    >>> print(APIResponseValidationError("$.model_id: missing", method="POST", path="/api/v1/create_model"))
    $.model_id: missing (POST /api/v1/create_model). The server may speak another version of the protocol.
    """

    advice = "The server may speak another version of the protocol."
    default_message = "The server's answer does not have the expected form."

    response: ResponseInfo | None
    status_code: int | None

    def __init__(
        self,
        message: str | None = None,
        *,
        response: Any = None,
        body: Any = None,
        request: Any = None,
        status_code: int | None = None,
        request_id: str | None = None,
        method: str | None = None,
        path: str | None = None,
        attempts: int | None = None,
    ) -> None:
        self.response, request, request_id = _complete(response, request, request_id)
        super().__init__(
            message, request, body=body, request_id=request_id, method=method, path=path, attempts=attempts
        )
        self.status_code = status_code or (self.response.status_code if self.response else None)

    def _advice(self) -> str:
        return hint_wrong_server(self.response, self.request) or super()._advice()


class APIStatusError(APIError):
    """The server answered with an error status.

    The subclasses differ by remedy: `BadRequestError` and `UnprocessableEntityError` (correct the input),
    `AuthenticationError` and `PermissionDeniedError` (the key), `BillingError` (the account),
    `NotFoundError`, `ConflictError`, `RateLimitError` (wait), `InternalServerError` (try later, or report).
    408, 410, 425 and other 4xx have no subclass.

    `message` is the server's message, `body` the parsed JSON or else the text, and `retry_after_s` the pause
    that the server requested.

    >>> error = APIStatusError.from_reply(404, {"x-request-id": "r-9"}, b'{"detail": "no such run"}')
    >>> type(error).__name__, error.status_code, error.message, error.request_id
    ('NotFoundError', 404, 'no such run', 'r-9')
    """

    response: ResponseInfo | None
    status_code: int
    retry_after_s: float | None

    def __init__(
        self,
        message: str,
        *,
        response: Any = None,
        body: Any = None,
        status_code: int | None = None,
        request: Any = None,
        request_id: str | None = None,
        method: str | None = None,
        path: str | None = None,
        attempts: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.response, request, request_id = _complete(response, request, request_id)
        super().__init__(
            message, request, body=body, request_id=request_id, method=method, path=path, attempts=attempts
        )
        if status_code is None and self.response is not None:
            status_code = self.response.status_code
        # Subclasses have their status as a class attribute, except those for several statuses.
        self.status_code = status_code if status_code is not None else getattr(type(self), "status_code", 0)
        self.retry_after_s = retry_after_s

    @classmethod
    def from_reply(
        cls,
        status_code: int,
        headers: Mapping[str, str],
        content: bytes,
        *,
        request: Any = None,
        request_id: str | None = None,
        method: str | None = None,
        path: str | None = None,
        attempts: int | None = None,
        retry_after_s: float | None = None,
        secrets: Iterable[str | Secret] = (),
    ) -> APIStatusError:
        """Return the error for an answer. Its class follows from the status, its message from the body.

        Args:
            status_code: the HTTP status.
            headers: the headers of the answer.
            content: the body of the answer, without content encoding.
            request: the request; any object with `method`, `url` and `headers`.
            request_id: the server's id of the request; by default the `X-Request-Id` of the answer.
            method, path: taken from `request` unless given.
            attempts: the number of tries.
            retry_after_s: the pause that the server requested; this method does not read it from `headers`.
            secrets: values that are masked in the error if the server repeats them.
        """
        known = tuple(secrets)
        body, kept = read_body(content, known)
        request = RequestInfo.of(request)
        return status_error_class(status_code)(
            find_server_message(body) or name_status(status_code),
            response=ResponseInfo(
                status_code=status_code, headers=mask_headers(headers, known), content=kept, request=request
            ),
            body=body,
            status_code=status_code,
            request_id=request_id,
            method=method,
            path=path,
            attempts=attempts,
            retry_after_s=retry_after_s,
        )

    def _headline(self) -> str:
        words = super()._headline()
        if not self.status_code:  # made without an answer
            return words
        name = name_status(self.status_code)
        return f"{self.status_code} {name}" + (f": {words}" if words != name else "")

    def _advice(self) -> str:
        doubtful = hint_wrong_server(self.response, self.request)
        if doubtful:
            return doubtful
        if self.retry_after_s:
            return f"{self.advice} The server asks to wait {in_seconds(self.retry_after_s)}.".strip()
        return self.advice


class BadRequestError(APIStatusError):
    """400: the server refuses the request; a retry without changes fails again."""

    status_code = 400
    advice = "Change the request; sending it again as it is will not help."


class AuthenticationError(APIStatusError):
    """401: the server does not accept the key or token."""

    status_code = 401
    advice = "Check the API key: the api_key argument, TINKER_API_KEY, or `tinker-sync auth login`."


class BillingError(APIStatusError):
    """402: the account cannot pay, or billing is not set up."""

    status_code = 402
    advice = "Set up or renew billing in the console: https://tinker.thinkingmachines.ai"


class PermissionDeniedError(APIStatusError):
    """403: the key is valid but lacks the permission for this call."""

    status_code = 403
    advice = "The key may not do this; check its organization and project, and who owns the object."


class NotFoundError(APIStatusError):
    """404: there is no such object, or this server has no such call."""

    status_code = 404
    advice = "Check the id or path; the object may have expired, or the server may not offer this call."


class ConflictError(APIStatusError):
    """409: the object is not in the state that the request assumes.

    If the error is `ambiguous`, an earlier try of this call may have changed the object.
    """

    status_code = 409
    advice = "The object changed or is in use; look at its present state before repeating."

    def _advice(self) -> str:
        if not self.ambiguous:
            return super()._advice()
        return (
            "The answer to an earlier try was lost, and that try may have been carried out: "
            "look whether it was before repeating."
        )


class UnprocessableEntityError(APIStatusError):
    """422: the server understands the form of the request but not its content."""

    status_code = 422
    advice = "Change the fields named above; sending the request again as it is will not help."


class RateLimitError(APIStatusError):
    """429: too many requests at once. `retry_after_s` is the pause that the server requested, if any."""

    status_code = 429
    advice = "Send less at a time, or wait before repeating."


class InternalServerError(APIStatusError):
    """500 and above: the server or a proxy before it failed."""

    advice = "This is the server's fault; try again later, and report the request if it stays."


class APIConnectionError(APIError):
    """No answer came: the server could not be reached, the connection broke, or the client was closed.

    >>> print(APIConnectionError(method="GET", path="/api/v1/x"))
    Connection error (GET /api/v1/x). Check the network, any proxy, and the base URL.
    """

    advice = "Check the network, any proxy, and the base URL."
    default_message = "Connection error."


class APITimeoutError(APIConnectionError):
    """A connection or an answer did not come within the timeout, or within the time left for the call.

    >>> APITimeoutError().message
    'Request timed out.'
    """

    advice = "The server may be busy or unreachable; a longer timeout may help."
    default_message = "Request timed out."


class DeadlineError(APITimeoutError):
    """A call took longer than its deadline. The server may still finish it, but this client no longer waits.

    >>> error = DeadlineError("no result", request_id="req-1", waited_s=60.0, last_words="queue paused")
    >>> print(str(error)[:60])
    no result (request req-1) after 60 s; last heard: queue paus
    """

    advice = "Give a longer deadline, or look for the request at the server by its id."

    waited_s: float
    last_words: str

    def __init__(
        self,
        message: str | None = None,
        request: Any = None,
        *,
        request_id: str | None = None,
        method: str | None = None,
        path: str | None = None,
        attempts: int | None = None,
        waited_s: float = 0.0,
        last_words: str = "",
    ) -> None:
        super().__init__(message, request, request_id=request_id, method=method, path=path, attempts=attempts)
        self.waited_s = waited_s
        self.last_words = mask_text(last_words)

    def _whereabouts(self) -> str:
        heard = f"; last heard: {self.last_words}" if self.last_words else ""
        return f"{super()._whereabouts()} after {in_seconds(self.waited_s)}{heard}"


_LEAVES: Final[Mapping[int, type[APIStatusError]]] = {
    400: BadRequestError,
    401: AuthenticationError,
    402: BillingError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    422: UnprocessableEntityError,
    429: RateLimitError,
}


def status_error_class(status_code: int) -> type[APIStatusError]:
    """Return the error class for a status; `APIStatusError` for statuses without a subclass.

    >>> [status_error_class(s).__name__ for s in (402, 410, 503)]
    ['BillingError', 'APIStatusError', 'InternalServerError']
    """
    if status_code >= 500:
        return InternalServerError
    return _LEAVES.get(status_code, APIStatusError)


def _complete(
    response: Any, request: Any, request_id: str | None
) -> tuple[ResponseInfo | None, Any, str | None]:
    """Return the response as a `ResponseInfo`, the request, and its id.

    The response gives the request and the id if they are None.
    """
    record = ResponseInfo.of(response)
    if record is None:
        return None, request, request_id
    known = record.request if request is None else request
    return record, known, request_id or record.headers.get("x-request-id")


ErrorT = TypeVar("ErrorT", bound=BaseException)


def copy_exception(failure: ErrorT) -> ErrorT:
    """Return a copy of an exception for another future or thread, or the exception itself if copying fails.

    Each raise adds frames to the traceback of an exception. If several threads raised the same exception, its
    traceback would grow, and would keep the local variables of all of them alive.

    >>> first = KeyError("a")
    >>> second = copy_exception(first)
    >>> second is first, repr(second)
    (False, "KeyError('a')")
    """
    try:
        made = copy.copy(failure)
    except Exception:  # noqa: BLE001  # constructors of foreign exceptions may do anything
        return failure
    if type(made) is not type(failure):
        return failure
    made.__cause__ = failure.__cause__
    made.__context__ = failure.__context__
    made.__suppress_context__ = failure.__suppress_context__
    return made.with_traceback(None)
