"""Custom losses: which requests compute them, and what this process does between the two passes of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tinker_sync.errors import InvalidInputError
from tinker_sync.losses.data import backward_data, forward_data, read_logprobs
from tinker_sync.losses.evaluate import Evaluated, NumpyLossFn, TorchLossFn, make_evaluator
from tinker_sync.losses.handle import LossHandle, check_data
from tinker_sync.types.datum import Datum, count_trained
from tinker_sync.types.training import ForwardBackwardInput, ForwardBackwardOutput, listed_data

if TYPE_CHECKING:
    from typing import TypeAlias

CustomLossFn: TypeAlias = "NumpyLossFn | TorchLossFn | LossHandle"

_LOSS_FN: Final = "cross_entropy"


def check_loss_type_input(given: Any) -> None:
    """Raise InvalidInputError if `loss_type_input` is neither None nor "logprobs", which mean the same."""
    if given not in (None, "logprobs"):
        raise InvalidInputError(f"loss_type_input: expected 'logprobs', got {given!r}")


def plan(
    data: Sequence[Datum], loss_fn: Any, session_id: str | None, *, train: bool = True
) -> ForwardBackwardInput | LocalLoss:
    """Return the one pass in which the server computes the loss, or else the loss for this process.

    Args:
        data: the examples.
        loss_fn: a loss in numpy or in torch, or a `LossHandle`.
        session_id: the session of the client, whose handles alone it takes.
        train: False for a loss without gradients, which this process computes in any case.

    Raises:
        InvalidInputError: the data cannot be sent, or the handle is of another session.
        MissingExtraError: the loss works in torch, which is not installed.
        TypeError: the loss is not callable.
    """
    data = listed_data(data)
    if isinstance(loss_fn, LossHandle):
        _check_session(loss_fn, session_id)
        check_data(loss_fn, data)
        if train and loss_fn.loss_id is not None:
            return ForwardBackwardInput(data, "custom", {"loss_id": loss_fn.loss_id})
    return LocalLoss(data, loss_fn, train=train)


def _check_session(handle: LossHandle, session_id: str | None) -> None:
    """Raise InvalidInputError for a handle of another session: in this one its id may name another loss."""
    if handle.session_id != session_id:
        raise InvalidInputError(
            f"the loss {handle.name} was made in session {handle.session_id}, not in {session_id}; "
            "create it again with create_custom_loss of the ServiceClient that created this training client"
        )


class LocalLoss:
    """A loss that this process computes between a forward pass and a backward pass with its gradients.

    For one thread at a time.
    """

    def __init__(self, data: Sequence[Datum], loss_fn: Any, *, train: bool) -> None:
        self._evaluate = make_evaluator(loss_fn)
        self._data = list(data)
        self._train = train
        self.forward = ForwardBackwardInput(forward_data(self._data), _LOSS_FN)
        self.trained = count_trained(self._data)

    def compute(
        self, output: ForwardBackwardOutput
    ) -> tuple[ForwardBackwardInput | None, Callable[[ForwardBackwardOutput], ForwardBackwardOutput]]:
        """Compute the loss from the output of the forward pass.

        Return the backward pass, if any, and the function that adds the loss to the output of the last pass.
        """
        evaluated = self._evaluate(self._data, read_logprobs(output, self._data))
        finish = partial(with_metrics, evaluated=evaluated, surrogate=self._train)
        if not self._train:
            return None, finish
        return ForwardBackwardInput(backward_data(self._data, evaluated.gradients), _LOSS_FN), finish


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
