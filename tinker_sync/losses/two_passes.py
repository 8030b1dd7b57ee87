"""A loss computed in this process: a forward pass, the loss, and a backward pass with its gradients.

`forward_backward_custom` makes both passes; `forward_custom` makes no backward pass.

Order. The call puts both passes into the send queue together: the forward pass with its requests, and the
backward pass as an entry whose requests are added later. No other entry gets between them. A call
that any thread makes on the same training client during the forward pass or the loss is sent after the
backward pass, with a higher number. So the weights cannot change between the log-probabilities and the
gradients, and a script may call `forward_backward_custom` and `optim_step` without waiting in between.

Failure. If the forward pass or the loss fails, or the call is cancelled before the backward pass is sent,
the backward pass is left out: it uses no number, later entries go on, and the weights do not change. If
it is unknown whether the server has accepted the forward pass, the next call first sends it again, as it
does with any request; the call may be repeated, because a forward pass changes nothing.

Threads. A user's thread makes the call, the passes end on runtime threads, and the loss runs on a worker for
losses. Any thread may use a `TwoPassFuture`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync._base.naming import named
from tinker_sync.errors import DeadlineError, TinkerError
from tinker_sync.losses.data import backward_data, forward_data, read_logprobs
from tinker_sync.losses.evaluate import Evaluate, Evaluated, make_evaluator
from tinker_sync.runtime.answers import add_mean_loss
from tinker_sync.runtime.combine import ComposedFuture
from tinker_sync.runtime.futures import APIFuture, Submit
from tinker_sync.runtime.progress import FutureState, Status
from tinker_sync.runtime.send_queue import Entry, SendQueue
from tinker_sync.runtime.training import Entries, PassCall, TrainingCall, TrainingLine, TrainingRequest
from tinker_sync.types.datum import Datum, count_trained
from tinker_sync.types.training import ForwardBackwardInput, ForwardBackwardOutput

if TYPE_CHECKING:
    from tinker_sync.runtime.spending import Limiter

T = TypeVar("T")

_LOSS_FN: Final = "cross_entropy"
_COMPUTING: Final = Status(FutureState.WAITING, "the loss is being computed")
_computing = threading.local()  # .queue: the send queue whose loss this thread computes


class TwoPassFuture(ComposedFuture[ForwardBackwardOutput, ForwardBackwardOutput]):
    """The future of a call with a forward pass, a loss, and a backward pass. Thread-safe.

    It can be cancelled until the backward pass is sent. It has the request ids of both passes. Its timeline
    has the sending time of the forward pass and the acceptance time of the backward pass. If it ends early,
    it cancels the passes.

    >>> forward = APIFuture()
    >>> both = TwoPassFuture(forward)
    >>> forward._mark_accepted("req-1")
    >>> both.request_ids, both.status().state
    (('req-1',), <FutureState.WAITING: 'waiting'>)
    """

    def __init__(
        self,
        forward: APIFuture[ForwardBackwardOutput],
        *,
        submit: Submit | None = None,
        soon: Submit | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Create the future of a call whose forward pass is `forward`. `follow` adds the backward pass."""
        super().__init__(submit=submit, soon=soon, clock=clock)
        self._add(forward)

    def follow(self, backward: APIFuture[ForwardBackwardOutput]) -> None:
        """Add the backward pass, or cancel it if this future has ended."""
        if not self._add(backward):
            backward.cancel()

    def status(self) -> Status:
        """Return the forward pass's status while it runs, then "waiting" or "paused" until the call ends.

        >>> TwoPassFuture(APIFuture()).status().state
        <FutureState.QUEUED: 'queued'>
        """
        passes = self._parts
        if self.done() or not passes:
            return super().status()
        if not passes[0].done():
            return passes[0].status()
        status = passes[-1].status()
        if len(passes) == 1:
            return _COMPUTING
        return status if status.state is FutureState.PAUSED else Status(FutureState.WAITING, status.reason)

    def _moments(
        self, parts: Sequence[APIFuture[ForwardBackwardOutput]]
    ) -> tuple[float | None, float | None]:
        sending, accepted = super()._moments(parts)
        return sending, accepted if len(parts) > 1 else None  # the call is accepted with its backward pass

    def _cancels_parts(self) -> bool:
        return True


def refuse_inside_loss(queue: SendQueue[TrainingRequest]) -> None:
    """Raise TinkerError if a loss calls its own training client, because both would wait for each other."""
    if getattr(_computing, "queue", None) is queue:
        raise TinkerError(
            "a custom loss must not use its own training client: its calls are sent after the backward pass, "
            "which waits for the loss. Compute such values before, and pass them in loss_fn_inputs"
        )


