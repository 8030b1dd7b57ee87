"""The passes and the steps of a training client."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tinker_sync._base.lazy import LazyModule
from tinker_sync.clients import _deadlines
from tinker_sync.clients._arguments import check_loss, check_step, refuse_loss
from tinker_sync.clients._async import async_future
from tinker_sync.clients._creation import ClientFuture
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.training import OrderedCall, PassCall, TrainingLine
from tinker_sync.types import (
    AdamParams,
    Datum,
    DimuonParams,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    OptimParams,
    OptimParamsBase,
    OptimStepRequest,
    OptimStepResponse,
)
from tinker_sync.types._structured import is_foreign, model_from
from tinker_sync.types.training import LossFnConfig, listed_data

if TYPE_CHECKING:
    from tinker_sync.losses import custom, handle, two_passes
    from tinker_sync.losses.custom import CustomLossFn
    from tinker_sync.losses.handle import LossHandle
    from tinker_sync.types import LossFnType
else:  # most training does not need these modules
    custom = LazyModule("tinker_sync.losses.custom")
    handle = LazyModule("tinker_sync.losses.handle")
    two_passes = LazyModule("tinker_sync.losses.two_passes")

T = TypeVar("T")
Client = TypeVar("Client")


class PassCalls(ClientFuture[Client]):
    """The part of a training client that makes passes and steps, and puts all its calls into the queue."""

    _line: TrainingLine

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType | LossHandle | str,
        loss_fn_config: LossFnConfig | None = None,
        *,
        deadline: float | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute the loss and add its gradients to those accumulated since the last step.

        Args:
            data: the examples; many are sent in several requests, and the results are combined.
            loss_fn: a name such as "cross_entropy" or "importance_sampling", or a handle of
                `create_custom_loss`.
            loss_fn_config: settings of the loss.
            deadline: the seconds after which the call is given up.

        Among the metrics of the result, ``loss:sum`` comes from the server; for open servers that send none,
        this client computes it. ``loss:mean``, unless the server sends it, is that sum divided by the number
        of tokens whose weight or advantage is not 0. The input `reference_logprobs` is sent only with the
        loss "custom"; otherwise only losses in this process read it.

        Raises:
            InvalidInputError: the data or the loss cannot be sent, or a handle is of another session; nothing
                was sent.
            TypeError: a handle is given together with a `loss_fn_config`.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     datum = tinker_sync.Datum(tinker_sync.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
        ...     passed = training.forward_backward([datum], "cross_entropy").result()
        ...     sorted(passed.metrics), len(passed.loss_fn_outputs[0]["logprobs"].data)
        (['loss:mean', 'loss:sum'], 2)
        """
        return self._pass(data, loss_fn, loss_fn_config, deadline, forward_only=False)

    def forward(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType | str,
        loss_fn_config: LossFnConfig | None = None,
        *,
        deadline: float | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute the loss without gradients. Arguments and errors as in `forward_backward`.

        This method raises TypeError for a handle of `create_custom_loss`; `forward_custom` takes handles.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     datum = tinker_sync.Datum(tinker_sync.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
        ...     evaluated = training.forward([datum], "cross_entropy").result()
        ...     evaluated.metrics["loss:sum"] > 0
        True
        """
        return self._pass(data, loss_fn, loss_fn_config, deadline, forward_only=True)

    def forward_backward_custom(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLossFn,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
        deadline: float | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute a loss of your own and add its gradients to those accumulated since the last step.

        A forward pass returns the log-probabilities of the target tokens. A worker thread of this client
        computes the loss from them. A backward pass then computes the gradients of the model from the loss.
        No other call of this training client is sent between the two passes; calls of any thread wait until
        the backward pass is sent. If the loss fails, or the call is cancelled before the backward pass is
        sent, the backward pass is omitted, nothing is trained, and later calls go on. If `loss_fn` is a
        handle of a loss that the server computes, a single pass does all this at the server.

        An unmarked loss takes ``(data, logprobs)`` with torch tensors and returns ``(loss, metrics)``. A loss
        that is marked with `tinker_sync.losses.numpy_loss` takes numpy arrays and returns
        ``(loss, metrics, gradients)``; it does not need torch. For both kinds `logprobs` has a dense entry
        for each datum, with the shape of its `target_tokens`.

        Among the metrics of the result, ``loss:sum`` is the value of the loss and, after two passes,
        ``surrogate_loss:sum`` the server's value of the backward pass. The metrics of the loss keep their
        names.

        Args:
            data: the examples, with `target_tokens`; the loss may read all their other inputs.
            loss_fn: the loss, or a handle of `ServiceClient.create_custom_loss`.
            loss_type_input: has no effect, and must be None or "logprobs".
            deadline: the seconds after which the call is given up; a running loss is not interrupted, but its
                result is not used.

        Raises:
            InvalidInputError: the data cannot be sent, or a handle is of another session; nothing was sent.
                If the loss returns wrong values, the future has this error.
            MissingExtraError: the loss needs torch, which is not installed.
            TypeError: `loss_fn` is neither a function nor a handle.

        >>> import tinker_sync
        >>> @tinker_sync.losses.numpy_loss
        ... def likelihood(data, logprobs):
        ...     loss = -sum(float(each.sum()) for each in logprobs)
        ...     metrics = {"tokens:sum": sum(each.size for each in logprobs)}
        ...     return loss, metrics, [0 * each - 1 for each in logprobs]  # the gradients
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     datum = tinker_sync.Datum(tinker_sync.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
        ...     passed = training.forward_backward_custom([datum], likelihood).result()
        >>> passed.metrics["tokens:sum"]
        2
        """
        custom.check_loss_type_input(loss_type_input)
        self._refuse()
        call = custom.custom_call(self._line, data, loss_fn, self._until(deadline))
        return self._line.submit(call)

    def forward_custom(
        self, data: Sequence[Datum], loss_fn: CustomLossFn, *, deadline: float | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute a loss of your own without gradients, to evaluate on held-out data.

        The client sends one forward pass and computes the loss on a worker thread; nothing is trained. The
        result has the log-probabilities of the target tokens, ``loss:sum``, ``loss:mean`` and the metrics of
        the loss.

        Args:
            data: the examples, with `target_tokens`; the loss may read all their other inputs.
            loss_fn: the loss, as for `forward_backward_custom`; its gradients are checked, but not used.
            deadline: the seconds after which the call is given up.

        Raises:
            InvalidInputError: the data cannot be sent, or a handle is of another session; nothing was sent.
                If the loss returns wrong values, the future has this error.
            MissingExtraError: the loss needs torch, which is not installed.
            TypeError: `loss_fn` is neither a function nor a handle.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     datum = tinker_sync.Datum(tinker_sync.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
        ...     evaluated = training.forward_custom([datum], tinker_sync.losses.CrossEntropy()).result()
        >>> evaluated.metrics["loss:mean"] == evaluated.metrics["loss:sum"] / 2
        True
        """
        self._refuse()
        return self._line.submit(custom.evaluation(self._line, data, loss_fn, self._until(deadline)))

    def _pass(
        self,
        data: Sequence[Datum],
        loss_fn: str | LossHandle,
        config: LossFnConfig | None,
        deadline: float | None,
        *,
        forward_only: bool,
    ) -> APIFuture[ForwardBackwardOutput]:
        self._refuse()
        deadline_at = self._until(deadline)
        if not isinstance(loss_fn, str):
            if not isinstance(loss_fn, handle.LossHandle):
                refuse_loss(loss_fn)
            if forward_only or config:
                raise TypeError(
                    "a loss of create_custom_loss is for forward_backward, without loss_fn_config"
                )
            return self._line.submit(custom.custom_call(self._line, data, loss_fn, deadline_at))
        check_loss(loss_fn)
        name = "forward" if forward_only else "forward_backward"
        whole = ForwardBackwardInput(listed_data(data, with_reference=loss_fn == "custom"), loss_fn, config)
        return self._line.submit(PassCall(self._line, name, whole, deadline_at, forward_only=forward_only))

    def optim_step(
        self,
        optim_params: OptimParams | None = None,
        *,
        adam_params: AdamParams | None = None,
        deadline: float | None = None,
    ) -> APIFuture[OptimStepResponse]:
        """Apply the accumulated gradients and clear them.

        Args:
            optim_params: the settings of the optimizer for this step.
            adam_params: the older name of `optim_params`.
            deadline: the seconds after which the call is given up.

        Raises:
            ValueError: both are given.
            TypeError: neither is given, or the object has another class.
            InvalidInputError: a setting of `AdamParams` is not finite, its learning rate is negative, or a
                beta is not from 0 to below 1.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     datum = tinker_sync.Datum(tinker_sync.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
        ...     passed = training.forward_backward([datum], "cross_entropy")
        ...     stepped = training.optim_step(tinker_sync.AdamParams(learning_rate=1e-4))
        ...     sorted(stepped.result().metrics)
        ['grad_norm', 'learning_rate']
        """
        if optim_params is not None and adam_params is not None:
            raise ValueError("optim_step: give optim_params or adam_params, not both")
        params: Any = optim_params if optim_params is not None else adam_params
        for kind in (AdamParams, DimuonParams):
            if is_foreign(kind, params):
                params = model_from(kind, params, "optim_step")
        if not isinstance(params, (AdamParams, OptimParamsBase)):
            number = isinstance(params, numbers.Real)
            hint = f"; write AdamParams(learning_rate={float(params)!r})" if number else ""
            raise TypeError(
                f"optim_step: expected AdamParams or other optimizer settings, got {params!r}{hint}"
            )
        if isinstance(params, AdamParams):
            check_step(params)
        request = OptimStepRequest(optim_params=params, model_id=self._line.model_id)
        return self._ordered("optim_step", request, OptimStepResponse, deadline, _deadlines.TRAIN_S)

    # -------------------------------------------------------------------------------------- the queue

    def _ordered(
        self, name: str, request: Any, kind: type[T], deadline: float | None, usual_s: float
    ) -> APIFuture[T]:
        self._refuse()
        return self._line.submit(OrderedCall(self._line, name, request, kind, self._until(deadline, usual_s)))

    def _refuse(self) -> None:
        """Raise if the client takes no call now.

        The client takes none from inside a loss that it computes, in a forked child before `take_over`, after
        `unload`, and after a failed creation.
        """
        if "tinker_sync.losses.two_passes" in sys.modules:  # without it, no loss is computed
            two_passes.refuse_inside_loss(self._line.queue)
        self._line.queue.refuse_inherited()
        self._line.refuse_unloaded()
        if not self._line.held.open:
            self._goes_ahead()

    def _until(self, deadline: float | None, usual_s: float = _deadlines.TRAIN_S) -> float:
        return self._runtime.server.give_up_at(deadline, usual_s)

    forward_backward_async = async_future(forward_backward)
    forward_async = async_future(forward)
    forward_backward_custom_async = async_future(forward_backward_custom)
    forward_custom_async = async_future(forward_custom)
    optim_step_async = async_future(optim_step)
