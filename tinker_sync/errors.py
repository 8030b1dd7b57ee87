"""The exceptions of the package: a table with a class for each remedy, its attributes and its advice.

Any module may import this one; it does not depend on sockets or codecs. Errors pickle and copy with all their
attributes. An error keeps small records of its request and response, without credentials, so it may be
logged, sent to another process or pasted into a report.

    TinkerError
      APIError                      a failure between client and server: request_id, method, path, attempts
        APIStatusError              a refusal by the server; a subclass for each status with its own remedy
        APIConnectionError          no answer; APITimeoutError after a silence, DeadlineError after the
                                    caller's own limit
        APIResponseValidationError  an answer of an unexpected form
      RequestFailedError            a request that was accepted and failed later
      InvalidInputError             arguments that cannot be sent    (also a ValueError)
      ConfigurationError            settings, variables, key file    (also a ValueError)
      CredentialError               no usable key or token
      UnsupportedByServerError      a feature that this server does not offer
      BudgetExceededError           the call could cost more than is left
      SessionLostError              the server has ended the session
      ClientClosedError             a call after `close`             (also a RuntimeError)
      MissingExtraError             an optional dependency is absent (also an ImportError)
      TokenizerError                the files of a tokenizer are not available
      TransferError                 a file could not be fetched or sent completely
        UnsafeArchiveError          an archive with unsafe content
      WireError                     bytes that do not decode
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, ClassVar, Final

from tinker_sync._clock import in_seconds
from tinker_sync._error_details import (
    RequestInfo,
    ResponseInfo,
    find_server_message,
    hint_wrong_server,
    name_status,
    read_body,
)
from tinker_sync._secret import Secret, mask_headers, mask_text

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIResponseValidationError",
    "APIStatusError",
    "APITimeoutError",
    "AuthenticationError",
    "BadRequestError",
    "BillingError",
    "BudgetExceededError",
    "ClientClosedError",
    "ConfigurationError",
    "ConflictError",
    "CredentialError",
    "DeadlineError",
    "EarlierCallFailedError",
    "ExperimentalWarning",
    "InternalServerError",
    "InvalidInputError",
    "JournalError",
    "MissingExtraError",
    "NotFoundError",
    "PermissionDeniedError",
    "RateLimitError",
    "RequestErrorCategory",
    "RequestFailedError",
    "RequestInfo",
    "ResponseInfo",
    "SessionLostError",
    "TinkerError",
    "TokenizerError",
    "TransferError",
    "UnprocessableEntityError",
    "UnsafeArchiveError",
    "UnsupportedByServerError",
    "VerificationError",
    "WireError",
]

_MAX_PROBLEMS: Final = 20


class ExperimentalWarning(FutureWarning):
    """The feature works now, but may change or be removed without notice.

    >>> import warnings
    >>> warnings.filterwarnings("ignore", category=ExperimentalWarning)
    """


class RequestErrorCategory(str, Enum):
    """The cause of a failed request, as the server states it. Unlisted texts are `Unknown`.

    >>> str(RequestErrorCategory("user")), RequestErrorCategory("something new")
    ('user', <RequestErrorCategory.Unknown: 'unknown'>)
    """

    Unknown = "unknown"
    Server = "server"
    User = "user"

    def __str__(self) -> str:
        return self.value

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)  # 3.10 and 3.12 disagree about the format of such enums

    @classmethod
    def _missing_(cls, value: object) -> RequestErrorCategory:  # noqa: ARG003 - the enum machinery gives it
        return cls.Unknown


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
    """True if the server may have executed the failed call, because the answer to a try was lost."""

    # Constructors differ, so copies are made from the attributes. This works for subclasses of users too.
    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args), {**self.__dict__}


_WORDS: Final = ("message", "reason", "cause")


def with_words(error: TinkerError, words: str) -> None:
    """Add words to the message of an error of any class.

    >>> error = RequestFailedError("out of memory", "req-1", "server")
    >>> with_words(error, "client created at script.py:12")
    >>> error.message
    'out of memory (client created at script.py:12)'
    """
    fields = vars(error)
    if isinstance(error, InvalidInputError):
        first, *others = error.problems
        error.problems = (f"{first} ({words})", *others)
        error.args = error.problems
        return
    old = next((fields[name] for name in _WORDS if isinstance(fields.get(name), str)), None)
    if old is None:
        old = str(error)
    new = f"{old.rstrip('.')} ({words})"
    fields.update({name: new for name in _WORDS if fields.get(name) == old})
    error.args = tuple(new if each == old else each for each in error.args)


class APIError(TinkerError):
    """A request to the server failed.

    Args:
        message: the cause, from the server's answer if it has a message.
        request: the request; any object with `method`, `url` and `headers`.
        body: the body of the answer: parsed JSON, else text, else None.
        request_id: the server's id of the request.
        method, path: taken from `request` unless given.
        attempts: the number of tries.

    >>> print(APIError("odd answer", method="GET", path="/api/v1/x", attempts=3))
    odd answer (GET /api/v1/x, 3 attempts)
    """

    advice: ClassVar[str] = ""

    message: str
    request: RequestInfo | None
    body: Any
    request_id: str | None
    method: str | None
    path: str | None
    attempts: int | None

    def __init__(
        self,
        message: str,
        request: Any = None,
        *,
        body: Any = None,
        request_id: str | None = None,
        method: str | None = None,
        path: str | None = None,
        attempts: int | None = None,
    ) -> None:
        # Messages often quote an HTTP library, and those quote addresses with passwords.
        self.message = mask_text(message)
        super().__init__(self.message)
        self.request = RequestInfo.of(request)
        self.body = body
        self.request_id = request_id
        self.method = method or (self.request.method if self.request else None)
        self.path = path or (self.request.path if self.request else None)
        self.attempts = attempts

    def __str__(self) -> str:
        return _sentence(self._headline() + self._whereabouts(), self._advice())

    def _headline(self) -> str:
        return self.message.rstrip(".")

    def _advice(self) -> str:
        return self.advice

    def _whereabouts(self) -> str:
        """Return the known facts as text, such as ` (POST /api/v1/x, request req-1, 3 attempts)`."""
        call = " ".join(part for part in (self.method, self.path) if part)
        known = [
            call,
            f"request {self.request_id}" if self.request_id else "",
            f"{self.attempts} attempts" if self.attempts and self.attempts > 1 else "",
        ]
        listed = ", ".join(part for part in known if part)
        return f" ({listed})" if listed else ""


def _sentence(statement: str, advice: str) -> str:
    if not advice:
        return statement
    return f"{statement.rstrip('.')}. {advice}"


class APIResponseValidationError(APIError):
    """The server's answer does not have the expected form.

    >>> print(APIResponseValidationError("$.model_id: missing", method="POST", path="/api/v1/create_model"))
    $.model_id: missing (POST /api/v1/create_model). The server may speak another version of the protocol.
    """

    advice = "The server may speak another version of the protocol."

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
        self.response = ResponseInfo.of(response)
        super().__init__(
            message or "The server's answer does not have the expected form.",
            request if request is not None or self.response is None else self.response.request,
            body=body,
            request_id=request_id or _id_header(self.response),
            method=method,
            path=path,
            attempts=attempts,
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
        self.response = ResponseInfo.of(response)
        super().__init__(
            message,
            request if request is not None or self.response is None else self.response.request,
            body=body,
            request_id=request_id or _id_header(self.response),
            method=method,
            path=path,
            attempts=attempts,
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
            retry_after_s: the pause that the server requested.
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
    """The server could not be reached, or the connection broke before its answer.

    >>> print(APIConnectionError(method="GET", path="/api/v1/x"))
    Connection error (GET /api/v1/x). Check the network, any proxy, and the base URL.
    """

    advice = "Check the network, any proxy, and the base URL."
    default_message: ClassVar[str] = "Connection error."

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
        super().__init__(
            message or self.default_message,
            request,
            body=body,
            request_id=request_id,
            method=method,
            path=path,
            attempts=attempts,
        )


class APITimeoutError(APIConnectionError):
    """The server sent nothing for longer than the timeout.

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


