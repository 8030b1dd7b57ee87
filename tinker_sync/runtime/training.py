"""The calls of a training client: checked, split, encoded, queued, and sent.

The life of a call, in the order in which it happens:

- Its constructor checks it, on the user's thread, and refuses a request that no server accepts.
- `prepare` splits the data and encodes the requests, as `TrainingRequest`s. It raises the errors that depend
  on the server's settings. It runs in the call itself if the model exists; otherwise the call is held, and
  one worker prepares all held calls in order when the model exists.
- The send queue gives each request its number when the turn of its entry comes, and runs the flow `submit`.
- `submit` waits until the limits of bytes allow the request, and sends it until the server has accepted it.
  Then the flow `polls.poll` waits for the result. While the server is to accept a large request, the next one
  is on the line.

A large protobuf body that is not compressed consists of views of the user's arrays, also while it is sent; no
copy is made.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from attrs import define, field

from tinker_sync._base import fork as _fork
from tinker_sync._base.clock import Clock
from tinker_sync._base.events import CostEstimate, Limiter, RequestEncoded, TokensUsed
from tinker_sync._base.lazy import LazyModule
from tinker_sync._base.naming import current, find_call_site, named
from tinker_sync._base.policy import BLOCKED_PAUSE_S, proves_refusal
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
    UnsupportedByServerError,
)
from tinker_sync.runtime.answers import (
    ExpectedOutputs,
    decode_pass,
    merge_pass,
    read_pass,
    read_result,
    read_settled,
    read_with_loss,
    weights_of,
)
from tinker_sync.runtime.calls import foreign_promise, make_call, read_promise
from tinker_sync.runtime.flows import Flow, Flows, Quota
from tinker_sync.runtime.futures import APIFuture, CombinedFuture, Unread, log_if_unread
from tinker_sync.runtime.lazy import HeldCalls
from tinker_sync.runtime.polls import Decode, Promise
from tinker_sync.runtime.raw import NO_EXTRA, Extra, plain_result
from tinker_sync.runtime.reactor import QUICK_BYTES, own_failure
from tinker_sync.runtime.send_queue import Entry, NotTaken, SendQueue, Unanswered
from tinker_sync.runtime.spending import Reservation, length_of
from tinker_sync.runtime.workers import no_thread
from tinker_sync.transport.body import PiecedBody
from tinker_sync.transport.call import ANSWER_BYTES, Call, Reply, SendFailed
from tinker_sync.types.datum import Datum, count_trained
from tinker_sync.types.model import UnloadModelRequest, UnloadModelResponse
from tinker_sync.types.model_input import ModelInput
from tinker_sync.types.training import (
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
)
from tinker_sync.types.weights import LoadWeightsRequest
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.adapt import (
    fit,
    json_body,
)
from tinker_sync.wire.endpoints import ENDPOINTS, JSON, PROTOBUF, row_of
from tinker_sync.wire.proto.codec import Buffers, varint

if TYPE_CHECKING:
    from tinker_sync.runtime.client import ClientRuntime
    from tinker_sync.runtime.server import Machinery
    from tinker_sync.transport.uplink import Uplink
    from tinker_sync.types.weights import SaveWeightsResponse
    from tinker_sync.wire.dialect import Dialect
    from tinker_sync.wire.proto import requests
else:  # it needs numpy
    requests = LazyModule("tinker_sync.wire.proto.requests")

_CURVE_POINTS: Final = 10_000
# About eight small chunks are under way at once: each uses a connection, so it counts more than its size.
_LEAST_TRAIN_BYTES: Final = 2_000_000
_SMALL_BYTES: Final = 64 * 1024
_TOKEN_BYTES: Final = 4  # of an input, as int32
# A pass gives a few numbers for each token. In a request the token takes 12 bytes and more.
_RESULT_FACTOR: Final = 64
_SEQ_ID_TAG: Final = b"\x10"  # field 2, varint; a message may hold its fields in any order
_UNLOAD: Final = "unload_model"

Entries = Sequence["Entry[TrainingRequest]"]


class TrainingLine:
    """The calls of one training client: held until its model exists, then queued. Thread-safe."""

    def __init__(self, runtime: ClientRuntime) -> None:
        self.runtime = runtime
        # Weak: the line holds the queue, and a cycle would keep a dropped client until a garbage collection.
        # A call under way keeps the runtime.
        self.queue: SendQueue[TrainingRequest] = SendQueue(
            runtime.server.flows,
            partial(submit, runtime),
            partial(_make_filler, weakref.ref(self)),
            runtime.pools.send,
            waits=partial(_end_in_turn, runtime),
        )
        self.held = HeldCalls(runtime.pools.enter)
        self.model_id = ""
        """The id of the model; empty until the model exists. Set once."""
        self.curve: deque[tuple[float, float]] = deque(maxlen=_CURVE_POINTS)
        """The moment and the loss of the last passes that accumulate gradients and have succeeded."""
        self._steps = 0
        self._failed_passes: deque[Unread] = deque()
        self.last_state: LoadWeightsRequest | None = None
        """The request that loads the last saved state, else the state the model was made from, else None."""
        self.unloaded = False
        """True once the client has made the call that unloads the model; False again if the server has no
        such call."""
        runtime.lifecycle.register_last_call(self)
        _fork.renew_in_child(self)

    def renew_after_fork(self) -> None:
        """Refuse calls in a forked child until `take_over`, and leave those of the parent to the parent."""
        self.queue.renew_after_fork()
        self.held.renew_after_fork()

    def note_saved(self, read: Callable[..., SaveWeightsResponse], *answer: Any) -> SaveWeightsResponse:
        """Read the result of a save, store its path for `TrainingClient.recover`, then return the result."""
        saved = read(*answer)
        self.last_state = LoadWeightsRequest(path=saved.path, optimizer=True)
        return saved

    def submit(self, call: TrainingCall) -> APIFuture[Any]:
        """Put a call into the send queue, or hold it until the model exists. Return its future at once.

        Raises:
            TinkerError: the client is closed; or, if the model exists, the server does not support the call
                or a budget refuses it. Nothing was sent.
        """
        self.runtime.lifecycle.refuse_if_leaving()
        if call.name == "optim_step":
            self._report_passes()
        if self.held.open:
            future = self.submit_first(call)
        else:
            future = call.wait_for_model(self.runtime.spending.limiters)
            self.runtime.lifecycle.end_in_turn(future, call.deadline_at, call.name)
            self.held.hold(call)
        # Only after the call is queued: if Ctrl-C prevents that, its future never ends.
        if call.lasting:
            self.runtime.lifecycle.note_change(future)
        log_if_unread(future, find_call_site())
        if call.name.startswith("forward_backward"):
            future._when_done(partial(TrainingLine._note_pass, self, self._steps))
        return future

    def _note_pass(self, steps: int, passed: APIFuture[Any]) -> None:
        """Store the loss of a pass that has ended, or keep its unread failure.

        The next optimizer step logs the failure. If that step has been called already, log the failure now.

        Args:
            steps: the number of optimizer steps that were called before the pass.
        """
        if passed.failure is None and not passed.cancelled():
            metrics = passed._get().metrics
            loss = metrics.get("loss:mean", metrics.get("loss:sum"))
            if loss is not None:
                self.curve.append((self.runtime.clock.now(), loss))
        unread = passed._overlooked
        if unread is None:
            return
        if self._steps > steps:
            unread.log()
        else:
            self._failed_passes.append(unread)

    def _report_passes(self) -> None:
        """Count an optimizer step. Log the unread failures of passes: the step lacks their gradients."""
        self._steps += 1
        while self._failed_passes:
            self._failed_passes.popleft().log()

    def submit_first(self, call: TrainingCall) -> APIFuture[Any]:
        """Put a call into the send queue now, ahead of the calls that are held. Return its future.

        Raises:
            TinkerError: the server does not support the call, a budget refuses it, the client is closed, or
                the system starts no thread for it; nothing was sent.
        """
        self.enter(call.prepare())
        return call.future

    def enter(self, entries: Entries) -> None:
        """Put the prepared entries of a call into the queue.

        Raises:
            TinkerError: the client is closed, or no thread can queue them. The future of the call fails too.
        """
        try:
            # The future refers to the queue until the call ends, and so keeps the client alive.
            self.queue.put(*entries)
        except RuntimeError as error:
            failure = ClientClosedError() if self.runtime.lifecycle.closed else no_thread(error)
            for entry in entries:
                entry.fail(failure)  # so the queue passes over it
            raise failure from error

    # ---------------------------------------------------- the place of the model in the server's memory

    def unload(self, deadline_at: float) -> APIFuture[UnloadModelResponse]:
        """Unload the model, after all calls made before, and refuse later calls of the client."""
        call = UnloadCall(
            self, _UNLOAD, UnloadModelRequest(model_id=self.model_id), UnloadModelResponse, deadline_at
        )
        self.unloaded = True
        return self.submit(call)

    def refuse_unloaded(self) -> None:
        """Raise if the client has begun to unload the model.

        Raises:
            ClientClosedError: the model is unloaded, or its unloading has begun.
        """
        if self.unloaded:
            raise ClientClosedError("the model of this training client was unloaded; make a new one")

    def last_call(self) -> Call | None:
        """Return the call that unloads the model when the client closes, or None if no call is needed.

        Servers that finish sessions free the memory themselves. Open servers hold few models in memory, and
        unload them minutes after the last heartbeat.
        """
        made = self.runtime.server.machinery.value
        if not self.model_id or self.unloaded or made is None:
            return None
        dialect = made.facts.dialect
        if dialect.offers("finish_session"):
            return None
        request = UnloadModelRequest(model_id=self.model_id)
        call = make_call(_UNLOAD, self.runtime.settings, request, dialect=dialect)
        return call.but(max_retries=0, patient=False)


def _make_filler(line_ref: weakref.ref[TrainingLine]) -> TrainingRequest | None:
    """Return a forward pass over one token, which has no effect, for the unused number of a refused request.

    Servers that process requests in the order of their numbers hold back the requests after a missing number;
    return None for others, and without a client, because no call follows then.

    Raises:
        TinkerError: the server has no forward passes.
    """
    line = line_ref()
    if line is None or not line.runtime.server.ready().facts.dialect.keeps_numbers:
        return None
    token = Datum(ModelInput.from_ints([0]), {"target_tokens": [0], "weights": [0.0]})
    whole = ForwardBackwardInput([token], "cross_entropy")
    call = PassCall(line, "forward", whole, math.inf, forward_only=True)
    call.wait_for_model(())  # no budget may refuse it
    (forward,) = call.prepare()
    (request,) = forward.requests
    request.future.cancel()  # nobody needs the result
    return request


def _end_in_turn(runtime: ClientRuntime, entry: Entry[TrainingRequest]) -> None:
    """Let an entry fail at its deadline while it waits behind others."""
    runtime.lifecycle.end_in_turn(entry.future, entry.requests[0].deadline_at, entry.name)


class TrainingCall(ABC):
    """One call of a training client. For one thread at a time.

    Args:
        line: the `TrainingLine` of the client.
        name: the name of the call, for errors.
        deadline_at: the time of the clock at which to give up.
    """

    def __init__(self, line: TrainingLine, name: str, deadline_at: float) -> None:
        self.line = line
        self.name = name
        self.deadline_at = deadline_at
        self.sdk_method = current()
        self._limiters: tuple[Limiter, ...] | None = None
        self._future: APIFuture[Any] | None = None

    @property
    def future(self) -> APIFuture[Any]:
        """The user's future, which exists once the call is prepared or waits for its model."""
        assert self._future is not None  # noqa: S101  # made when the call is prepared, at the latest
        return self._future

    @property
    def lasting(self) -> bool:
        """True if the call has a lasting effect, so that the end of the client waits for it."""
        return False

    @abstractmethod
    def wait_for_model(self, limiters: tuple[Limiter, ...]) -> APIFuture[Any]:
        """Make and return the future of a call that waits for its model.

        Args:
            limiters: the limits in force now; `prepare` asks them later.
        """

    @abstractmethod
    def prepare(self) -> Entries:
        """Return the entries for the queue: one and, for some calls, a second one behind it, whose
        requests are not known yet.

        Raises:
            TinkerError: the server does not support the call, or a budget refuses it.
        """

    def start(self) -> None:
        """Prepare and queue a call that was held. If that fails, fail its future; the call uses no number."""
        future = self.future
        if future.done():
            return
        try:
            with named(self.sdk_method):
                entries = self.prepare()
        except Exception as failure:  # noqa: BLE001  # the future raises it
            future.fail(failure)
            return
        try:
            self.line.enter(entries)
        except Exception as failure:  # noqa: BLE001  # closed meanwhile
            future.fail(failure)

    def fail(self, failure: Exception) -> None:
        """Fail the future of a call that was held."""
        self.future.fail(failure)


