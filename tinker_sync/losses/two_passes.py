"""A loss that is computed here: a forward pass, the loss on a worker, and a backward pass with its gradients.

Order. Both passes enter the send queue together, when the call is made: the forward pass with its requests,
the backward pass as a place that is filled later. Nothing is between them. Whatever else is asked of the same
training client, by whichever thread, while the forward pass is under way or the loss is being computed, is
sent behind the backward pass and has higher numbers. So gradients never belong to weights that have changed
since the log-probabilities were taken, and `forward_backward_custom` and `optim_step` may be called one after
the other without waiting.

Endings. When the forward pass or the loss fails, or the call is cancelled, before the backward pass is being
sent, that one is left out: its place uses no number, what waited behind it goes on, and nothing was trained.

Threads: the call is made by one of the user's, the passes end on the runtime's, the loss runs on one of the
client's workers for losses. `TwoPassFuture` may be used by any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync.errors import ClientClosedError, DeadlineError, TinkerError
from tinker_sync.losses.data import backward_data, forward_data, logprobs_of
from tinker_sync.losses.evaluate import Evaluate, Evaluated, evaluator
from tinker_sync.runtime.futures import APIFuture, Submit
from tinker_sync.runtime.progress import FutureState, Status, Timeline
from tinker_sync.runtime.send_queue import Operation, SendQueue
from tinker_sync.runtime.training_calls import Operations, PassCall, TrainingCall, TrainingLine
from tinker_sync.runtime.training_part import TrainingPart
from tinker_sync.types.datum import Datum
from tinker_sync.types.training import ForwardBackwardInput, ForwardBackwardOutput

if TYPE_CHECKING:
    from tinker_sync.runtime.admission import Limiter

T = TypeVar("T")

_LOSS_FN: Final = "cross_entropy"
_COMPUTING: Final = Status(FutureState.WAITING, "the loss is being computed")
_computing = threading.local()  # queue: whose loss this thread computes


class TwoPassFuture(APIFuture[ForwardBackwardOutput]):
    """The result of a forward pass, a loss, and a backward pass. Thread-safe.

    It can be cancelled until the backward pass is being sent. Request ids are those of both passes; it was
    sent when the first one was, and accepted when the second one was.

    >>> forward = APIFuture()
    >>> both = TwoPassFuture(forward)
    >>> forward.mark_accepted("req-1")
    >>> both.request_ids, both.status().state
    (('req-1',), <FutureState.WAITING: 'waiting'>)
    """

    def __init__(
        self,
        forward: APIFuture[ForwardBackwardOutput],
        *,
        submit: Submit | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Follow a forward pass; the backward pass comes later, by `follow`."""
        super().__init__(submit=submit, clock=clock)
        self._passes: tuple[APIFuture[ForwardBackwardOutput], ...] = (forward,)  # empty once it has ended
        self._ended_ids: tuple[str, ...] = ()
        self.when_done(_end)

    def follow(self, backward: APIFuture[ForwardBackwardOutput]) -> None:
        """The backward pass is on its way."""
        self._passes = (*self._passes, backward)
        if self.done():  # before it could see this one
            self._passes = ()
            backward.cancel()

    @property
    def request_id(self) -> str | None:
        """The id of the first request; None before the server took one.

        >>> TwoPassFuture(APIFuture()).request_id is None
        True
        """
        return next(iter(self.request_ids), None)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of all requests the server took, those of the forward pass first.

        >>> TwoPassFuture(APIFuture()).request_ids
        ()
        """
        return _ids(self._passes) or self._ended_ids

    def status(self) -> Status:
        """Where the call is: as the forward pass until that has ended, then waiting, or paused.

        >>> TwoPassFuture(APIFuture()).status().state
        <FutureState.QUEUED: 'queued'>
        """
        passes = self._passes
        if self.done() or not passes:
            return super().status()
        if not passes[0].done():
            return passes[0].status()
        status = passes[-1].status()
        if len(passes) == 1:
            return _COMPUTING
        return status if status.state is FutureState.PAUSED else Status(FutureState.WAITING, status.reason)

    @property
    def timeline(self) -> Timeline:
        """Sent with the forward pass, accepted with the backward pass.

        >>> TwoPassFuture(APIFuture()).timeline.sending is None
        True
        """
        passes = self._passes
        if not passes:
            return super().timeline
        accepted = passes[1].timeline.accepted if len(passes) > 1 else None
        return Timeline(self._queued_s, passes[0].timeline.sending, accepted, self._completed_s)

    def _let_go(self) -> None:
        """Keep what the passes know about themselves and drop them; what has not been sent will not be."""
        passes, timeline = self._passes, self.timeline
        self._ended_ids = _ids(passes) or self._ended_ids
        self._sending_s, self._accepted_s = timeline.sending, timeline.accepted
        self._passes = ()
        for each in passes:
            each.cancel()


def _end(both: TwoPassFuture) -> None:
    both._let_go()


def _ids(passes: Sequence[APIFuture[ForwardBackwardOutput]]) -> tuple[str, ...]:
    return tuple(request_id for each in passes for request_id in each.request_ids)


def refuse_inside_loss(queue: SendQueue[TrainingPart]) -> None:
    """Refuse a call that a loss makes on its own training client: it would wait for itself."""
    if getattr(_computing, "queue", None) is queue:
        raise TinkerError(
            "a custom loss may not use its own training client: calls are sent behind the backward pass, "
            "which waits for the loss. Ask for what it needs before, and bring it along in loss_fn_inputs"
        )


class TwoPassCall(TrainingCall):
    """One call from its forward pass to its result.

    Args:
        line: the way of the client's calls.
        data: the examples.
        loss_fn: the loss, of either kind.
        deadline_at: the moment of the clock at which to give up.

    Raises:
        InvalidInputError: the data cannot be sent.
        MissingExtraError: the loss works in torch, which is not installed.
    """

    def __init__(self, line: TrainingLine, data: Sequence[Datum], loss_fn: Any, deadline_at: float) -> None:
        super().__init__(line, "forward_backward_custom", deadline_at)
        self._evaluate: Evaluate = evaluator(loss_fn)
        self._data = list(data)
        whole = ForwardBackwardInput(forward_data(self._data), _LOSS_FN)
        self._forward = PassCall(line, "forward", whole, deadline_at, forward_only=True)
        self._made_at = line.core.clock.now()
        self._both: TwoPassFuture
        self._place: Operation[TrainingPart]

    def wait_for_model(self, limiters: tuple[Limiter, ...]) -> APIFuture[Any]:
        """Make the future before there are requests."""
        return self._follow(self._forward.wait_for_model(limiters))

    def prepare(self) -> Operations:
        """Return the forward pass, and right behind it the place of the backward pass."""
        (forward,) = self._forward.prepare()
        if self._future is None:
            self._follow(forward.future)
        self._place = Operation("forward_backward", (), self.future, parallel=forward.parallel)
        forward.future.when_done(self._forward_ended)
        return [forward, self._place]

    def _follow(self, forward: APIFuture[ForwardBackwardOutput]) -> APIFuture[Any]:
        core = self.line.core
        self._future = self._both = future = TwoPassFuture(
            forward, submit=core.callback_pool.run, clock=core.clock
        )
        # The future fails when the client is closed, also while a loss is being computed.
        lease = core.future()
        lease.when_done(lambda ended: None if ended.cancelled() else future.fail(ended.exception()))
        future.when_done(lambda _: lease.cancel())
        return future

    def _forward_ended(self, forward: APIFuture[ForwardBackwardOutput]) -> None:
        """Inline in a thread of the runtime, so the loss goes to a worker."""
        if not self._succeeded(forward):
            return
        try:
            self.line.core.loss_pool.run(partial(self._compute, forward.result(timeout=0)))
        except RuntimeError:  # the workers take no more
            self._both.fail(ClientClosedError())

    def _succeeded(self, one: APIFuture[ForwardBackwardOutput]) -> bool:
        failure = CancelledError() if one.cancelled() else one.exception()
        if failure is not None:
            self._both.fail(failure)
        return failure is None

    def _compute(self, output: ForwardBackwardOutput) -> None:
        """On a worker: the loss, and the requests of the backward pass."""
        if self._both.done():
            return
        evaluated, failure = _tried(partial(self._evaluated, output))
        if evaluated is not None:
            backward, failure = _tried(partial(self._backward, evaluated))
            if backward is not None:
                self._both.follow(backward.future)
                backward.future.when_done(partial(self._backward_ended, evaluated))
                self.line.queue.fill(self._place, backward.parts)
                return
        assert failure is not None  # noqa: S101
        self._both.fail(failure)

    def _evaluated(self, output: ForwardBackwardOutput) -> Evaluated:
        logprobs = logprobs_of(output, self._data)
        _computing.queue = self.line.queue
        try:
            return self._evaluate(self._data, logprobs)
        finally:
            _computing.queue = None

    def _backward(self, evaluated: Evaluated) -> Operation[TrainingPart]:
        now = self.line.core.clock.now()
        if now >= self.deadline_at:
            # Here and not when it is sent: that would be a hole, after which nothing can follow.
            raise DeadlineError(
                "the loss was computed too late for its backward pass, which was not sent",
                waited_s=now - self._made_at,
                last_words="the forward pass was done",
            )
        whole = ForwardBackwardInput(backward_data(self._data, evaluated.gradients), _LOSS_FN)
        (backward,) = PassCall(self.line, "forward_backward", whole, self.deadline_at).prepare()
        return backward

    def _backward_ended(self, evaluated: Evaluated, backward: APIFuture[ForwardBackwardOutput]) -> None:
        if self._succeeded(backward):
            self._both.resolve(with_metrics(backward.result(timeout=0), evaluated))


def with_metrics(output: ForwardBackwardOutput, evaluated: Evaluated) -> ForwardBackwardOutput:
    """The output of the backward pass under the metrics of the loss.

    >>> output = ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": 1.5, "clock:unique": 7.0})
    >>> with_metrics(output, Evaluated(0.5, {"dpo:sum": 0.5}, [])).metrics
    {'clock:unique': 7.0, 'dpo:sum': 0.5, 'loss:sum': 0.5, 'surrogate_loss:sum': 1.5}
    """
    metrics = {**output.metrics}
    surrogate = metrics.pop("loss:sum", None)
    metrics.update(evaluated.metrics)
    metrics["loss:sum"] = evaluated.loss
    if surrogate is not None:
        metrics["surrogate_loss:sum"] = surrogate
    return output.model_copy(update={"metrics": metrics})


def _tried(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """A value or a failure; no frame in its traceback holds the future that will hold the failure."""
    try:
        return work(), None
    except BaseException as failure:  # noqa: BLE001  # the user's loss may raise anything; it is his to see
        return None, failure
