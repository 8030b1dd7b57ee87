"""Every exception of the package, sorted by what the reader of it can do.

Any module may import this one; it knows nothing of sockets or codecs. Every error pickles and copies with all
its attributes. What an error keeps of a request and its answer is held in small records without credentials,
so it may be logged, sent to another process or pasted into a report.

    TinkerError
      APIError                      something between us and the server: request_id, method, path, attempts
        APIStatusError              the server said no; a leaf for each status people react to differently
        APIConnectionError          no answer; APITimeoutError when it was silence, DeadlineError when
                                    the caller's own limit was over
        APIResponseValidationError  an answer that does not make sense
      RequestFailedError            accepted first, failed later
      InvalidInputError             cannot be sent as given          (also a ValueError)
      ConfigurationError            settings, variables, key file    (also a ValueError)
      CredentialError               no usable key or token
      UnsupportedByServerError      this server cannot do that
      BudgetExceededError           the call could cost more than is left
      SessionLostError              the server has given up the session
      ClientClosedError             used after `close`               (also a RuntimeError)
      MissingExtraError             an optional dependency is absent (also an ImportError)
      TokenizerError                the files of a tokenizer are not to be had
      TransferError                 a file could not be fetched or sent to its end
        UnsafeArchiveError          an archive that is not unpacked
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
    "WireError",
]

_MAX_PROBLEMS: Final = 20


class ExperimentalWarning(FutureWarning):
    """The feature works today and may change or go without notice.

    >>> import warnings
    >>> warnings.filterwarnings("ignore", category=ExperimentalWarning)
    """


class RequestErrorCategory(str, Enum):
    """Whose fault a failed request was, as the server sees it. Any text the list does not know is `Unknown`.

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
    """Everything this package raises on purpose is one of these.

    >>> try:
    ...     raise RequestFailedError("out of memory", "req-1", "server")
    ... except TinkerError as error:
    ...     print(error)
    out of memory (request req-1, server). This is the server's fault; try again later.
    """

    ambiguous = False
    """The call that failed may have been carried out: the answer to a try of it was lost."""

    # Constructors differ; recreating from the attributes serves them all, and subclasses of users too.
    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args), {**self.__dict__}


_WORDS: Final = ("message", "reason", "cause")


def with_words(error: TinkerError, words: str) -> None:
    """Add words to the text of an error, whatever its class.

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
    """Something went wrong between this program and the server.

    Args:
        message: What happened, in the server's words where it had some.
        request: The request; anything with `method`, `url` and `headers`.
        body: The answer's body: parsed JSON, else text, else None.
        request_id: The id the server gave the request.
        method, path: Taken from `request` unless given.
        attempts: How many times it was tried.

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
        # Messages often quote a library below us, and those quote addresses with passwords.
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
        """`(POST /api/v1/x, request req-1, 3 attempts)`, as far as known."""
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
    """The server answered, and the answer does not make sense.

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
    """The server answered with a status that means no.

    The leaves differ by what helps: `BadRequestError` and `UnprocessableEntityError` (mend the input),
    `AuthenticationError` and `PermissionDeniedError` (the key), `BillingError` (the account),
    `NotFoundError`, `ConflictError`, `RateLimitError` (wait), `InternalServerError` (later, or report).
    408, 410, 425 and other 4xx have none.

    `message` holds the server's words, `body` the parsed JSON or else the text, `retry_after_s` the pause the
    server asked for.

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
        # The leaves carry their status as a class attribute; only the open-ended classes must be told.
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
        """Make the error that fits an answer: the leaf by its status, the words from its body.

        Args:
            status_code: The HTTP status.
            headers: The answer's headers.
            content: The answer's body, undone of any content encoding.
            request: The request; anything with `method`, `url` and `headers`.
            request_id: The id the server gave the request; default the answer's `X-Request-Id`.
            method, path: Taken from `request` unless given.
            attempts: How many times it was tried.
            retry_after_s: The pause the server asked for.
            secrets: Values that must not appear in the error, should the server repeat them.
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
        if not self.status_code:  # made by hand, without an answer
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
    """400: the server refuses the request as it is."""

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
    """403: the key is good, but not for this."""

    status_code = 403
    advice = "The key may not do this; check its organization and project, and who owns the object."


class NotFoundError(APIStatusError):
    """404: there is no such object, or this server has no such call."""

    status_code = 404
    advice = "Check the id or path; the object may have expired, or the server may not offer this call."


class ConflictError(APIStatusError):
    """409: the object is in another state than the request assumes.

    Where it is `ambiguous`, an earlier try of this call may have brought the object into that state.
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
    """429: too much at once. `retry_after_s` says how long to wait, where the server told."""

    status_code = 429
    advice = "Send less at a time, or wait before repeating."