class OrderedCall(TrainingCall):
    """A call of one request with a JSON body and a JSON result, such as `optim_step` or `save_weights`.

    Args:
        line, deadline_at: as in `TrainingCall`.
        endpoint: the name of the endpoint.
        request: the request without its number, and without the model's id if that is not known yet.
        kind: the type of the result.
        extra: what the user adds to the request.
    """

    numbered = True
    """False for the last call of a model, whose body takes no number."""

    def __init__(
        self,
        line: TrainingLine,
        endpoint: str,
        request: Any,
        kind: type[Any],
        deadline_at: float,
        extra: Extra = NO_EXTRA,
    ) -> None:
        super().__init__(line, endpoint, deadline_at)
        self._request = request
        self._kind = kind
        self._extra = extra

    def wait_for_model(self, limiters: tuple[Limiter, ...]) -> APIFuture[Any]:
        del limiters  # it uses no tokens
        self._future = future = self.line.runtime.lifecycle.make_future(self.line)
        return future

    @property
    def lasting(self) -> bool:
        # Weights without a name last only as long as the session.
        named = self.name.startswith("save_") and self._request.path is not None
        return named or self.name == "optim_step"

    def prepare(self) -> Entries:
        runtime = self.line.runtime
        dialect = runtime.server.ready().facts.dialect
        body, decode = self._encode(dialect)
        future = self._future or self.wait_for_model(())
        sent = TrainingRequest(
            future,
            self.name,
            row_of(self.name).promises or self.name,
            partial(number_json if self.numbered else leave_unnumbered, self._extra.applied(body)),
            decode,
            size=0,
            content_type=JSON,
            headers=self._extra.headers,
            deadline_at=self.deadline_at,
            made_at=runtime.clock.now(),
        )
        return [Entry(self.name, [sent], future, alone=dialect.one_by_one)]

    def _encode(self, dialect: Dialect) -> tuple[bytes, Decode[Any]]:
        """Return the body without its number, and the function that reads the result."""
        request, name, model_id = self._request, self.name, self.line.model_id
        if request.model_id != model_id:
            request = request.model_copy(update={"model_id": model_id})
        request = fit(request, dialect, call=name)
        self.line.runtime.server.published.check_fields(name, request, dialect)
        read = partial(read_result, name, model_id, self._kind)
        decode = partial(self.line.note_saved, read) if name == "save_weights" else read
        return json_body(request, dialect), decode


