"""The requests of a training client: encoded for `training_calls`, then numbered and sent.

A send queue passes each part to a `PartSender`, which makes a `Submission`. The poller sends the part, and
`Tries` decides about repetitions. When the server has accepted the part, the flow `polls.poll` waits for the
result. A large protobuf body that is not compressed consists of views of the user's arrays, also while it is
sent; no copy is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tinker_sync._base.clock import Clock
from tinker_sync._base.lazy import LazyModule
from tinker_sync._base.policy import proves_refusal
from tinker_sync.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    BillingError,
    ClientClosedError,
    DeadlineError,
    InvalidInputError,
    TinkerError,
)
from tinker_sync.runtime.billing import PAUSE_S
from tinker_sync.runtime.byte_budget import most_pass_bytes
from tinker_sync.runtime.calls import foreign_promise, make_call, read_promise
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.naming import current
from tinker_sync.runtime.operation import Ended, NotTaken, Operation, Unanswered
from tinker_sync.runtime.poller import QUICK_BYTES
from tinker_sync.runtime.polls import Decode, Promise
from tinker_sync.runtime.tickets import own_failure
from tinker_sync.transport.body import PiecedBody
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.types.training import ForwardBackwardInput, ForwardBackwardRequest, ForwardRequest
from tinker_sync.wire import json as wire_json
from tinker_sync.wire import zstd
from tinker_sync.wire.endpoints import ENDPOINTS, JSON, PROTOBUF
from tinker_sync.wire.proto._fields import varint
from tinker_sync.wire.proto._writer import Buffers

if TYPE_CHECKING:
    from tinker_sync.runtime.byte_budget import ByteBudget
    from tinker_sync.runtime.client_runtime import ClientRuntime
    from tinker_sync.runtime.server import Machinery
    from tinker_sync.transport.caller import Tries
    from tinker_sync.wire.dialect import Dialect
    from tinker_sync.wire.proto import requests
else:  # it needs numpy
    requests = LazyModule("tinker_sync.wire.proto.requests")

_SMALL_BYTES: Final = 64 * 1024
_SEQ_ID_TAG: Final = b"\x10"  # field 2, varint; a message may hold its fields in any order
# About eight small chunks are under way at once.
_LEAST_TRAIN_BYTES: Final = 2_000_000


class TrainingPart:
    """One request of a training call, encoded except for its number, which the send queue gives it.

    Args:
        future: ends with the result of the request.
        endpoint: the name of the endpoint.
        request_type: the server's name of the request, such as "ForwardBackward".
        encoded: returns the body with its number.
        decode: reads the result.
        settle: counts the tokens of the request, once. Called when the server accepts it after its future
            has failed, because its result is not read then. None: it uses no tokens.
        size: the size of a chunk in bytes; 0 for other requests, to which the limit on bytes does not apply.
        content_type: the type of the body.
        headers: further headers.
        deadline_at: the time of the clock at which to give up.
        made_at: the time of the clock at which the part is made.
    """

    __slots__ = (
        "_encoded",
        "content_type",
        "deadline_at",
        "decode",
        "endpoint",
        "future",
        "headers",
        "key",
        "made_at",
        "request_type",
        "sdk_method",
        "settle",
        "size",
        "unanswered",
    )

    def __init__(
        self,
        future: APIFuture[Any],
        endpoint: str,
        request_type: str,
        encoded: Callable[[int], bytes | PiecedBody],
        decode: Decode[Any],
        *,
        settle: Callable[[], object] | None = None,
        size: int,
        content_type: str,
        headers: Mapping[str, str] | None = None,
        deadline_at: float,
        made_at: float,
    ) -> None:
        self.future = future
        self.endpoint = endpoint
        self.request_type = request_type
        self._encoded: Callable[[int], bytes | PiecedBody] | None = encoded
        self.decode = decode
        self.settle = settle
        self.size = size
        self.content_type = content_type
        self.headers = headers or {}
        self.deadline_at = deadline_at
        self.made_at = made_at
        self.sdk_method = current()
        self.key: str | None = None
        """The idempotency key; None before the first send."""
        self.unanswered = False
        """True if the server may have the request since an earlier send, which failed."""

    def bytes_for(self, number: int) -> bytes | PiecedBody:
        """Return the body with its number. May be called once, because it drops the parts of the body."""
        encoded, self._encoded = self._encoded, None
        assert encoded is not None  # noqa: S101  # the queue asks once
        return encoded(number)

    def keep(self, body: bytes | PiecedBody) -> None:
        """Store a body, so that `bytes_for` can be called once more."""
        self._encoded = lambda _number: body

    def hold(self, number: int) -> None:
        """Keep a copy of the body until the request is sent again, at any later time.

        The arrays of the body belong to the user, who may change them once the future has failed.

        Raises:
            InvalidInputError: an array has changed since the first send.
            MemoryError: there is no memory for the copy.
        """
        body = self.bytes_for(number)
        self.keep(body if isinstance(body, bytes) else b"".join(body.to_send()))
        self.deadline_at = math.inf

    def forget_body(self) -> None:
        """Drop the body, because the server has it. The part itself may live until its result is there."""
        self._encoded = None


class PartSender:
    """A sender of the parts (requests) of one training client's calls. Thread-safe.

    Args:
        runtime: the runtime of the client. A call under way refers to it through this object, so the client
            lives until the call has ended.
    """

    def __init__(self, runtime: ClientRuntime) -> None:
        self._runtime = runtime
        self.server = runtime.server
        self.clock = runtime.clock

    def send(self, part: TrainingPart, number: int, ended: Ended) -> None:
        """Begin to send a part. `ended` gets None when the server has accepted it, else the failure.

        This runs on a worker or, for a small part, on the poller's thread. It may wait until the limit of
        bytes allows the part.

        After the failure `NotTaken`, the server does not have the part; after `Unanswered` it may have it,
        and the part can be sent again; after another one it may have it, and will not take it again.
        """
        Submission(self, part, ended).begin(number)

    def run(self, job: Callable[[], object]) -> None:
        """Run a job that sends a part, and the short steps that follow from it, on a worker.

        Raises:
            TinkerError: the client is closed, or the system starts no thread.
        """
        self._runtime.pools.send.run_call(partial(self.server.poller.run_step, job))

    def follow(self, part: TrainingPart, job: Callable[[], object]) -> bool:
        """Run a job that sends a small part on this thread, after the current step of the thread.

        Return False, and do not run the job, if the part is large, if sending it may block, or if this thread
        is in no step of the poller.
        """
        made = self.server.machinery.value
        quick = part.size <= QUICK_BYTES and made is not None and made.train_bytes.has_room
        return quick and self.server.poller.follow(job)

    def accept(self, part: TrainingPart, request_id: str) -> bool:
        """Mark a part as accepted by the server, unless the id is that of another call; see `Lifecycle`."""
        return self._runtime.lifecycle.accept(part.future, request_id)

    def end_in_turn(self, operation: Operation[TrainingPart]) -> None:
        """Let an operation fail at its deadline while it waits behind others."""
        deadline_at = operation.parts[0].deadline_at
        self._runtime.lifecycle.end_in_turn(operation.future, deadline_at, operation.name)

    def await_result(self, part: TrainingPart, request_id: str) -> None:
        """Poll for the result of a part that the server has accepted."""
        self.server.start().polls.fetch(
            Promise(
                request_id,
                part.request_type,
                wants_proto=ENDPOINTS[part.endpoint].result_as_protobuf,
                roundtrip_s=self.clock.now() - part.made_at,
                sdk_method=part.sdk_method,
                result_bytes=most_pass_bytes(part.size),
            ),
            part.future,
            part.decode,
            deadline_at=part.deadline_at,
        )


class Submission:
    """One part on its way to the server. It is sent until the server accepts it or `Tries` gives up.

    Its steps follow one another, so one thread at a time runs a step.
    """

    __slots__ = (
        *("_budget", "_call", "_ended", "_give_up_at", "_keeps_numbers", "_part", "_sender"),
        *("_taken_bytes", "_tries"),
    )

    _budget: ByteBudget
    _call: Call
    _tries: Tries

    def __init__(self, sender: PartSender, part: TrainingPart, ended: Ended) -> None:
        self._sender = sender
        self._part = part
        self._ended = ended
        self._taken_bytes = 0
        self._keeps_numbers = True

    def begin(self, number: int) -> None:
        """Wait until the limit of bytes allows the part, and send it for the first time."""
        try:
            self._prepare(number)
        except MemoryError as error:  # nothing was sent
            self._end(NotTaken(error))
        except BaseException as error:  # noqa: BLE001  # any failure must end the send
            self._end(error)
        else:
            self._try()

    def _prepare(self, number: int) -> None:
        sender, part = self._sender, self._part
        machinery = sender.server.ready()
        left_s = part.deadline_at - sender.clock.now()
        if left_s <= 0:
            raise _too_late(part, sender.clock)
        self._take_bytes(machinery, left_s)
        self._keeps_numbers = machinery.facts.dialect.keeps_numbers
        body = part.bytes_for(number)
        if part.unanswered:
            part.keep(body)  # whatever becomes of this send, the next one needs it
        part.key = part.key or sender.server.connection.caller.next_key()
        self._call = make_call(
            part.endpoint,
            sender.server.connection.settings,
            body=body,
            headers=part.headers,
            content_type=part.content_type,
            deadline_s=None if math.isinf(left_s) else left_s,
            dialect=machinery.facts.dialect,
            idempotency_key=part.key,
            sdk_method=part.sdk_method,
        )
        limit_s = sender.server.connection.settings.deadline_s
        self._give_up_at = part.deadline_at
        if math.isinf(left_s) and limit_s is not None:
            self._give_up_at = sender.clock.now() + limit_s
        self._tries = sender.server.connection.caller.tries(self._call)

    def _try(self) -> None:
        self._sender.server.poller.start(self._tries.next_try(), self._on_outcome)

    def _on_outcome(self, outcome: Reply | SendFailed) -> None:
        try:
            pause_s = self._after(outcome)
        except BaseException as error:  # noqa: BLE001  # as above
            self._end(error)
            return
        if pause_s is None:
            self._end(None)
        else:
            self._sender.server.poller.pause(pause_s, self._try)

    def _after(self, outcome: Reply | SendFailed) -> float | None:
        """Return the pause before the next try, or None if the server has accepted the part.

        Raise the failure of the part if no further try follows.
        """
        server, part = self._sender.server, self._part
        if isinstance(outcome, SendFailed) and (cause := own_failure(outcome)) is not None:
            raise self._tries.explained(cause)
        try:
            found = self._tries.after(outcome)
        except BillingError as error:
            if not server.may_wait_out_billing(self._give_up_at):
                raise
            if error.ambiguous:  # the new tries know nothing of the old ones
                self._part.unanswered = True
                assert self._call.body is not None  # noqa: S101
                self._part.keep(self._call.body)
            # The pause counts as time of the call.
            clock = self._sender.clock
            left_s = self._give_up_at - clock.now() - clock.shorten(PAUSE_S)
            self._call = self._call.but(deadline_s=None if math.isinf(left_s) else left_s)
            self._tries = server.connection.caller.tries(self._call)
            return PAUSE_S
        if not isinstance(found, Reply):
            return found
        try:
            request_id, _ = read_promise(part.endpoint, found, server.connection.secrets)
            if not self._sender.accept(part, request_id):
                raise foreign_promise(part.endpoint, found, request_id)
        except APIResponseValidationError as error:
            return self._tries.after_unreadable(error)
        self._give_back_bytes()
        part.forget_body()
        if part.settle is not None and part.future.failure is not None:
            part.settle()
        self._sender.await_result(part, request_id)
        return None

    def _end(self, failure: BaseException | None) -> None:
        self._give_back_bytes()
        if isinstance(failure, APIConnectionError):
            failure = self._sender.server.closed_or(failure)
        self._ended(self._fate(failure) if isinstance(failure, TinkerError) else failure)

    def _fate(self, error: TinkerError) -> BaseException:
        """Return what a failure says about the request: `NotTaken`, `Unanswered`, or the failure itself if
        the server may have the request, but will not take it again.
        """
        part = self._part
        status = error.status_code if isinstance(error, APIStatusError) else None
        refused = isinstance(error, APIStatusError) and proves_refusal(error.status_code, error.body)
        lost = part.unanswered or error.ambiguous
        if not lost and (refused or _was_not_sent(error)):
            return NotTaken(error)
        if isinstance(error, ClientClosedError):
            return error
        error.ambiguous = True
        if not self._keeps_numbers:
            return NotTaken(error)  # no number depends on it
        # The server has answered, so only the number is left to settle: a request without effect gets it.
        harmless = part.request_type in _HARMLESS and status in (409, 500)
        if harmless or (refused and status in _REFUSES_THE_BYTES):
            return NotTaken(error, used=True)
        if (refused and status in _DENIALS) or isinstance(error, InvalidInputError):
            return error
        if not part.unanswered:
            part.unanswered = True
            assert self._call.body is not None  # noqa: S101  # `lost`, so it was sent
            part.keep(self._call.body)
        return Unanswered(error)

    def _take_bytes(self, machinery: Machinery, left_s: float) -> None:
        size = self._part.size
        if not size:  # it is not a chunk, and does not wait for chunks
            return
        self._budget = machinery.train_bytes
        # Each chunk under way uses a connection, so small chunks count more than their size.
        taken = max(size, _LEAST_TRAIN_BYTES)
        if not self._budget.acquire(taken, None if math.isinf(left_s) else left_s):
            raise _too_late(self._part, self._sender.clock)
        self._taken_bytes = taken

    def _give_back_bytes(self) -> None:
        taken, self._taken_bytes = self._taken_bytes, 0
        if taken:
            self._budget.release(taken)


# The same bytes get the same answer. A server that had taken them before would know their number.
_REFUSES_THE_BYTES: Final = (400, 405, 413, 415, 422)
# The server has another request under the number, or no model.
_DENIALS: Final = (404, 409, 410)
_HARMLESS: Final = ("Forward", "SaveWeights", "SaveWeightsForSampler", "SaveWeightsExternal")
"""The server's names of requests that leave the model as it is."""


