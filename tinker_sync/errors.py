"""The exceptions of the package: one class for each remedy that a user has, with attributes and advice.

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
      EarlierCallFailedError        it is unknown whether an earlier training call reached the server
      VerificationError             a saved checkpoint that may not restore correctly
      ClientClosedError             a call after `close`             (also a RuntimeError)
      MissingExtraError             an optional dependency is absent (also an ImportError)
      TokenizerError                the files of a tokenizer are not available
      TransferError                 a file could not be fetched or sent completely
        UnsafeArchiveError          an archive with unsafe content
      WireError                     data that does not decode, or does not fit the request
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from enum import Enum
from typing import ClassVar, Final, NoReturn

from tinker_sync._base.api_errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    BillingError,
    ConflictError,
    DeadlineError,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    TinkerError,
    UnprocessableEntityError,
    _rebuild,
    append_advice,
)
from tinker_sync._base.error_details import RequestInfo, ResponseInfo
from tinker_sync._base.secret import mask_text

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
    """A warning that a feature works now, but may change or be removed without notice.

    >>> import warnings
    >>> warnings.filterwarnings("ignore", category=ExperimentalWarning)
    """


class RequestErrorCategory(str, Enum):
    """The side that caused the failure of a request, as the server states it. Any other text is `Unknown`.

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
        return append_advice(statement, self._ADVICE[self.category])


class InvalidInputError(TinkerError, ValueError):
    """The arguments of a call are wrong, so the call was not sent. `problems` has a text for each mistake.

    If an array changes while its call is under way, a retry of the call fails with this error. The error is
    `ambiguous` if an earlier try may have reached the server.

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
    """Received data cannot be decoded, or does not fit the request. `path` is the position of the fault.

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
    """A tokenizer cannot be loaded; the message names what is missing, and where.

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

    A download keeps the part that has arrived, and the same call continues from there.

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
    """The server does not offer the requested feature.

    The call was not sent, or the server refused it, or the answer of the server lacks the feature.

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
    """The call was not sent, because it could cost more than is left of a budget.

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
        return append_advice(statement, "Make a new ServiceClient, and continue from the last checkpoint.")


class VerificationError(TinkerError):
    """A checkpoint was saved, but the server does not restore it correctly, or this cannot be verified.

    >>> print(VerificationError("tinker://run/weights/a restores the weights, but with a new optimizer"))
    tinker://run/weights/a restores the weights, but with a new optimizer
    """


class EarlierCallFailedError(TinkerError):
    """The call was not sent, because the server has not answered an earlier training call.

    The server executes the calls of a training client in the order of their sequence numbers, so nothing is
    sent while it is unknown whether it has an earlier one. Each later call first sends that one again, with
    the same bytes and the same number, and goes on once it is answered: the earlier call then counts as done
    once, though its future has failed. So do not repeat the earlier call; you may repeat this one.

    If the error is `final`, that does not help: the server has lost the model, say. `TrainingClient.recover`
    makes a new training client from the last state that the old client saved or started from; repeat the
    later steps.

    Attributes:
        call: the name of the earlier call.
        number: its sequence number; None if the calls of the parent process were under way at a fork.
        cause: the cause as text; `__cause__` has the exception itself.
        final: False if a later call of the same training client may succeed.

    >>> print(EarlierCallFailedError("optim_step", 7, "the key was refused").call)
    optim_step
    """

    call: str
    number: int | None
    cause: str
    final: bool

    def __init__(self, call: str, number: int | None, cause: str, *, final: bool = True) -> None:
        super().__init__(call, number, cause)
        self.call = call
        self.number = number
        self.cause = cause
        self.final = final

    def __str__(self) -> str:
        which = self.call if self.number is None else f"{self.call} (sequence number {self.number})"
        new_client = (
            "a new training client from the last checkpoint: training.recover(), or "
            "create_training_client_from_state_with_optimizer."
        )
        if self.final:
            return (
                f"not sent, because an earlier call of this training client failed: {which}: {self.cause}. "
                f"Continue with {new_client}"
            )
        return (
            f"not sent, because an earlier call of this training client is unanswered: {which}: {self.cause}."
            f" The next call sends that one again first. If that does not help, continue with {new_client}"
        )


class ClientClosedError(TinkerError, RuntimeError):
    """The client is closed; its calls under way fail, and new calls are refused.

    >>> isinstance(ClientClosedError(), RuntimeError)
    True
    """

    def __init__(self, message: str = "this client is closed; make a new one") -> None:
        super().__init__(message)


EXTRAS: Final = {
    "speed": ("orjson", "zstandard") if sys.version_info < (3, 14) else ("orjson",),
    "cli": ("click", "rich"),
    "chat": ("jinja2",),
    "progress": ("tqdm",),
    "torch": ("torch",),
    "notebook": ("pandas",),
    "ray": ("ray[data]",),
    "otel": ("opentelemetry-api",),
    "http2": ("h2", "hpack"),
}
"""The packages that each extra installs."""


def pip_names(names: Iterable[str]) -> str:
    """Return the names of packages for a `pip install` in a shell, some of which expand brackets.

    >>> pip_names(["click", "ray[data]"])
    "click 'ray[data]'"
    """
    return " ".join(f"'{name}'" if "[" in name else name for name in names)


class MissingExtraError(TinkerError, ImportError):
    """A feature needs an optional dependency that is not installed. The text names the packages.

    >>> print(MissingExtraError("chat", feature="the chat template"))
    the chat template needs a package that is not installed: pip install jinja2
    """

    extra: str
    feature: str | None

    def __init__(self, extra: str, *, feature: str | None = None, instead: str = "") -> None:
        self.extra = extra
        self.feature = feature
        what = f"{feature} needs a package" if feature else f"the extra {extra!r} has a package"
        otherwise = f", or {instead}" if instead else ""
        wanted = pip_names(EXTRAS.get(extra, ())) or f"'tinker-sync[{extra}]'"
        super().__init__(f"{what} that is not installed: pip install {wanted}{otherwise}")


def __getattr__(name: str) -> NoReturn:
    # Loaded for a name that is not here, because it is needed for an error only.
    from tinker_sync._base.left_out import words_on

    raise AttributeError(words_on(f"errors.{name}") or f"module {__name__!r} has no attribute {name!r}")


# Tracebacks, pickles and the reference name this module, which is the public path of all these classes.
for _public in (*(globals()[name] for name in __all__), _rebuild):
    _public.__module__ = __name__