class RawCall(OrderedCall):
    """A call of a route that the user names. Its result is the parsed JSON.

    Args:
        line, deadline_at, extra: as in `OrderedCall`.
        name: the name of the row, by `endpoints.raw_name`.
        body: the fields of the body, without its number; the model's id is added.
    """

    def __init__(
        self, line: TrainingLine, name: str, body: Mapping[str, Any], deadline_at: float, extra: Extra
    ) -> None:
        super().__init__(line, name, body, dict, deadline_at, extra)

    @property
    def lasting(self) -> bool:
        return row_of(self.name).changes

    def _encode(self, dialect: Dialect) -> tuple[bytes, Decode[Any]]:
        del dialect
        body = wire_json.encode({"model_id": self.line.model_id, **self._request})
        return body, partial(plain_result, self.name)


class PassCall(TrainingCall):
    """One forward or forward-backward pass over data, in as many requests as the server's limits require.

    Args:
        line, name, deadline_at: as in `TrainingCall`.
        whole: the data and the loss.
        forward_only: compute no gradients.
        extra: what the user adds to each request.

    Raises:
        InvalidInputError: the data cannot be sent.
    """

    def __init__(
        self,
        line: TrainingLine,
        name: str,
        whole: ForwardBackwardInput,
        deadline_at: float,
        *,
        forward_only: bool = False,
        extra: Extra = NO_EXTRA,
    ) -> None:
        super().__init__(line, name, deadline_at)
        whole.validate()
        self._whole = whole
        self._extra = extra
        self._forward_only = forward_only
        self._trained = count_trained(whole.data)

    def wait_for_model(self, limiters: tuple[Limiter, ...]) -> APIFuture[Any]:
        self._limiters = limiters
        return self._combine([])

    def prepare(self) -> Entries:
        runtime = self.line.runtime
        facts = runtime.server.ready().facts
        limits = facts.config
        if self._forward_only and not facts.dialect.forward_only:
            runtime.server.refuse_without_forward()
        with runtime.spending.reserve(self._estimate_cost, self._limiters) as reservation:
            chunks = split_data(
                self._whole.data,
                max_bytes=limits.fwdbwd_max_chunk_bytes_count,
                max_count=limits.fwdbwd_max_chunk_len,
            )
            reservation.parts = len(chunks)
            # The metrics of several chunks are reduced once, together.
            combined = len(chunks) > 1 or self._future is not None
            decode = read_pass if combined else partial(decode_pass, self._trained)
            began_s = runtime.clock.now()
            # All chunks before the first future, because a chunk that cannot be encoded refuses the call.
            encoded = [self._encode(chunk, facts.dialect, reservation, decode) for chunk in chunks]
            requests = [request_for(runtime.lifecycle.make_future(self.line)) for request_for in encoded]
            runtime.connection.events.notify(RequestEncoded(self.sdk_method, began_s))
            future = self._follow([each.future for each in requests])
            reservation.follow(future)
        alone = facts.dialect.one_by_one
        return [Entry(self.name, requests, future, limits.parallel_fwdbwd_chunks, alone)]

    def _estimate_cost(self) -> CostEstimate:
        return CostEstimate(model=self.line.model_id, trained=_tokens(self._whole.data))

    def _follow(self, futures: list[APIFuture[ForwardBackwardOutput]]) -> APIFuture[Any]:
        if isinstance(self._future, CombinedFuture):
            self._future.follow(futures)
        elif len(futures) == 1:
            self._future = futures[0]
        else:
            self._combine(futures)
        return self.future

    def _combine(self, futures: list[APIFuture[ForwardBackwardOutput]]) -> APIFuture[Any]:
        runtime = self.line.runtime
        self._future = future = CombinedFuture(
            futures,
            partial(merge_pass, self._trained),
            submit=runtime.pools.callback.run,
            soon=runtime.lifecycle.run_soon,
            clock=runtime.clock,
        )
        return future

    def _encode(
        self, chunk: DataChunk, dialect: Dialect, reservation: Reservation, decode: Any
    ) -> Callable[[APIFuture[Any]], TrainingRequest]:
        """Encode a chunk. Return a function that makes its request for a future."""
        given, model_id = self._whole, self.line.model_id
        if len(chunk.data) != len(given.data):
            given = given._with(data=list(chunk.data))
        given = fit(given, dialect)
        if dialect.reads_data_only:
            decode = partial(read_with_loss, decode, weights_of(given))
        expected = ExpectedOutputs.of(chunk.data, whole=not dialect.reads_data_only)
        used = TokensUsed(model=model_id, trained=_tokens(chunk.data))
        settle = partial(reservation.settle, used, id(chunk))
        return partial(
            TrainingRequest,
            request_type="Forward" if self._forward_only else "ForwardBackward",
            decode=partial(read_settled, decode, expected, settle),
            settle=settle,
            size=chunk.size_bytes,
            deadline_at=self.deadline_at,
            made_at=self.line.runtime.clock.now(),
            **_encode_pass(given, model_id, dialect, self._extra, forward_only=self._forward_only),
        )


