"""`TrainingClient`: the calls that train one model, sent in the order in which they are made."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, get_args, overload

from tinker_sync._base.lazy import LazyModule
from tinker_sync._base.left_out import refuse_arguments
from tinker_sync._base.naming import names_requests, warn_caller
from tinker_sync.clients._arguments import check_loss, check_saving, check_state_path, check_step, refuse_loss
from tinker_sync.clients._async import async_blocking, async_future, async_result
from tinker_sync.clients._base import CREATE_S, REST_S, SAVE_S, TRAIN_S, ClientFuture, ready, start
from tinker_sync.errors import APIResponseValidationError, InvalidInputError, TinkerError
from tinker_sync.runtime import raw
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.raw import NO_EXTRA, Extra
from tinker_sync.runtime.training import OrderedCall, PassCall, RawCall, TrainingLine
from tinker_sync.types import (
    AdamParams,
    Datum,
    DimuonParams,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    GetInfoRequest,
    GetInfoResponse,
    LoadWeightsRequest,
    LoadWeightsResponse,
    OptimParams,
    OptimParamsBase,
    OptimStepRequest,
    OptimStepResponse,
    SamplingClientKind,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsRequest,
    SaveWeightsResponse,
    UnloadModelResponse,
)
from tinker_sync.types._console import training_run_url
from tinker_sync.types._structured import is_foreign, model_from
from tinker_sync.types.training import LossFnConfig, listed_data

if TYPE_CHECKING:
    from tinker_sync.clients._models import LoadedModel, NewModel
    from tinker_sync.clients.sampling import RetryConfig, SamplingClient
    from tinker_sync.data.tokenizer import Tokenizer
    from tinker_sync.losses import custom, handle
    from tinker_sync.losses.custom import CustomLossFn
    from tinker_sync.losses.handle import LossHandle
    from tinker_sync.runtime import two_passes
    from tinker_sync.runtime.client import ClientRuntime
    from tinker_sync.types import LossFnType
else:  # most training does not need these modules
    custom = LazyModule("tinker_sync.losses.custom")
    handle = LazyModule("tinker_sync.losses.handle")
    two_passes = LazyModule("tinker_sync.runtime.two_passes")

T = TypeVar("T")


@names_requests
class TrainingClient(ClientFuture["TrainingClient"]):
    """A client that trains one model. A `ServiceClient` makes it. Thread-safe.

    The object is also the future of its own creation, so you can use it at once: calls made before the model
    exists are held, and sent in order once it does. If the creation fails, the futures of these calls fail,
    and later calls raise.

    The methods that train, save and load return futures. Calls are sent in FIFO order, each at once, and
    answered later. So call ahead without waiting for results; the server keeps the order.

    If the server refuses a call, that call alone fails, and later calls are still sent. So an `optim_step`
    after a refused `forward_backward` applies the gradients that were accumulated before. A pass over many
    data is sent in several requests. If the server refuses one of them, the later ones are not sent, but the
    gradients of the accepted ones stay accumulated, and the next `optim_step` applies them; the error says
    how many there are.

    If a call gets no answer, even after retries, the server may or may not have it. Its error is then
    `ambiguous`, and the client keeps the request. The next call, also one that is queued already, first sends
    that request again, with the same bytes and sequence number, and is sent only once the server has
    answered. The failed call then counts as done exactly once, and only its result is lost, as the log says.
    So do not repeat it, unless it is a forward pass, which changes nothing and whose error is not
    `ambiguous`. To go back to the last checkpoint instead, use `recover`.

    >>> import tinker_sync
    >>> from tinker_sync import types
    >>> with tinker_sync.ServiceClient(base_url="local") as service:
    ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4, seed=1)
    ...     datum = types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
    ...     passed = training.forward_backward([datum], "cross_entropy")
    ...     stepped = training.optim_step(types.AdamParams(learning_rate=1e-3))
    ...     len(passed.result().loss_fn_outputs), stepped.exception()
    (1, None)
    """

    def __init__(
        self,
        holder: ClientRuntime,
        model_seq_id: int | None = None,
        model_id: str | None = None,
        **removed: NoReturn,
    ) -> None:
        """Make a client of a model that exists and that no other client has trained or saved.

        A `ServiceClient` makes the clients of new models. The calls are numbered from 1, so a server that
        keeps the order of calls refuses those of a second client of a model.

        Args:
            holder: the `holder` of another client.
            model_seq_id: the number of the model in its session, if it has one. Not needed with `model_id`.
            model_id: the id of the model.

        Raises:
            InvalidInputError: no model is given.
        """
        refuse_arguments("TrainingClient", removed, unknown=True)
        if model_seq_id is None and model_id is None:
            raise InvalidInputError(
                "TrainingClient: give the model_id of an existing model, or make a new one with "
                "create_lora_training_client of a ServiceClient"
            )
        self._line = TrainingLine(holder)
        super().__init__(holder, self._line.held)
        self._user_metadata: dict[str, Any] | None = None
        if model_id is not None:
            self._line.model_id = model_id
            ready(self)

    @classmethod
    def _make(cls, runtime: ClientRuntime, asked: NewModel | LoadedModel) -> TrainingClient:
        """Return a client at once, and start the creation of its model."""
        client = cls(runtime, asked.model_seq_id)
        client._user_metadata = asked.request.user_metadata
        start(client, partial(asked.make, client._line))
        return client

    @property
    def model_id(self) -> str:
        """The id of the model. Waits until it exists.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     training.model_id.endswith(":train:0")
        True
        """
        return self.result()._line.model_id

    def _guaranteed_model_id(self) -> str:
        """Return the id of the model, for scripts that call this name."""
        return self.model_id

    @property
    def curve(self) -> list[tuple[float, float]]:
        """The time and the loss of each successful pass with gradients, as pairs in the order of their ends.

        The time is that of the end, in seconds of a monotonic clock. The loss is the metric `loss:mean`, or
        `loss:sum` if there is no mean. The last 10,000 pairs are kept.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     datum = tinker_sync.Datum(tinker_sync.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
        ...     passed = training.forward_backward([datum], "cross_entropy").result()
        ...     len(training.curve), training.curve[0][1] > 0
        (1, True)
        """
        return list(self._line.curve)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a TrainingClient belongs to the threads of its process and cannot be pickled or copied; "
            "save_state here, and create_training_client_from_state_with_optimizer in the other process"
        )

    def _name(self) -> str:
        return self._line.model_id

    # -------------------------------------------------------------------------------------- passes

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType | LossHandle | str,
        loss_fn_config: LossFnConfig | None = None,
        *,
        extra_body: Mapping[str, Any] | None = None,
        extra_headers: Mapping[str, str] | None = None,
        deadline: float | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute the loss and add its gradients to those accumulated since the last step.

        Args:
            data: the examples; many are sent in several requests, and the results are combined.
            loss_fn: a name such as "cross_entropy" or "importance_sampling", or a handle of
                `create_custom_loss`.
            loss_fn_config: settings of the loss.
            extra_body: further fields of each request, for servers that take passes as JSON.
            extra_headers: further headers of each request.
            deadline: seconds until the call gives up; None: the default of the client.

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
        extra = Extra.of("forward_backward", extra_body, extra_headers)
        return self._pass(data, loss_fn, loss_fn_config, deadline, extra, forward_only=False)

    def forward(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType | str,
        loss_fn_config: LossFnConfig | None = None,
        *,
        extra_body: Mapping[str, Any] | None = None,
        extra_headers: Mapping[str, str] | None = None,
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
        extra = Extra.of("forward", extra_body, extra_headers)
        return self._pass(data, loss_fn, loss_fn_config, deadline, extra, forward_only=True)

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
            deadline: seconds until the call gives up; None: the default of the client. A running loss is not
                interrupted, but its result is dropped.

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
        return self._submit_custom(data, loss_fn, self._until(deadline))

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
            deadline: seconds until the call gives up; None: the default of the client.

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
        return self._submit_custom(data, loss_fn, self._until(deadline), train=False)

    def _submit_custom(
        self, data: Sequence[Datum], loss_fn: Any, deadline_at: float, *, train: bool = True
    ) -> APIFuture[ForwardBackwardOutput]:
        line = self._line
        planned = custom.plan(data, loss_fn, line.runtime.server.known_session_id, train=train)
        if isinstance(planned, ForwardBackwardInput):
            return line.submit(PassCall(line, "forward_backward", planned, deadline_at))
        name = "forward_backward_custom" if train else "forward_custom"
        return line.submit(two_passes.TwoPassCall(line, name, planned, deadline_at, train=train))

    def _pass(
        self,
        data: Sequence[Datum],
        loss_fn: str | LossHandle,
        config: LossFnConfig | None,
        deadline: float | None,
        extra: Extra,
        *,
        forward_only: bool,
    ) -> APIFuture[ForwardBackwardOutput]:
        self._refuse()
        deadline_at = self._until(deadline)
        if not isinstance(loss_fn, str):
            if not isinstance(loss_fn, handle.LossHandle):
                refuse_loss(loss_fn)
            if forward_only or config or extra.asked:
                raise TypeError(
                    "a loss of create_custom_loss is for forward_backward, without loss_fn_config and extras"
                )
            return self._submit_custom(data, loss_fn, deadline_at)
        check_loss(loss_fn)
        name = "forward" if forward_only else "forward_backward"
        whole = ForwardBackwardInput(listed_data(data, with_reference=loss_fn == "custom"), loss_fn, config)
        call = PassCall(self._line, name, whole, deadline_at, forward_only=forward_only, extra=extra)
        return self._line.submit(call)

    def optim_step(
        self,
        optim_params: OptimParams | None = None,
        *,
        adam_params: AdamParams | None = None,
        extra_body: Mapping[str, Any] | None = None,
        extra_headers: Mapping[str, str] | None = None,
        deadline: float | None = None,
    ) -> APIFuture[OptimStepResponse]:
        """Apply the accumulated gradients and clear them.

        Args:
            optim_params: the settings of the optimizer for this step.
            adam_params: the older name of `optim_params`.
            extra_body: further fields of the request's JSON, or other values of its fields.
            extra_headers: further headers of the request.
            deadline: seconds until the call gives up; None: the default of the client.

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
        extra = Extra.of("optim_step", extra_body, extra_headers)
        return self._ordered("optim_step", request, OptimStepResponse, deadline, TRAIN_S, extra)

    def request(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        extra_headers: Mapping[str, str] | None = None,
        deadline: float | None = None,
    ) -> APIFuture[Any]:
        """Make a training call that this client has no method for, in its place among the other calls.

        The call is a POST that the server answers with a promise, such as `optim_step`. It gets the next
        number and the id of the model, and is retried like the other calls.

        Args:
            path: the path below the base URL.
            body: the fields of the JSON body; `model_id` and `seq_id` are added.
            extra_headers: further headers of the request.
            deadline: seconds until the call gives up; None: the default of the client.

        Returns:
            The future of the parsed JSON of the result.

        Raises:
            InvalidInputError: the path, the body or a header cannot be sent; nothing was sent.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     body = {"adam_params": {"learning_rate": 1e-4}, "type": "optim_step"}
        ...     training.request("/api/v1/optim_step", body).result()["metrics"]["learning_rate"]
        0.0001
        """
        name = raw.checked_name("POST", path)
        body = raw.checked_body("request: body", body or {})
        extra = Extra(headers=raw.checked_headers("request: extra_headers", extra_headers))
        self._refuse()
        return self._line.submit(RawCall(self._line, name, body, self._until(deadline), extra))

    # -------------------------------------------------------------------------------------- saving

    def save_state(
        self,
        /,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
        *,
        deadline: float | None = None,
        **removed: NoReturn,
    ) -> APIFuture[SaveWeightsResponse]:
        """Save weights and optimizer state under a name, to continue the training later.

        `tinker_sync.loop.verify_checkpoint` checks that the server restores the checkpoint as it was saved.

        Args:
            name: the name of the checkpoint.
            ttl_seconds: its lifetime in seconds; None: the server's default.
            overwrite: replace a checkpoint of the same name, including its metadata.
            user_metadata: metadata of your own for it.
            deadline: seconds until the call gives up; None: the default of the client.

        Raises:
            InvalidInputError: the name cannot be part of a path, or another argument has a wrong value.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     saved = training.save_state("step-100", user_metadata={"step": "100"}).result()
        ...     saved.path.rpartition(":")[2]
        '0/weights/step-100'
        """
        refuse_arguments("save_state", removed, unknown=True)
        check_saving(name, ttl_seconds, "save_state")
        request = SaveWeightsRequest(
            model_id=self._line.model_id,
            path=name,
            ttl_seconds=ttl_seconds,
            overwrite=overwrite,
            user_metadata=user_metadata,
        )
        return self._ordered("save_weights", request, SaveWeightsResponse, deadline, SAVE_S)

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
        *,
        deadline: float | None = None,
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        """Save weights under a name, to sample from them. Arguments and errors as in `save_state`.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_weights_for_sampler("step-100").result().path
        ...     service.create_sampling_client(path).get_base_model()
        'tinker-sync/tiny'
        """
        check_saving(name, ttl_seconds, "save_weights_for_sampler")
        request = SaveWeightsForSamplerRequest(
            model_id=self._line.model_id, path=name, ttl_seconds=ttl_seconds, user_metadata=user_metadata
        )
        return self._ordered(
            "save_weights_for_sampler", request, SaveWeightsForSamplerResponse, deadline, SAVE_S
        )

    def save_weights_external(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
        *,
        deadline: float | None = None,
    ) -> APIFuture[SaveWeightsExternalResponse]:
        """Export the weights for download.

        Args:
            name: the name of the export.
            ttl_seconds: its lifetime in seconds.
            age_encryption_recipients: public keys for which the export is encrypted.
            deadline: seconds until the call gives up; None: the default of the client.

        Raises:
            InvalidInputError: the name cannot be part of a path, or the lifetime is not positive.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_weights_external("mine").result().path
        ...     sorted(service.create_rest_client().get_external_weights_urls(path).result().urls)
        ['adapter_config.json', 'adapter_model.safetensors']
        """
        check_saving(name, ttl_seconds, "save_weights_external")
        request = SaveWeightsExternalRequest(
            model_id=self._line.model_id,
            path=name,
            ttl_seconds=ttl_seconds,
            age_encryption_recipients=age_encryption_recipients,
        )
        return self._ordered("save_weights_external", request, SaveWeightsExternalResponse, deadline, SAVE_S)

    def load_state(
        self, path: str, weights_access_token: str | None = None, *, deadline: float | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        """Load the weights of a checkpoint into this model, without the state of the optimizer. Deprecated.

        Newer servers load weights into new models only; see `create_training_client_from_state`. This method
        issues a FutureWarning.

        Raises:
            InvalidInputError: the path cannot be that of a checkpoint for training.

        >>> import tinker_sync, warnings
        >>> warnings.simplefilter("ignore", FutureWarning)  # newer servers load weights into new models only
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("start").result().path
        ...     training.load_state(path).result().path == path
        True
        """
        weights_access_token = self._runtime.connection.mask(weights_access_token)
        return self._load("load_state", path, weights_access_token, deadline)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None, *, deadline: float | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        """Load the weights and the optimizer state of a checkpoint into this model; see `load_state`.

        >>> import tinker_sync, warnings
        >>> warnings.simplefilter("ignore", FutureWarning)  # newer servers load weights into new models only
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("start").result().path
        ...     training.load_state_with_optimizer(path).result().path == path
        True
        """
        weights_access_token = self._runtime.connection.mask(weights_access_token)
        return self._load("load_state_with_optimizer", path, weights_access_token, deadline)

    def _load(
        self, name: str, path: str, token: str | None, deadline: float | None
    ) -> APIFuture[LoadWeightsResponse]:
        suffix = name.removeprefix("load_state")
        warn_caller(
            f"{name} is on its way out: servers load weights only into a new model. "
            f"Use ServiceClient.create_training_client_from_state{suffix}.",
            FutureWarning,
        )
        check_state_path(path, name)
        request = LoadWeightsRequest(
            model_id=self._line.model_id, path=path, optimizer=bool(suffix), weights_access_token=token
        )
        return self._ordered("load_weights", request, LoadWeightsResponse, deadline, SAVE_S)

    # -------------------------------------------------------------------------------------- going on

    def take_over(self) -> None:
        """Allow calls of this copy of the client, in a forked child.

        Until then, the calls of a forked copy are refused: parent and child would send different calls under
        the same numbers. The parent is not notified of this method, and must not use its own copy any
        more. In the process that made the client, this method does nothing.

        Raises:
            TinkerError: the client was not ready when the process was forked.
            EarlierCallFailedError: calls were under way at the fork; `recover` makes a new client from the
                last checkpoint.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4).result()
        ...     training.take_over()
        """
        if not self._held.open:
            self._refuse_foreign_wait()
        self._line.queue.take_over()

    def recover(self, *, deadline: float | None = None) -> TrainingClient:
        """Return at once a new training client for the last state that this client saved or started from.

        Call it after an `EarlierCallFailedError` that is `final`, because this client sends no more calls, or
        to leave a failed call behind that the server may have. Repeat the steps since that state. The model
        of this client does not change.

        Args:
            deadline: seconds until the call gives up; None: the default of the client.

        Raises:
            TinkerError: this client has saved no state and did not start from one.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     saved = training.save_state("step-100").result()
        ...     again = training.recover().result()
        ...     again.model_id != training.model_id
        True
        """
        from tinker_sync.clients._models import LoadedModel

        state = self._line.last_state
        if state is None:
            raise TinkerError(
                "recover: this training client has saved no state that it could go on from; make a new one "
                "with create_lora_training_client, and call save_state from time to time"
            )
        request = state.model_copy(update={"user_metadata": self._user_metadata})
        runtime = self._runtime
        until = runtime.server.give_up_at(deadline, CREATE_S)
        asked = LoadedModel.of(runtime, request, until)
        return TrainingClient._make(runtime, asked)

    def unload(self, *, deadline: float | None = None) -> APIFuture[UnloadModelResponse]:
        """Unload this model from the server's memory, after all calls made before. Later calls raise.

        Checkpoints stay. Open servers hold few models in memory, and unload those of a session only some
        minutes after its end. So `ServiceClient.close` unloads the models of its clients on such servers.

        Args:
            deadline: seconds until the call gives up; None: the default of the client.

        The future fails with `UnsupportedByServerError` if the server has no such call.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     training.unload().result().model_id == training.model_id
        True
        """
        self._refuse()
        return self._line.unload(self._until(deadline, SAVE_S))

    # -------------------------------------------------------------------------------------- sampling

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        kind: SamplingClientKind = "snapshot",
    ) -> SamplingClient:
        """Save the current weights for this session only. Return at once a client that samples from them.

        The save is ordered with the other calls of this client.

        Args:
            name: ignored; such weights have no name.
            retry_config: settings of the retries.
            record_stability_info: let the server keep, for each sample, the data that stable training needs.
            kind: "snapshot" always samples from the weights of this save; "inflight" switches to the weights
                of later inflight saves of this model.

        Raises:
            InvalidInputError: `kind` has another value.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4, seed=1)
        ...     sampling = training.save_weights_and_get_sampling_client()
        ...     sampling.get_base_model()
        'tinker-sync/tiny'
        """
        from tinker_sync.clients.sampling import SamplingClient

        del name
        if kind not in get_args(SamplingClientKind):
            raise InvalidInputError(
                f"save_weights_and_get_sampling_client: kind is 'snapshot' or 'inflight', got {kind!r}"
            )
        self._refuse()
        request = SaveWeightsForSamplerRequest(
            model_id=self._line.model_id,
            # Drawn once, because a retry must send the same request.
            sampling_session_seq_id=self._runtime.server.session.next_sampling_session_seq_id(),
            kind=kind,
        )
        saved = self._ordered(
            "save_weights_for_sampler",
            request,
            SaveWeightsForSamplerResponseInternal,
            None,
            SAVE_S,
        )
        return SamplingClient._of_saved(
            self._runtime,
            saved,
            self._line,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    def create_sampling_client(
        self, model_path: str, retry_config: RetryConfig | None = None, record_stability_info: bool = False
    ) -> SamplingClient:
        """Return a client that samples from saved weights, like `ServiceClient.create_sampling_client`.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_weights_for_sampler("step-100").result().path
        ...     training.create_sampling_client(path).get_base_model()
        'tinker-sync/tiny'
        """
        from tinker_sync.clients.sampling import SamplingClient

        self._refuse()
        return SamplingClient.create(
            self._runtime,
            model_path=model_path,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    # -------------------------------------------------------------------------------------- about the model

    def get_info(self) -> GetInfoResponse:
        """Return the server's description of this model. Blocks, but does not wait for calls made before.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     info = training.get_info()
        ...     info.model_name, info.lora_rank
        ('tinker-sync/tiny', 4)
        """
        request = GetInfoRequest(model_id=self.model_id)
        info: GetInfoResponse = self._runtime.server.call("get_info", request, usual_s=REST_S)
        if info.model_id != request.model_id:
            raise APIResponseValidationError(
                f"get_info: the answer describes another model than {request.model_id}"
            )
        return info

    @overload
    def get_tokenizer(self, *, backend: Literal["tokenizers"] = "tokenizers") -> Tokenizer: ...

    @overload
    def get_tokenizer(self, *, backend: Literal["transformers"]) -> Any: ...

    def get_tokenizer(self, *, backend: Literal["tokenizers", "transformers"] = "tokenizers") -> Any:
        """Return the tokenizer of this model. Blocks.

        The server names the tokenizer. The process keeps the last 32 tokenizers in memory.

        Args:
            backend: "transformers" returns an object of that library, which must be installed.

        Raises:
            TokenizerError: the tokenizer cannot be loaded; the message names the files to provide.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     tokenizer = training.get_tokenizer()
        ...     tokenizer.decode(tokenizer.encode("Q: 23+45="))
        'Q: 23+45='
        """
        from tinker_sync.data.tokenizer import get_tokenizer

        info = self.get_info()
        name = info.model_data.model_name or info.model_name or ""
        return get_tokenizer(name, info.model_data.tokenizer_id, backend=backend)

    def get_console_url(self) -> str:
        """Return the address of the web page of this run. Waits until the model exists.

        Only the hosted service has such pages. For other servers, return the base URL at once.

        Runs of other servers have no page there.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     training.get_console_url() == service.get_console_url()
        True
        """
        settings = self._runtime.settings
        return training_run_url(self.model_id) if settings.is_vendor_host else settings.base_url

    # -------------------------------------------------------------------------------------- the queue

    def _ordered(
        self,
        name: str,
        request: Any,
        kind: type[T],
        deadline: float | None,
        usual_s: float,
        extra: Extra = NO_EXTRA,
    ) -> APIFuture[T]:
        self._refuse()
        deadline_at = self._until(deadline, usual_s)
        return self._line.submit(OrderedCall(self._line, name, request, kind, deadline_at, extra))

    def _refuse(self) -> None:
        """Raise if the client takes no call now.

        The client takes none from inside a loss that it computes, in a forked child before `take_over`, after
        `unload`, and after a failed creation.
        """
        if "tinker_sync.runtime.two_passes" in sys.modules:  # without it, no loss is computed
            two_passes.refuse_inside_loss(self._line.queue)
        self._line.queue.refuse_inherited()
        self._line.refuse_unloaded()
        if not self._line.held.open:
            self._goes_ahead()

    def _until(self, deadline: float | None, usual_s: float = TRAIN_S) -> float:
        return self._runtime.server.give_up_at(deadline, usual_s)

    forward_backward_async = async_future(forward_backward)
    forward_async = async_future(forward)
    forward_backward_custom_async = async_future(forward_backward_custom)
    forward_custom_async = async_future(forward_custom)
    optim_step_async = async_future(optim_step)
    save_state_async = async_future(save_state)
    save_weights_for_sampler_async = async_future(save_weights_for_sampler)
    save_weights_external_async = async_future(save_weights_external)
    load_state_async = async_future(load_state)
    load_state_with_optimizer_async = async_future(load_state_with_optimizer)
    save_weights_and_get_sampling_client_async = async_result(save_weights_and_get_sampling_client)
    create_sampling_client_async = async_result(create_sampling_client)
    unload_async = async_future(unload)
    request_async = async_future(request)
    get_info_async = async_blocking(get_info)
    get_tokenizer_async = async_blocking(get_tokenizer)