class RequestFailedError(TinkerError):
    """The server accepted the request and later reported its failure.

    >>> print(RequestFailedError("tokens out of range", request_id="req-1", category="user"))
    tokens out of range (request req-1, user). Change the input; the same request will fail again.
    """

    _ADVICE: ClassVar[dict[RequestErrorCategory, str]] = {
        RequestErrorCategory.User: "Change the input; the same request will fail again.",
        RequestErrorCategory.Server: "This is the server's fault; try again later.",
        RequestErrorCategory.Unknown: "",
    }

    message: str
    request_id: str
    category: RequestErrorCategory

    def __init__(self, message: str, request_id: str, category: RequestErrorCategory | str) -> None:
        self.message = mask_text(message)
        super().__init__(self.message)
        self.request_id = request_id
        self.category = RequestErrorCategory(category)

    def __str__(self) -> str:
        statement = f"{self.message.rstrip('.')} (request {self.request_id}, {self.category})"
        return _sentence(statement, self._ADVICE[self.category])


class InvalidInputError(TinkerError, ValueError):
    """The arguments cannot be sent; nothing was sent. `problems` has a text for each fault.

    >>> print(InvalidInputError("data[0].loss_fn_inputs['weights'][3]: nan is not finite"))
    data[0].loss_fn_inputs['weights'][3]: nan is not finite
    >>> print(InvalidInputError(["top_p: 2 is above 1", "max_tokens: -1 is negative"]))
    2 problems:
      top_p: 2 is above 1
      max_tokens: -1 is negative
    """

    problems: tuple[str, ...]

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__(*self.problems)

    def __str__(self) -> str:
        if len(self.problems) <= 1:
            return "".join(self.problems)
        lines = [f"  {problem}" for problem in self.problems[:_MAX_PROBLEMS]]
        hidden = len(self.problems) - len(lines)
        if hidden:
            lines.append(f"  ... and {hidden} more")
        return "\n".join([f"{len(self.problems)} problems:", *lines])