def _tokens(data: Sequence[Datum]) -> int:
    return sum([length_of(datum.model_input) for datum in data])


class UnloadCall(OrderedCall):
    """The call that unloads a model. It is the last call on the model, so it has no number."""

    numbered = False

    def prepare(self) -> Entries:
        """Return the entry for the queue.

        Raises:
            UnsupportedByServerError: the server has no such call; nothing was sent.
            TinkerError: as for `TrainingCall.prepare`.
        """
        server, dialect = self.line.runtime.server, self.line.runtime.server.ready().facts.dialect
        api = None if dialect.knows_all else server.published.api()
        if api is not None and not api.offers(ENDPOINTS[_UNLOAD]):
            self.line.unloaded = False  # the model is still there
            raise UnsupportedByServerError(
                "this server has no call unload_model; it frees the place some time after the session's end",
                feature=_UNLOAD,
            )
        return super().prepare()


# ------------------------------------------------------------------------------------------ requests


@define(eq=False)
class TrainingRequest:
    """One request of a training call, encoded except for its number, which the send queue gives it.

    Attributes:
        future: ends with the result of the request.
        endpoint: the name of the endpoint.
        request_type: the server's name of the request, such as "ForwardBackward".
        decode: reads the result.
        settle: counts the tokens of the request, once. Called when the server accepts it after its future
            has failed, because its result is not read then. None: it uses no tokens.
        size: the size of a chunk in bytes; 0 for other requests, to which the limit on bytes does not apply.
        content_type: the type of the body.
        headers: further headers.
        compressible: True until it is decided whether the body is compressed.
        deadline_at: the time of the clock at which to give up.
        made_at: the time of the clock at which the request is made.
        key: the idempotency key; None before the first send.
        unanswered: True if the server may have the request since an earlier send, which failed.
    """

    future: APIFuture[Any]
    endpoint: str
    request_type: str
    _encoded: Callable[[int], bytes | PiecedBody] | None
    decode: Decode[Any]
    settle: Callable[[], object] | None = field(default=None, kw_only=True)
    size: int = field(kw_only=True)
    content_type: str = field(kw_only=True)
    headers: Mapping[str, str] = field(factory=dict, kw_only=True)
    compressible: bool = field(default=False, kw_only=True)
    deadline_at: float = field(kw_only=True)
    made_at: float = field(kw_only=True)
    sdk_method: str = field(factory=current, init=False)
    key: str | None = field(default=None, init=False)
    unanswered: bool = field(default=False, init=False)

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
        """Drop the body, because the server has it. The request itself may live until its result is there."""
        self._encoded = None


