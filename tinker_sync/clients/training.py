"""`TrainingClient`: the calls that train one model, sent in the order in which they are made."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args, overload

from tinker_sync._lazy import LazyModule
from tinker_sync.clients import _deadlines
from tinker_sync.clients._arguments import check_saving, check_state_path, check_step, refuse_loss
from tinker_sync.clients._async import async_blocking, async_future, async_result
from tinker_sync.clients._creation import ClientFuture, start
from tinker_sync.errors import APIResponseValidationError, InvalidInputError, TinkerError
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.naming import names_requests, warn_caller
from tinker_sync.runtime.training_calls import OrderedCall, PassCall, TrainingLine
from tinker_sync.runtime.unloading import ModelPlace
from tinker_sync.types import (
    AdamParams,
    Datum,
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
from tinker_sync.types.training import listed_data

if TYPE_CHECKING:
    from tinker_sync.clients import _verify as verification
    from tinker_sync.clients._models import LoadedModel, NewModel
    from tinker_sync.clients._recorded import RecordedModel
    from tinker_sync.clients.retry_config import RetryConfig
    from tinker_sync.clients.sampling import SamplingClient
    from tinker_sync.losses import custom, handle, two_passes
    from tinker_sync.losses.custom import CustomLossFn
    from tinker_sync.losses.handle import LossHandle
    from tinker_sync.runtime.client_runtime import ClientRuntime
    from tinker_sync.text.tokenizer import Tokenizer
    from tinker_sync.types import LossFnType
else:  # most training does not need these modules
    verification = LazyModule("tinker_sync.clients._verify")
    custom = LazyModule("tinker_sync.losses.custom")
    handle = LazyModule("tinker_sync.losses.handle")
    two_passes = LazyModule("tinker_sync.losses.two_passes")

T = TypeVar("T")
LossFnConfig = Mapping[str, float | str]


_LOAD_NOTE: Final = (
    "{name} is on its way out: servers load weights only into a new model. "
    "Use ServiceClient.create_training_client_from_state{suffix}."
)


@names_requests
class TrainingClient(ClientFuture["TrainingClient"]):
    """A client that trains one model. A `ServiceClient` makes it. Any thread may use it.

    The object is also the future of its own creation, so it is usable at once. Calls that are made before the
    model exists are held and sent in order when it exists. If the creation fails, the futures of these calls
    fail and later calls raise.

    Methods return futures. Each call is sent at once, in the order of the calls, and answered later. Scripts
    may make further calls without waiting for results; the server keeps the order.

    If the server refuses a call, that call alone fails and later calls are still sent. An `optim_step` after
    a refused `forward_backward` thus applies the gradients that were accumulated before. A pass over many
    data is sent in several requests. If the server refuses one of them, the rest is not sent, but the
    gradients of the accepted requests stay accumulated. The error counts these requests, and the next
    `optim_step` applies their gradients.

    If an answer is lost and cannot be fetched again, the client cannot know if the server received the call.
    All later calls then fail, because a wrong order could change the training. `recover` makes a new client
    from the last checkpoint.

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

    def __init__(self, runtime: ClientRuntime, model_seq_id: int, *, recorded: bool = True) -> None:
        journal = runtime.server.session.journal if recorded else None
        self._line = TrainingLine(runtime, None if journal is None else journal.record_of(model_seq_id))
        super().__init__(runtime, self._line.held)
        self._place = ModelPlace(runtime, self._line)
        self._model_seq_id = model_seq_id
        self._user_metadata: dict[str, Any] | None = None
        self._stepped: OptimParams | None = None
        """The settings of the last step with gradients."""

    @classmethod
    def _make(
        cls,
        runtime: ClientRuntime,
        asked: NewModel | LoadedModel | RecordedModel | verification.VerifiedModel,
        *,
        instead_of: TrainingLine | None = None,
    ) -> TrainingClient:
        """Return a client at once, and start the creation of its model."""
        client = cls(runtime, asked.model_seq_id)
        new, old = client._line.record, None if instead_of is None else instead_of.record
        if new is not None and old is not None and isinstance(asked.request, LoadWeightsRequest):
            new.replace(old, asked.request.path)
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

    @property
    def curve(self) -> list[tuple[float, float]]:
        """The time and the loss of each `forward_backward` that has ended, as pairs in the order of the ends.

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

    # -------------------------------------------------------------------------------------- steps

    def steps(self, stop: int) -> Iterator[int]:
        """Yield the numbers of the steps up to `stop`, for a training loop.

        With a journal, a restarted script begins with the step that was under way; the calls that it had made
        in that step are not executed twice. If the server no longer has the session, the script begins after
        the last checkpoint that was saved in a step. Without a journal this is `range(stop)`.

        Args:
            stop: the total number of steps.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4, seed=1)
        ...     [step for step in training.steps(3)]
        [0, 1, 2]
        """
        record = self._line.record
        first = 0
        if record is not None:
            self.result()
            for future in list(record.early):  # the next number is known once these have ended
                wait([future])
            first = record.first_step(self._line.queue.next_number) if record.step is None else record.step
        for step in range(first, stop):
            if record is not None:
                record.step = step
            yield step

    @property
    def unread(self) -> tuple[APIFuture[Any], ...]:
        """The results that had not arrived when the earlier process ended, in the order of the requests.

        A pass that was sent in several requests has several results. For clients of `ServiceClient.attach`.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     service.create_lora_training_client("tinker-sync/tiny", rank=4).unread
        ()
        """
        from tinker_sync.clients._recorded import fetch_unread

        line = self.result()._line
        return () if line.record is None else tuple(fetch_unread(line, self._until(None)))

    @property
    def settled(self) -> tuple[str, ...]:
        """Texts that state if requests without a recorded answer reached the server; see `attach`.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     service.create_lora_training_client("tinker-sync/tiny", rank=4).settled
        ()
        """
        record = self.result()._line.record
        return () if record is None else record.settled

    # -------------------------------------------------------------------------------------- passes

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

        Among the metrics of the result, ``loss:sum`` comes from the server. ``loss:mean`` is that sum divided
        by the number of tokens whose weight or advantage is not 0. The input `reference_logprobs`, which only
        losses of this process use, is not sent.

        Raises:
            InvalidInputError: the data cannot be sent; nothing was sent.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     datum = tinker_sync.Datum(tinker_sync.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
        ...     passed = training.forward_backward([datum], "cross_entropy").result()
        ...     sorted(passed.metrics), len(passed.loss_fn_outputs[0]["logprobs"].data)
        (['loss:mean', 'loss:sum'], 2)
        """
        return self._pass("forward_backward", data, loss_fn, loss_fn_config, deadline, forward_only=False)

    def forward(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType | str,
        loss_fn_config: LossFnConfig | None = None,
        *,
        deadline: float | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute the loss without gradients. Arguments and errors as in `forward_backward`.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     datum = tinker_sync.Datum(tinker_sync.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
        ...     evaluated = training.forward([datum], "cross_entropy").result()
        ...     evaluated.metrics["loss:sum"] > 0
        True
        """
        return self._pass("forward", data, loss_fn, loss_fn_config, deadline, forward_only=True)

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
        computes the loss from them. A backward pass then applies the gradients of the loss to the model. No
        other call of this training client is sent between the two passes; calls of any thread wait until the
        backward pass is sent. If the loss fails, or the call is cancelled before the backward pass is sent,
        the backward pass is omitted, nothing is trained, and later calls go on.

        An unmarked loss takes ``(data, logprobs)`` with torch tensors and returns ``(loss, metrics)``. A loss
        that is marked with `tinker_sync.losses.numpy_loss` takes numpy arrays and returns
        ``(loss, metrics, gradients)``; it does not need torch. For both kinds `logprobs` has a dense entry
        for each datum, with the shape of its `target_tokens`.

        Among the metrics of the result, ``loss:sum`` is the value of the loss and ``surrogate_loss:sum`` the
        server's value of the backward pass. The metrics of the loss keep their names.

        Args:
            data: the examples, with `target_tokens`; the loss may read all their other inputs.
            loss_fn: the loss, or a handle of `ServiceClient.create_custom_loss`.
            loss_type_input: ignored; the loss always takes log-probabilities.
            deadline: the seconds after which the call is given up; a running loss is not interrupted, but its
                result is not used.

        Raises:
            InvalidInputError: the data cannot be sent; nothing was sent. If the loss returns wrong values,
                the future has this error.
            MissingExtraError: the loss needs torch, which is not installed.

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
            loss_fn: the loss, as for `forward_backward_custom`; its gradients are not used.
            deadline: the seconds after which the call is given up.

        Raises:
            InvalidInputError: the data cannot be sent; nothing was sent. If the loss returns wrong values,
                the future has this error.
            MissingExtraError: the loss needs torch, which is not installed.

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
        name: str,
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
        listed = listed_data(data, with_reference=loss_fn == "custom")
        whole = ForwardBackwardInput(listed, loss_fn, config)
        return self._line.submit(PassCall(self._line, name, whole, deadline_at, forward_only=forward_only))

    # -------------------------------------------------------------------------------------- steps and weights

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
        if not isinstance(params, (AdamParams, OptimParamsBase)):
            hint = f"; write AdamParams(learning_rate={params!r})" if isinstance(params, float) else ""
            raise TypeError(
                f"optim_step: expected AdamParams or other optimizer settings, got {params!r}{hint}"
            )
        if isinstance(params, AdamParams):
            check_step(params)
        if self._line.passed:
            self._stepped = params
        request = OptimStepRequest(optim_params=params, model_id=self._line.model_id)
        return self._ordered("optim_step", request, OptimStepResponse, deadline, _deadlines.TRAIN_S)

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
        *,
        verify: bool | float = False,
        deadline: float | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        """Save weights and optimizer state under a name, to continue the training later.

        With `verify`, the future fails with `VerificationError` unless the server restores the checkpoint
        with the same weights and with the state of the optimizer. This model does not change. The call waits
        for a forward pass of 16 tokens, whose loss must be equal in a copy that is restored from the
        checkpoint. The copy then takes a step without gradients, which moves its weights only if the
        optimizer was restored. So a verified save costs a restore, four passes of 16 tokens, one step, and a
        place for one more model until the future is done. Before the first `optim_step` after a pass, only
        the weights are verified.

        Args:
            name: the name of the checkpoint.
            ttl_seconds: its lifetime; None: the server's default.
            overwrite: replace a checkpoint of the same name, including its metadata.
            user_metadata: your own notes about it.
            verify: True, or the relative difference of two losses to accept as noise of the server, instead
                of 0.001; smaller differences are not noticed. The loss is stored in the metadata, for a
                verified restore.
            deadline: the seconds after which the call is given up.

        Raises:
            UnsupportedByServerError: with `verify`, the server returned no loss; nothing was saved.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     saved = training.save_state("step-100", user_metadata={"step": "100"}).result()
        ...     verified = training.save_state("step-101", verify=True).result()
        ...     saved.path.rpartition(":")[2]
        '0/weights/step-100'
        """
        check_saving(name, ttl_seconds, "save_state")
        measured = None
        if verify is not False:
            tolerance = verification.tolerance_of(verify, "save_state")
            measured = verification.measure(self, self._stepped, tolerance, deadline)
            user_metadata = {**(user_metadata or {}), **measured.metadata()}
        request = SaveWeightsRequest(
            model_id=self._line.model_id,
            path=name,
            ttl_seconds=ttl_seconds,
            overwrite=overwrite,
            user_metadata=user_metadata,
        )
        saved = self._ordered("save_weights", request, SaveWeightsResponse, deadline, _deadlines.SAVE_S)
        if measured is None:
            return saved
        return verification.follow(self, saved, measured, self._until(deadline, _deadlines.CREATE_S))

    def take_over(self) -> None:
        """Make this copy of the client, in a forked child, its only owner.

        The calls of a forked copy are refused, because parent and child would send different calls under the
        same numbers. The parent is not notified of this method, so it must not use its copy any more. In the
        process that made the client, this method does nothing.

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

        Call it after an `EarlierCallFailedError`: the server may have an earlier call or not, so this client
        cannot send later ones. Repeat the steps since that state. The model of this client does not change.

        With a journal, if the state was saved in a step, `steps` of the new client begins after that step. A
        restarted script then continues from the last checkpoint of the new client.

        Args:
            deadline: the seconds after which the call is given up.

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
        until = runtime.server.give_up_at(deadline, _deadlines.CREATE_S)
        asked = LoadedModel.of(runtime, request, until, aside=True)
        return TrainingClient._make(runtime, asked, instead_of=self._line)

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
        *,
        deadline: float | None = None,
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        """Save weights under a name, to sample from. Arguments as in `save_state`.

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
            "save_weights_for_sampler", request, SaveWeightsForSamplerResponse, deadline, _deadlines.SAVE_S
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
            ttl_seconds: its lifetime.
            age_encryption_recipients: public keys for which the export is encrypted.
            deadline: the seconds after which the call is given up.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_weights_external("mine").result().path
        ...     sorted(service.create_rest_client().get_external_weights_urls(path).result().urls)
        ['adapter_config.json', 'adapter_model.safetensors']
        """
        request = SaveWeightsExternalRequest(
            model_id=self._line.model_id,
            path=name,
            ttl_seconds=ttl_seconds,
            age_encryption_recipients=age_encryption_recipients,
        )
        return self._ordered(
            "save_weights_external", request, SaveWeightsExternalResponse, deadline, _deadlines.SAVE_S
        )

    def load_state(
        self, path: str, weights_access_token: str | None = None, *, deadline: float | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        """Load weights into this model. Deprecated: newer servers load weights into new models only.

        >>> import tinker_sync, warnings
        >>> warnings.simplefilter("ignore", FutureWarning)  # newer servers load weights into new models only
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("start").result().path
        ...     training.load_state(path).result().path == path
        True
        """
        weights_access_token = self._runtime.connection.mask(weights_access_token)
        _note_load("")
        return self._load(path, weights_access_token, deadline, optimizer=False)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None, *, deadline: float | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        """Load weights and optimizer state into this model; see `load_state`.

        >>> import tinker_sync, warnings
        >>> warnings.simplefilter("ignore", FutureWarning)  # newer servers load weights into new models only
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("start").result().path
        ...     training.load_state_with_optimizer(path).result().path == path
        True
        """
        weights_access_token = self._runtime.connection.mask(weights_access_token)
        _note_load("_with_optimizer")
        return self._load(path, weights_access_token, deadline, optimizer=True)

    def _load(
        self, path: str, token: str | None, deadline: float | None, *, optimizer: bool
    ) -> APIFuture[LoadWeightsResponse]:
        check_state_path(path, f"load_state{'_with_optimizer' * optimizer}")
        request = LoadWeightsRequest(
            model_id=self._line.model_id, path=path, optimizer=optimizer, weights_access_token=token
        )
        return self._ordered("load_weights", request, LoadWeightsResponse, deadline, _deadlines.SAVE_S)

    def unload(self, *, deadline: float | None = None) -> APIFuture[UnloadModelResponse]:
        """Free the place of this model at the server, after all calls made before. Later calls raise.

        Checkpoints stay. Open servers have few places. They free the places of a session some minutes after
        its end, and `ServiceClient.close` frees the places of its models there.

        Args:
            deadline: the seconds after which the call is given up.

        The future fails with `UnsupportedByServerError` if the server has no such call.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     training.unload().result().model_id == training.model_id
        True
        """
        self._refuse()
        return self._line.submit(self._place.call(self._until(deadline, _deadlines.SAVE_S)))

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
            _deadlines.SAVE_S,
        )
        options: Any = {"retry_config": retry_config, "record_stability_info": record_stability_info}
        return SamplingClient._of_saved(self._runtime, saved, self._line, **options)

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
        options: Any = {"retry_config": retry_config, "record_stability_info": record_stability_info}
        return SamplingClient.create(self._runtime, model_path=model_path, **options)

    # -------------------------------------------------------------------------------------- about the model

    def get_info(self) -> GetInfoResponse:
        """Return the server's description of this model. Blocks; it is not ordered with the other calls.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     info = training.get_info()
        ...     info.model_name, info.lora_rank
        ('tinker-sync/tiny', 4)
        """
        request = GetInfoRequest(model_id=self.model_id)
        info: GetInfoResponse = self._runtime.server.call("get_info", request, usual_s=_deadlines.REST_S)
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

        The server names the tokenizer. A process loads it once.

        Args:
            backend: "transformers" returns an object of that library, which must be installed.

        Raises:
            TokenizerError: it cannot be loaded; the message names the files to provide.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     tokenizer = training.get_tokenizer()
        ...     tokenizer.decode(tokenizer.encode("Q: 23+45="))
        'Q: 23+45='
        """
        from tinker_sync.text.loading import get_tokenizer

        info = self.get_info()
        name = info.model_data.model_name or info.model_name or ""
        return get_tokenizer(name, info.model_data.tokenizer_id, backend=backend)

    def get_console_url(self) -> str:
        """Return the address of the web page of this run.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     training.get_console_url().endswith(training.model_id)
        True
        """
        return training_run_url(self.model_id)

    # -------------------------------------------------------------------------------------- one line of work

    def _ordered(
        self, name: str, request: Any, kind: type[T], deadline: float | None, usual_s: float
    ) -> APIFuture[T]:
        self._refuse()
        return self._line.submit(OrderedCall(self._line, name, request, kind, self._until(deadline, usual_s)))

    def _refuse(self) -> None:
        """Refuse a call from inside a loss, in a forked child, or on a client without a model."""
        if "tinker_sync.losses.two_passes" in sys.modules:  # without it, no loss is computed
            two_passes.refuse_inside_loss(self._line.queue)
        self._line.queue.refuse_inherited()
        if self._place.freed:
            self._place.refuse_freed()
        if not self._line.held.open:
            self._goes_ahead()

    def _until(self, deadline: float | None, usual_s: float = _deadlines.TRAIN_S) -> float:
        return self._runtime.server.give_up_at(deadline, usual_s)

    forward_backward_async = async_future(forward_backward)
    forward_async = async_future(forward)
    forward_backward_custom_async = async_future(forward_backward_custom)
    forward_custom_async = async_future(forward_custom)
    optim_step_async = async_future(optim_step)
    save_state_async = async_future(save_state, waits_with="verify")
    save_weights_for_sampler_async = async_future(save_weights_for_sampler)
    save_weights_external_async = async_future(save_weights_external)
    load_state_async = async_future(load_state)
    load_state_with_optimizer_async = async_future(load_state_with_optimizer)
    save_weights_and_get_sampling_client_async = async_result(save_weights_and_get_sampling_client)
    create_sampling_client_async = async_result(create_sampling_client)
    unload_async = async_future(unload)
    get_info_async = async_blocking(get_info)
    get_tokenizer_async = async_blocking(get_tokenizer)


def _note_load(suffix: str) -> None:
    warn_caller(_LOAD_NOTE.format(name=f"load_state{suffix}", suffix=suffix), FutureWarning)