class InternalServerError(APIStatusError):
    """500 and above: the server or something before it failed."""

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
    """The server stayed silent for longer than the timeout allows.

    >>> APITimeoutError().message
    'Request timed out.'
    """

    advice = "The server may be busy or unreachable; a longer timeout may help."
    default_message = "Request timed out."


class DeadlineError(APITimeoutError):
    """A call took longer than its deadline. The server may still finish it; this client no longer waits.

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
    """The server took the request and later reported that it failed.

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
    """What the user gave cannot be sent; nothing was. `problems` lists all that is wrong, one text each.

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
    """Bytes from the other side do not decode. `path` says where, such as `$.sequences[2].stop_reason`.

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
    """There is no usable key or token: none configured, the command failed, or no new token is to be had."""


class TokenizerError(TinkerError):
    """A tokenizer cannot be loaded; the text says which files are missing and where to put them.

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
    """A file of a checkpoint could not be fetched or sent to its end. What has arrived is kept, and the same
    call goes on from there.

    >>> print(TransferError("the disk has 5 bytes left and needs 70"))
    the disk has 5 bytes left and needs 70
    """

    message: str

    def __init__(self, message: str) -> None:
        self.message = mask_text(message)
        super().__init__(self.message)


class UnsafeArchiveError(TransferError):
    """An archive holds something that must not be unpacked; nothing of it was left on the disk.

    Attributes:
        entry: the entry that is to blame, as the archive names it.

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
    """The server at this address does not offer what was asked; nothing was sent.

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
    """The call was not sent, because it could take more than what is left of a budget.

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
    """The server no longer keeps the session, so what was made in it can be used no more.

    Attributes:
        session_id: the session.
        reason: what the server said to its heartbeat; `__cause__` has the error itself.

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
    """A journal cannot be used, or does not fit the calls that a script makes; those calls were not sent.

    >>> print(JournalError("another process uses the journal run.journal"))
    another process uses the journal run.journal
    """


class EarlierCallFailedError(TinkerError):
    """It is not known whether the server has an earlier call of this training client, so this one was not
    sent.

    The server runs the calls of a training client in the order of their numbers. After a call that may or may
    not have used its number, no later number is right. `TrainingClient.recover` makes a new training client
    from the last checkpoint that this one saved; repeat the steps since then.

    Attributes:
        call: the name of the call that failed.
        number: its sequence number; None when the queue broke without one.
        cause: what went wrong, in words; `__cause__` has the exception itself.

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
    """The client was closed: what it had under way fails, and there is nothing more to be had from it.

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
    """Give the leaf for a status; `APIStatusError` itself where there is none.

    >>> [status_error_class(s).__name__ for s in (402, 410, 503)]
    ['BillingError', 'APIStatusError', 'InternalServerError']
    """
    if status_code >= 500:
        return InternalServerError
    return _LEAVES.get(status_code, APIStatusError)


def _id_header(response: ResponseInfo | None) -> str | None:
    return response.headers.get("x-request-id") if response is not None else None