def submit(
    runtime: ClientRuntime, request: TrainingRequest, number: int, may_send: Callable[[], bool]
) -> Flow[None]:
    """Send a request until the server has accepted it; the poll for its result then goes on by itself.

    Args:
        runtime: the runtime of the client, which lives until its calls have ended.
        request: the request.
        number: its number.
        may_send: asked when the request is about to be sent; if it returns False, nothing is sent.

    Raises:
        NotTaken: the server does not have the request.
        Unanswered: the server may have it, and it can be sent again.
        BaseException: the server may have it, and will not take it again.
    """
    server, clock = runtime.server, runtime.clock
    held: Held = []
    call, keeps_numbers = None, True

    try:
        machinery = server.ready()
        keeps_numbers = machinery.facts.dialect.keeps_numbers
        left_s = request.deadline_at - clock.now()
        if left_s <= 0:
            raise _too_late(request, clock)
        if request.size:  # other requests do not wait for chunks
            yield from _take_room(machinery, request, clock, held)
        if not may_send():
            return
        request.future._mark_sending()
        make = partial(_make_call, runtime, request, number, machinery)
        if request.size > QUICK_BYTES:  # it may be compressed now
            call = yield from server.flows.on_worker(runtime.pools.send, make)
            call = call.but(on_sent=partial(_note_sent, server.flows, held))
        else:
            call = make()
        request_id = yield from _until_accepted(runtime, request, call, machinery.uplink)
    except TinkerError as error:
        known = server.closed_or(error) if isinstance(error, APIConnectionError) else error
        raise _fate(request, known, call, keeps_numbers=keeps_numbers)  # noqa: B904  # it has a cause
    finally:
        while held:
            _give_back(held)
    request.forget_body()
    if request.settle is not None and request.future.failure is not None:
        request.settle()
    promise = Promise(
        request_id,
        request.request_type,
        wants_proto=row_of(request.endpoint).result_as_protobuf,
        roundtrip_s=clock.now() - request.made_at,
        sdk_method=request.sdk_method,
        result_bytes=most_pass_bytes(request.size),
    )
    machinery.polls.fetch(promise, request.future, request.decode, deadline_at=request.deadline_at)