class TwoPassCall(TrainingCall):
    """A call that makes a forward pass, computes a loss, and makes a backward pass.

    Args:
        line: the `TrainingLine` of the client, which has its send queue.
        data: the examples.
        loss_fn: a loss in numpy or in torch, or a `LossHandle`, which this process computes.
        deadline_at: the moment of the clock at which to give up.
        train: False leaves out the backward pass, for `forward_custom`.

    Raises:
        InvalidInputError: the data cannot be sent.
        MissingExtraError: the loss works in torch, which is not installed.
        TypeError: the loss is not callable.
    """

    def __init__(
        self,
        line: TrainingLine,
        data: Sequence[Datum],
        loss_fn: Any,
        deadline_at: float,
        *,
        train: bool = True,
    ) -> None:
        super().__init__(line, "forward_backward_custom" if train else "forward_custom", deadline_at)
        self._train = train
        self._evaluate: Evaluate = make_evaluator(loss_fn)
        self._data = list(data)
        whole = ForwardBackwardInput(forward_data(self._data), _LOSS_FN)
        self._forward = PassCall(line, "forward", whole, deadline_at, forward_only=True)
        self._made_at = line.runtime.clock.now()
        self._both: TwoPassFuture
        self._place: Entry[TrainingRequest]

    def wait_for_model(self, limiters: tuple[Limiter, ...]) -> APIFuture[Any]:
        """Return the future of a call that is made before the model is ready. No request exists yet."""
        return self._follow(self._forward.wait_for_model(limiters))

    def prepare(self) -> Entries:
        """Return the forward pass and, to train, the backward pass, whose requests are added later."""
        (forward,) = self._forward.prepare()
        if self._future is None:
            self._follow(forward.future)
        self._place = Entry("forward_backward", (), self.future, forward.parallel, forward.alone)
        forward.future._when_done(self._forward_ended)
        return [forward, self._place] if self._train else [forward]

    def _follow(self, forward: APIFuture[ForwardBackwardOutput]) -> APIFuture[Any]:
        runtime = self.line.runtime
        self._future = self._both = future = TwoPassFuture(
            forward,
            submit=runtime.pools.callback.run,
            soon=runtime.lifecycle.run_soon,
            clock=runtime.clock,
        )
        # The future fails when the client is closed, also while a loss is being computed.
        # It is no request, so recordings do not follow it.
        lease: APIFuture[Any] = APIFuture(clock=runtime.clock)
        runtime.lifecycle.end_with_client(lease)
        lease._when_done(lambda ended: None if ended.cancelled() else future.fail(ended.exception()))
        future._when_done(lambda _: lease.cancel())
        return future

    def _forward_ended(self, forward: APIFuture[ForwardBackwardOutput]) -> None:
        """Start the loss on a worker, or fail the call if the forward pass has failed."""
        if not self._succeeded(forward):
            return
        try:
            self.line.runtime.pools.loss.run_call(partial(self._compute, forward.result(timeout=0)))
        except TinkerError as error:  # the client is closed, or no thread can start
            self._both.fail(error)

    def _succeeded(self, one: APIFuture[ForwardBackwardOutput]) -> bool:
        failure = CancelledError() if one.cancelled() else one.exception()
        if failure is not None:
            self._both.fail(failure)
        return failure is None

    def _compute(self, output: ForwardBackwardOutput) -> None:
        """Compute the loss, then create the requests of the backward pass, or resolve a call without one.

        Runs on a worker for losses.
        """
        if self._both.done():
            return
        evaluated, failure = _try(partial(self._evaluate_output, output))
        if evaluated is not None and not self._train:
            self._both.resolve(self._make_result(output, evaluated, surrogate=False))
            return
        if evaluated is not None:
            backward, failure = _try(partial(self._prepare_backward, evaluated))
            if backward is not None:
                self._both.follow(backward.future)
                backward.future._when_done(partial(self._backward_ended, evaluated))
                self.line.queue.fill(self._place, backward.requests)
                return
        assert failure is not None  # noqa: S101
        self._both.fail(failure)

    def _evaluate_output(self, output: ForwardBackwardOutput) -> Evaluated:
        logprobs = read_logprobs(output, self._data)
        _computing.queue = self.line.queue
        try:
            return self._evaluate(self._data, logprobs)
        finally:
            _computing.queue = None

    def _prepare_backward(self, evaluated: Evaluated) -> Entry[TrainingRequest]:
        now = self.line.runtime.clock.now()
        if now >= self.deadline_at:
            # If the pass failed while it is sent, its number would be missing, and the server would hold all
            # later operations.
            raise DeadlineError(
                "the loss took too long; its backward pass was not sent",
                waited_s=now - self._made_at,
                last_words="the forward pass had ended",
            )
        whole = ForwardBackwardInput(backward_data(self._data, evaluated.gradients), _LOSS_FN)
        with named(self.sdk_method):
            (backward,) = PassCall(self.line, "forward_backward", whole, self.deadline_at).prepare()
        return backward

    def _backward_ended(self, evaluated: Evaluated, backward: APIFuture[ForwardBackwardOutput]) -> None:
        if self._succeeded(backward):
            self._both.resolve(self._make_result(backward.result(timeout=0), evaluated, surrogate=True))

    def _make_result(
        self, output: ForwardBackwardOutput, evaluated: Evaluated, *, surrogate: bool
    ) -> ForwardBackwardOutput:
        return add_mean_loss(with_metrics(output, evaluated, surrogate=surrogate), count_trained(self._data))


def with_metrics(
    output: ForwardBackwardOutput, evaluated: Evaluated, *, surrogate: bool = True
) -> ForwardBackwardOutput:
    """Return the output of a pass with the value and metrics of the user's loss.

    Args:
        output: the output of the server for its own loss.
        evaluated: the loss of the user.
        surrogate: keep the sum of the server's own loss, as ``surrogate_loss:sum``; False drops it.

    >>> output = ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": 1.5, "clock:unique": 7.0})
    >>> with_metrics(output, Evaluated(0.5, {"dpo:sum": 0.5}, [])).metrics
    {'clock:unique': 7.0, 'dpo:sum': 0.5, 'loss:sum': 0.5, 'surrogate_loss:sum': 1.5}
    """
    metrics = {**output.metrics}
    metrics.pop("loss:mean", None)
    of_server = metrics.pop("loss:sum", None)
    metrics.update(evaluated.metrics)
    metrics["loss:sum"] = evaluated.loss
    if surrogate and of_server is not None:
        metrics["surrogate_loss:sum"] = of_server
    return output.model_copy(update={"metrics": metrics})


def _try(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Return the value of `work()`, or its failure.

    The future that gets the failure is in no frame of the traceback, so no cycle keeps the future alive.
    """
    try:
        return work(), None
    except BaseException as failure:  # noqa: BLE001  # the user's loss may raise anything, and the user gets it
        return None, failure