def _was_not_sent(error: TinkerError) -> bool:
    if isinstance(error, (APIStatusError, ClientClosedError)):
        return False
    # Of the other errors, only an APIError with a cause other than a failed send leaves this open.
    return not isinstance(error, APIError) or isinstance(error.__cause__, (SendFailed, type(None)))


def _too_late(part: TrainingPart, clock: Clock) -> DeadlineError:
    return DeadlineError(
        f"{part.endpoint} was not sent within the deadline",
        method="POST",
        path=ENDPOINTS[part.endpoint].path.text,
        waited_s=clock.now() - part.made_at,
        last_words="it waited for its turn",
    )


# ------------------------------------------------------------------------------------------ bodies


class EncodedPass(NamedTuple):
    """A request of a pass, encoded except for its number."""

    endpoint: str
    content_type: str
    headers: Mapping[str, str]
    with_number: Callable[[int], bytes | PiecedBody]


def encode_pass(
    given: ForwardBackwardInput, model_id: str, dialect: Dialect, *, forward_only: bool
) -> EncodedPass:
    """Encode a request of a pass: as protobuf if the server takes it for this kind of pass, else as JSON."""
    if dialect.protobuf and (dialect.forward_only or not forward_only):
        buffers = requests.encode_forward_backward_request(
            ForwardBackwardRequest(given, model_id), forward_only=forward_only
        )
        compressed = dialect.zstd and zstd.is_available()
        headers = {"Content-Encoding": "zstd"} if compressed else {}
        return EncodedPass("forward_backward", PROTOBUF, headers, partial(number_proto, buffers, compressed))
    kind: type[Any] = ForwardRequest if forward_only else ForwardBackwardRequest
    body = wire_json.encode(kind(given, model_id))
    return EncodedPass(
        "forward" if forward_only else "forward_backward", JSON, {}, partial(number_json, body)
    )


number_json: Final = wire_json.with_number
"""Return a JSON body with its number."""


def leave_unnumbered(body: bytes, _number: int) -> bytes:
    """Return the body of a request that takes no number."""
    return body


def number_proto(buffers: Buffers, compressed: bool, number: int) -> bytes | PiecedBody:
    """Return a protobuf body with its number.

    A small body becomes one piece, so that it is sent in one packet with the HTTP head.
    """
    pieces = [*buffers.pieces, _SEQ_ID_TAG, varint(number)]
    if compressed:
        body = PiecedBody(pieces)
        return zstd.compress(body, len(body))
    return b"".join(pieces) if buffers.size <= _SMALL_BYTES else PiecedBody(pieces)