Held = list[tuple[Quota, int]]
"""The bytes that a request holds of budgets. The last is that for sending, until the request is sent."""


def _take_room(machinery: Machinery, request: TrainingRequest, clock: Clock, held: Held) -> Flow[None]:
    for room in (machinery.train_bytes, machinery.sending_bytes):
        size = max(request.size, _LEAST_TRAIN_BYTES)
        if not (yield from room.take(size, request.deadline_at - clock.now())):
            raise _too_late(request, clock)
        held.append((room, size))


def _note_sent(flows: Flows, held: Held) -> None:
    """Let the next request be sent, before the server has accepted this one. On any thread."""
    with suppress(RuntimeError):  # the client is closed
        flows.soon(_let_next_send, held)


def _let_next_send(held: Held) -> None:
    if len(held) > 1:  # not once more after another try, nor at the end
        _give_back(held)


def _give_back(held: Held) -> None:
    room, size = held.pop()
    room.give_back(size)


def _too_late(request: TrainingRequest, clock: Clock) -> DeadlineError:
    return DeadlineError(
        f"{request.endpoint} was not sent within the deadline",
        method="POST",
        path=row_of(request.endpoint).path.text,
        waited_s=clock.now() - request.made_at,
        last_words="it waited for its turn",
    )


def _make_call(runtime: ClientRuntime, request: TrainingRequest, number: int, machinery: Machinery) -> Call:
    """Return the call that sends a request under its number.

    Raises:
        NotTaken: there is no memory for the body.
    """
    try:
        body = request.bytes_for(number)
        if request.compressible and machinery.uplink is not None:
            request.compressible = False  # decided once, because each try sends the same bytes
            packed = machinery.uplink.compressed(body)
            if packed is not None:
                body, request.headers = packed, {"Content-Encoding": "zstd", **request.headers}
    except MemoryError as error:
        raise NotTaken(error) from error
    if request.unanswered:
        request.keep(body)  # whatever becomes of this send, the next one needs it
    request.key = request.key or runtime.connection.caller.next_key()
    left_s = request.deadline_at - runtime.clock.now()
    return make_call(
        request.endpoint,
        runtime.settings,
        body=body,
        headers=request.headers,
        content_type=request.content_type,
        deadline_s=None if math.isinf(left_s) else left_s,
        dialect=machinery.facts.dialect,
        idempotency_key=request.key,
        sdk_method=request.sdk_method,
    )