class WireError(TinkerError):
    """Received bytes cannot be decoded. `path` is the place, such as `$.sequences[2].stop_reason`.

    >>> print(WireError("not one of 'stop', 'length'", path="$.sequences[2].stop_reason"))
    $.sequences[2].stop_reason: not one of 'stop', 'length'
    """

    message: str
    path: str

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigurationError(TinkerError, ValueError):
    """A setting, an environment variable or the credentials file cannot be used as it is."""


class CredentialError(TinkerError):
    """There is no usable key or token: none is set, the command failed, or no new token is available."""


class TokenizerError(TinkerError):
    """A tokenizer cannot be loaded; the message names the missing files and their place.

    >>> TokenizerError("the directory /models/mine does not exist", "/models/mine").tokenizer_id
    '/models/mine'
    """

    message: str
    tokenizer_id: str | None

    def __init__(self, message: str, tokenizer_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.tokenizer_id = tokenizer_id


class TransferError(TinkerError):
    """A file of a checkpoint could not be fetched or sent completely.

    The part that has arrived is kept, and the same call continues from there.

    >>> print(TransferError("the disk has 5 bytes left and needs 70"))
    the disk has 5 bytes left and needs 70
    """

    message: str

    def __init__(self, message: str) -> None:
        self.message = mask_text(message)
        super().__init__(self.message)


class UnsafeArchiveError(TransferError):
    """An archive has an unsafe entry; no part of the archive is left on the disk.

    Attributes:
        entry: the name of the unsafe entry in the archive.

    >>> print(UnsafeArchiveError("it leads upwards", "../../.profile"))
    the archive is not unpacked: '../../.profile': it leads upwards
    """

    entry: str

    def __init__(self, message: str, entry: str) -> None:
        self.entry = mask_text(entry)
        super().__init__(message)
        self.args = (message, entry)

    def __str__(self) -> str:
        return f"the archive is not unpacked: {self.entry!r}: {self.message}"


class UnsupportedByServerError(TinkerError):
    """The server does not offer the requested feature; nothing was sent.

    >>> print(UnsupportedByServerError("this server knows no custom losses", feature="create_custom_loss"))
    this server knows no custom losses
    """

    message: str
    feature: str | None

    def __init__(self, message: str, *, feature: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.feature = feature


class BudgetExceededError(TinkerError):
    """The call was not sent, because it could exceed the rest of a budget.

    >>> error = BudgetExceededError("this call could cost up to $2", limit=20.0, spent=19.0, unit="usd")
    >>> error.limit - error.spent
    1.0
    """

    limit: float
    spent: float
    unit: str

    def __init__(self, message: str, *, limit: float, spent: float, unit: str) -> None:
        super().__init__(message)
        self.limit = limit
        self.spent = spent
        self.unit = unit


class SessionLostError(TinkerError):
    """The server no longer has the session, so the clients made in it can no longer be used.

    Attributes:
        session_id: the id of the session.
        reason: the server's answer to the heartbeat, as text; `__cause__` has the error itself.

    >>> print(SessionLostError("session-1", "410 Gone"))
    the server no longer keeps session session-1: 410 Gone. Make a new ServiceClient, and continue from the \
last checkpoint.
    """

    session_id: str
    reason: str

    def __init__(self, session_id: str, reason: str) -> None:
        self.session_id = session_id
        self.reason = mask_text(reason)
        super().__init__(session_id, self.reason)

    def __str__(self) -> str:
        statement = f"the server no longer keeps session {self.session_id}: {self.reason}"
        return _sentence(statement, "Make a new ServiceClient, and continue from the last checkpoint.")


class JournalError(TinkerError):
    """A journal cannot be used, or does not match the calls of the script; those calls were not sent.

    >>> print(JournalError("another process uses the journal run.journal"))
    another process uses the journal run.journal
    """


class VerificationError(TinkerError):
    """A checkpoint was saved, but the server does not restore it correctly, or this cannot be verified.

    >>> print(VerificationError("tinker://run/weights/a restores the weights, but with a new optimizer"))
    tinker://run/weights/a restores the weights, but with a new optimizer
    """


class EarlierCallFailedError(TinkerError):
    """The call was not sent, because an earlier call of this training client may or may not be at the server.

    The server executes the calls of a training client in the order of their numbers. If it is unknown whether
    a number is used, the next number is unknown too. `TrainingClient.recover` makes a new training client
    from the last checkpoint that this one saved; repeat the steps since then.

    Attributes:
        call: the name of the call that failed.
        number: its sequence number; None if the queue failed without one.
        cause: the cause as text; `__cause__` has the exception itself.

    >>> print(EarlierCallFailedError("optim_step", 7, "the key was refused").call)
    optim_step
    """

    call: str
    number: int | None
    cause: str

    def __init__(self, call: str, number: int | None, cause: str) -> None:
        super().__init__(call, number, cause)
        self.call = call
        self.number = number
        self.cause = cause

    def __str__(self) -> str:
        which = self.call if self.number is None else f"{self.call} (sequence number {self.number})"
        return (
            f"not sent, because an earlier call of this training client failed: {which}: {self.cause}. "
            "Continue with a new training client from the last checkpoint: training.recover(), or "
            "create_training_client_from_state_with_optimizer."
        )


class ClientClosedError(TinkerError, RuntimeError):
    """The client is closed; its calls under way fail, and new calls are refused.

    >>> isinstance(ClientClosedError(), RuntimeError)
    True
    """

    def __init__(self, message: str = "this client is closed; make a new one") -> None:
        super().__init__(message)


class MissingExtraError(TinkerError, ImportError):
    """A feature needs an optional dependency that is not installed.

    >>> print(MissingExtraError("speed", feature="zstd request bodies"))
    zstd request bodies: not installed. pip install 'tinker-sync[speed]'
    """

    extra: str
    feature: str | None

    def __init__(self, extra: str, *, feature: str | None = None, instead: str = "") -> None:
        self.extra = extra
        self.feature = feature
        what = f"{feature}: not installed." if feature else f"The extra {extra!r} is not installed."
        otherwise = f", or {instead}" if instead else ""
        super().__init__(f"{what} pip install 'tinker-sync[{extra}]'{otherwise}")


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


def _id_header(response: ResponseInfo | None) -> str | None:
    return response.headers.get("x-request-id") if response is not None else None