def _until_accepted(  # noqa: C901  # each outcome has its answer
    runtime: ClientRuntime, request: TrainingRequest, call: Call, uplink: Uplink | None
) -> Flow[str]:
    """Send a call, again and again if need be, and return the id that the server has given to the request."""
    server, clock, caller = runtime.server, runtime.clock, runtime.connection.caller
    limit_s = runtime.settings.deadline_s
    give_up_at = request.deadline_at
    if math.isinf(give_up_at) and limit_s is not None:
        give_up_at = clock.now() + limit_s
    tries = caller.tries(call)
    while True:
        began_s = clock.now()
        outcome = yield tries.next_try()
        if (cause := own_failure(outcome)) is not None:
            raise tries.explained(cause)
        try:
            found = tries.after(outcome)
            if isinstance(found, Reply):
                request_id, _ = read_promise(request.endpoint, found, runtime.connection.secrets)
                if runtime.lifecycle.accept(request.future, request_id):
                    if uplink is not None:
                        uplink.note(len(call.body or b""), began_s, clock.now())
                    return request_id
                raise foreign_promise(request.endpoint, found, request_id)
        except APIResponseValidationError as error:
            found = tries.after_unreadable(error)
        except BillingError as error:
            if not server.may_wait_out_billing(give_up_at):
                raise
            if error.ambiguous:  # the new tries know nothing of the old ones
                request.unanswered = True
                assert call.body is not None  # noqa: S101
                request.keep(call.body)
            # The pause counts as time of the call.
            left_s = give_up_at - clock.now() - clock.shorten(BLOCKED_PAUSE_S)
            call = call.but(deadline_s=None if math.isinf(left_s) else left_s)
            tries = caller.tries(call)
            found = BLOCKED_PAUSE_S
        yield found


# The same bytes get the same answer. A server that had taken them before would know their number.
_REFUSES_THE_BYTES: Final = (400, 405, 413, 415, 422)
# The server has another request under the number, or no model.
_DENIALS: Final = (404, 409, 410)
_HARMLESS: Final = ("Forward", "SaveWeights", "SaveWeightsForSampler", "SaveWeightsExternal")
"""The server's names of requests that leave the model as it is."""


def _fate(
    request: TrainingRequest, error: TinkerError, call: Call | None, *, keeps_numbers: bool
) -> BaseException:
    """Return what a failure says about the request: `NotTaken`, `Unanswered`, or the failure itself if
    the server may have the request, but will not take it again.

    Args:
        request: the request.
        error: the failure.
        call: the call that was sent; None if none was.
        keeps_numbers: the server processes requests in the order of their numbers.
    """
    status = error.status_code if isinstance(error, APIStatusError) else None
    refused = isinstance(error, APIStatusError) and proves_refusal(error.status_code, error.body)
    lost = request.unanswered or error.ambiguous
    if not lost and (refused or _was_not_sent(error)):
        return NotTaken(error)
    if isinstance(error, ClientClosedError):
        return error
    error.ambiguous = True
    if not keeps_numbers:
        return NotTaken(error)  # no number depends on it
    # The server has answered, so only the number is left to settle: a request without effect gets it.
    harmless = request.request_type in _HARMLESS and status in (409, 500)
    if harmless or (refused and status in _REFUSES_THE_BYTES):
        return NotTaken(error, used=True)
    if (refused and status in _DENIALS) or isinstance(error, InvalidInputError):
        return error
    if not request.unanswered:
        request.unanswered = True
        assert call is not None and call.body is not None  # noqa: S101, PT018  # `lost`, so it was sent
        request.keep(call.body)
    return Unanswered(error)


def _was_not_sent(error: TinkerError) -> bool:
    if isinstance(error, (APIStatusError, ClientClosedError)):
        return False
    # Of the other errors, only an APIError with a cause other than a failed send leaves this open.
    return not isinstance(error, APIError) or isinstance(error.__cause__, (SendFailed, type(None)))


# ------------------------------------------------------------------------------------------ chunks


class DataChunk(NamedTuple):
    """A chunk of a pass: the data of one request, in the order of the call, and their estimated size."""

    data: Sequence[Datum]
    size_bytes: int


def estimate_bytes(datum: Datum) -> int:
    """Return the estimated size of a datum in a training request.

    >>> from tinker_sync.types import Datum
    >>> datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": [0, 1, 1]})
    >>> estimate_bytes(datum)  # 3 tokens of 4 bytes, 3 targets of 8, 3 weights of 4
    48
    """
    size_bytes = datum.model_input._estimate_bytes(_TOKEN_BYTES)
    for tensor in datum.loss_fn_inputs.values():
        size_bytes += tensor._numpy.nbytes if tensor._crow is None else tensor.nbytes
    return size_bytes


def split_data(data: Sequence[Datum], *, max_bytes: int, max_count: int) -> list[DataChunk]:
    """Split data into chunks of at most `max_bytes` (estimated) and `max_count` data each, in order.

    A datum larger than `max_bytes` gets a chunk of its own.

    Raises:
        InvalidInputError: there is no data.

    >>> from tinker_sync.types import Datum
    >>> datum = Datum(ModelInput.from_ints([1, 2]))
    >>> [len(chunk.data) for chunk in split_data([datum] * 5, max_bytes=1000, max_count=2)]
    [2, 2, 1]
    """
    if not data:
        raise InvalidInputError("data: expected at least one datum, got none")
    chunks = []
    begin = size_bytes = 0
    for index, datum in enumerate(data):
        datum_bytes = estimate_bytes(datum)
        count = index - begin
        if count and (size_bytes + datum_bytes > max_bytes or count >= max_count):
            chunks.append(DataChunk(data[begin:index], size_bytes))
            begin, size_bytes = index, 0
        size_bytes += datum_bytes
    chunks.append(DataChunk(data[begin:], size_bytes))
    return chunks


def most_pass_bytes(chunk_bytes: int) -> int:
    """Return an upper bound for the size of a chunk's result; for other training calls, `chunk_bytes` is 0.

    >>> most_pass_bytes(0) // 2**20
    8
    """
    return ANSWER_BYTES + chunk_bytes * _RESULT_FACTOR


# ------------------------------------------------------------------------------------------ bodies


def _encode_pass(
    given: ForwardBackwardInput, model_id: str, dialect: Dialect, extra: Extra, *, forward_only: bool
) -> dict[str, Any]:
    """Return how a pass is sent: as protobuf if the server takes it for this kind of pass, else as JSON.

    Raises:
        UnsupportedByServerError: the user adds fields, but the server takes protobuf, where they would need
            numbers.
    """
    if dialect.protobuf and (dialect.forward_only or not forward_only):
        if extra.body:
            raise UnsupportedByServerError(
                "this server takes passes as protobuf, which has no place for extra_body; use extra_headers, "
                "or send the pass as JSON with training.request",
                feature="extra_body",
            )
        buffers = requests.encode_forward_backward_request(
            ForwardBackwardRequest(given, model_id), forward_only=forward_only
        )
        return {
            "endpoint": "forward_backward",
            "encoded": partial(number_proto, buffers),
            "content_type": PROTOBUF,
            "compressible": True,
            "headers": extra.headers,
        }
    kind: type[Any] = ForwardRequest if forward_only else ForwardBackwardRequest
    return {
        "endpoint": "forward" if forward_only else "forward_backward",
        "encoded": partial(number_json, extra.applied(wire_json.encode(kind(given, model_id)))),
        "content_type": JSON,
        "headers": extra.headers,
    }


number_json: Final = wire_json.with_number
"""Return a JSON body with its number."""


def leave_unnumbered(body: bytes, _number: int) -> bytes:
    """Return the body of a request that takes no number."""
    return body


def number_proto(buffers: Buffers, number: int) -> bytes | PiecedBody:
    """Return a protobuf body with its number.

    A small body becomes one piece, so that it is sent in one packet with the HTTP head.
    """
    pieces = [*buffers.pieces, _SEQ_ID_TAG, varint(number)]
    return b"".join(pieces) if buffers.size <= _SMALL_BYTES else PiecedBody(pieces)
