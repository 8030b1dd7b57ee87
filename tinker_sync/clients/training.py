"""`TrainingClient`: the calls that train one model, sent in the order they are made."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args, overload

from tinker_sync._lazy import LazyModule
from tinker_sync.clients import _deadlines
from tinker_sync.clients._arguments import check_loss_name, check_saving, check_step
from tinker_sync.clients._creation import ClientFuture, start
from tinker_sync.clients._twins import blocking_twin, future_twin, result_twin
from tinker_sync.errors import APIResponseValidationError, InvalidInputError, TinkerError
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.naming import names_requests
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
    from tinker_sync._clock import Clock
    from tinker_sync.clients._models import LoadedModel, NewModel
    from tinker_sync.clients._recorded import RecordedModel
    from tinker_sync.clients.retry_config import RetryConfig
    from tinker_sync.clients.sampling import SamplingClient
    from tinker_sync.losses import custom, handle, two_passes
    from tinker_sync.losses import data as loss_data
    from tinker_sync.losses.custom import CustomLossFn
    from tinker_sync.losses.handle import LossHandle
    from tinker_sync.runtime.core import Core
    from tinker_sync.text.tokenizer import Tokenizer
    from tinker_sync.types import LossFnType
else:  # losses of this process need more than most training does
    custom = LazyModule("tinker_sync.losses.custom")
    handle = LazyModule("tinker_sync.losses.handle")
    loss_data = LazyModule("tinker_sync.losses.data")
    two_passes = LazyModule("tinker_sync.losses.two_passes")

T = TypeVar("T")
LossFnConfig = Mapping[str, float | str]

_CURVE_POINTS: Final = 10_000

_LOAD_NOTE: Final = (
    "{name} is on its way out: servers load weights only into a new model. "
    "Use ServiceClient.create_training_client_from_state{suffix}."
)


@names_requests
class TrainingClient(ClientFuture["TrainingClient"]):
    """Trains one model. Made by a `ServiceClient`; threads may share it.

    It is the client and the future of itself, usable at once. Calls made before the model exists are sent
    when it does, in order. When it cannot be made, their futures fail, and later calls raise.

    Every call is sent at once, in the order of the calls, and answered later: methods return futures. Calls
    may be made ahead without waiting for results; the server keeps their order.

    A call that the server refuses fails alone: the calls behind it are sent, also an `optim_step` behind a
    `forward_backward`, which then applies the gradients that are there. A pass over many data is sent in
    several requests. When the server refuses one of them, no more are sent, but the gradients of those that
    it has accepted stay accumulated; the error counts them, and the next `optim_step` applies them.

    When an answer is lost for good, it is not known whether the server has the call. All later calls fail
    then, because a wrong order could change what is trained; `recover` goes on from the last checkpoint.

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

    def __init__(self, core: Core, model_seq_id: int) -> None:
        journal = core.session.journal
        self._line = TrainingLine(core, None if journal is None else journal.record_of(model_seq_id))
        super().__init__(core, self._line.held)
        self._place = ModelPlace(core, self._line)
        self._model_seq_id = model_seq_id
        self._user_metadata: dict[str, Any] | None = None
        self._curve: deque[tuple[float, float]] = deque(maxlen=_CURVE_POINTS)

    @classmethod
    def _make(cls, core: Core, asked: NewModel | LoadedModel | RecordedModel) -> TrainingClient:
        """Return a client at once, and have its model made."""
        client = cls(core, asked.model_seq_id)
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
        """The loss of each `forward_backward` that has ended, behind the time of its result in seconds.

        That is the metric `loss:mean` where there is one, else `loss:sum`. The last ten thousand are kept.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     datum = tinker_sync.Datum(tinker_sync.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
        ...     passed = training.forward_backward([datum], "cross_entropy").result()
        ...     len(training.curve), training.curve[0][1] > 0
        (1, True)
        """
        return list(self._curve)

    def _drawn(self, passed: APIFuture[ForwardBackwardOutput]) -> APIFuture[ForwardBackwardOutput]:
        """Add a pass to the curve when it has ended."""
        passed.when_done(partial(_note_loss, self._curve, self._core.clock))
        return passed

    def __reduce__(self) -> Any:
        raise TypeError(
            "a TrainingClient belongs to the threads of its process and cannot be pickled or copied; "
            "save_state here, and create_training_client_from_state_with_optimizer in the other process"
        )

    def _name(self) -> str:
        return self._line.model_id

    # -------------------------------------------------------------------------------------- steps

    def steps(self, stop: int) -> Iterator[int]:
        """Yield the numbers of the steps up to `stop`, for the loop of a training.

        With a journal, a script that is started again begins with the step that was under way: the calls that
        it had made in that step are not done twice. Where the session is gone, it begins behind the last
        checkpoint that was saved in a step. Without a journal this is `range(stop)`.

        Args:
            stop: the number of steps in all.

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
            for future in list(record.early):  # numbers are settled once these have ended
                wait([future])
            first = record.first_step(self._line.queue.next_number) if record.step is None else record.step
        for step in range(first, stop):
            if record is not None:
                record.step = step
            yield step

    @property
    def unread(self) -> tuple[APIFuture[Any], ...]:
        """The results that had not arrived when the process of before ended, in the order of the requests.

        A pass that was sent in several requests has several. For clients of `ServiceClient.attach`.

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
        """What became of requests that the journal could not know, in words; see `ServiceClient.attach`.

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
            data: the examples; many are sent in several requests and their results combined.
            loss_fn: such as "cross_entropy" or "importance_sampling", or a handle of `create_custom_loss`.
            loss_fn_config: settings of the loss.
            deadline: seconds until to give up waiting for the result.

        Of the metrics in the result, ``loss:sum`` is the server's, and ``loss:mean`` that sum for each token
        whose weight or advantage is not 0. Inputs for losses of this process, `reference_logprobs`, are not
        sent.

        Raises:
            InvalidInputError: the data cannot be sent; nothing was.

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

        A forward pass gives the log-probabilities of the target tokens; the loss is computed from them on a
        worker thread of this client; a backward pass carries its gradients to the model. Nothing else of this
        training client is sent between the two, from whichever thread: calls made meanwhile come behind the
        backward pass. Where the loss fails or the call is cancelled before the backward pass is being sent,
        that one is left out, later calls go on, and nothing was trained.

        The kind of loss is said by a mark. Unmarked, it takes ``(data, logprobs)`` with torch tensors and
        returns ``(loss, metrics)``. Marked with `tinker_sync.losses.numpy_loss`, it takes numpy arrays and
        returns ``(loss, metrics, gradients)``; torch is not needed. In either case `logprobs` has an entry
        for each datum, dense and of the shape of its `target_tokens`.

        Of the metrics in the result, ``loss:sum`` is the value of the loss, ``surrogate_loss:sum`` what the
        server made of the backward pass, and those of the loss come as it named them.

        Args:
            data: the examples, with `target_tokens`; the loss may read any other input they carry.
            loss_fn: the loss, or what `ServiceClient.create_custom_loss` made of one.
            loss_type_input: of no effect; the loss always takes log-probabilities.
            deadline: seconds until to give up; a loss that runs is not interrupted, but comes too late.

        Raises:
            InvalidInputError: the data cannot be sent; nothing was. What is wrong with the values that the
                loss returns is raised by the future.
            MissingExtraError: the loss is of the kind for torch, which is not installed.

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
        return self._drawn(self._line.submit(call))

    def forward_custom(
        self, data: Sequence[Datum], loss_fn: CustomLossFn, *, deadline: float | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute a loss of your own without gradients, to evaluate on held-out data.

        One forward pass, and the loss on a worker thread of this client; nothing is trained. The result has
        the log-probabilities of the target tokens, ``loss:sum``, ``loss:mean`` and the metrics of the loss.

        Args:
            data: the examples, with `target_tokens`; the loss may read any other input they carry.
            loss_fn: the loss, as for `forward_backward_custom`. Gradients that it returns are not used.
            deadline: seconds until to give up.

        Raises:
            InvalidInputError: the data cannot be sent; nothing was. The future raises what is wrong with the
                values that the loss returns.
            MissingExtraError: the loss works in torch, which is not installed.

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
        if not isinstance(loss_fn, str) and isinstance(loss_fn, handle.LossHandle):
            if forward_only or config:
                raise TypeError(
                    "a loss of create_custom_loss is for forward_backward, without loss_fn_config"
                )
            return self._drawn(self._line.submit(custom.custom_call(self._line, data, loss_fn, deadline_at)))
        check_loss_name(loss_fn)
        listed = listed_data(data)
        if loss_fn != "custom":
            listed = loss_data.without_reference(listed)
        whole = ForwardBackwardInput(listed, loss_fn, config)
        passed = self._line.submit(PassCall(self._line, name, whole, deadline_at, forward_only=forward_only))
        return passed if forward_only else self._drawn(passed)

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
            optim_params: the optimizer's settings for this step.
            adam_params: the older name for it.
            deadline: seconds until to give up waiting for the result.

        Raises:
            ValueError: both were given.
            TypeError: neither was, or something else.

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
        request = OptimStepRequest(optim_params=params, model_id=self._line.model_id)
        return self._ordered("optim_step", request, OptimStepResponse, deadline, _deadlines.TRAIN_S)

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
        *,
        deadline: float | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        """Save weights and optimizer state under a name, to train on from later.

        Args:
            name: of the checkpoint.
            ttl_seconds: how long it is kept; None: as long as the server keeps any.
            overwrite: replace one of the same name, its metadata included.
            user_metadata: your own words about it.
            deadline: seconds until to give up waiting for the result.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     saved = training.save_state("step-100", user_metadata={"step": "100"}).result()
        ...     saved.path.rpartition(":")[2]
        '0/weights/step-100'
        """
        check_saving(name, ttl_seconds, "save_state")
        request = SaveWeightsRequest(
            model_id=self._line.model_id,
            path=name,
            ttl_seconds=ttl_seconds,
            overwrite=overwrite,
            user_metadata=user_metadata,
        )
        saved = self._ordered("save_weights", request, SaveWeightsResponse, deadline, _deadlines.SAVE_S)
        saved.when_done(self._line.note_saved)
        return saved

    def take_over(self) -> None:
        """Go on with this client in a forked child, as its only owner.

        A forked child has a copy of the client, whose calls are refused: both copies would send different
        calls under the same numbers. The parent cannot know that the child has taken over, so it must not
        use its copy any more. In the process that made the client this method does nothing.

        Raises:
            TinkerError: the client was not ready when the process was forked.
            EarlierCallFailedError: calls were under way then; `recover` goes on from the last checkpoint.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4).result()
        ...     training.take_over()
        """
        if not self._held.open:
            self._refuse_foreign_wait()
        self._line.queue.take_over()

    def recover(self, *, deadline: float | None = None) -> TrainingClient:
        """Return a new training client for the last state that this client saved, or was made of, at once.

        An `EarlierCallFailedError` asks for it: the server may or may not have a call, and no later call of
        this client can be sent. The steps since that state have to be repeated. The model of this client
        stays as it is.

        Args:
            deadline: seconds until to give up.

        Raises:
            TinkerError: this client has saved no state, and was not made of one.

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
        core = self._core
        until = _deadlines.deadline_at(
            core.clock.now(), deadline, core.settings.deadline_s, _deadlines.CREATE_S
        )
        return TrainingClient._make(core, LoadedModel.of(core, request, until))

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
            name: of the export.
            ttl_seconds: how long it is kept.
            age_encryption_recipients: public keys of those who shall be able to read it.
            deadline: seconds until to give up waiting for the result.

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
        """Load weights into this model; an older way that newer servers accept for new models only.

        >>> import tinker_sync, warnings
        >>> warnings.simplefilter("ignore", FutureWarning)  # newer servers load weights into new models only
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("start").result().path
        ...     training.load_state(path).result().path == path
        True
        """
        weights_access_token = self._core.hide(weights_access_token)
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
        weights_access_token = self._core.hide(weights_access_token)
        _note_load("_with_optimizer")
        return self._load(path, weights_access_token, deadline, optimizer=True)

    def _load(
        self, path: str, token: str | None, deadline: float | None, *, optimizer: bool
    ) -> APIFuture[LoadWeightsResponse]:
        request = LoadWeightsRequest(
            model_id=self._line.model_id, path=path, optimizer=optimizer, weights_access_token=token
        )
        return self._ordered("load_weights", request, LoadWeightsResponse, deadline, _deadlines.SAVE_S)

    def unload(self, *, deadline: float | None = None) -> APIFuture[UnloadModelResponse]:
        """Free the place of this model at the server, behind all calls made before. Later calls raise.

        Checkpoints stay. Open servers have few places. They free them by themselves some minutes after the
        end of a session, and `ServiceClient.close` frees those of its models there.

        Args:
            deadline: seconds until to give up waiting for the result.

        The future fails with `UnsupportedByServerError` where the server has no such call.

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
        """Save the present weights for this session only. Return a client that samples from them, at once.

        The save is ordered with the other calls of this client.

        Args:
            name: of no effect; such weights have none.
            retry_config: how often and how patiently samples are tried again.
            record_stability_info: have the server keep what stable training needs of each sample.
            kind: "snapshot" samples from the weights of this save; "inflight" goes on to those of later
                inflight saves of this model.

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
            # Drawn once: a repetition must be the same request.
            sampling_session_seq_id=self._core.session.next_sampling_session_seq_id(),
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
        return SamplingClient._of_saved(self._core, saved, self._line, **options)

    def create_sampling_client(
        self, model_path: str, retry_config: RetryConfig | None = None, record_stability_info: bool = False
    ) -> SamplingClient:
        """Return a client that samples from saved weights; as `ServiceClient.create_sampling_client`.

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
        return SamplingClient.create(self._core, model_path=model_path, **options)

    # -------------------------------------------------------------------------------------- about the model

    def get_info(self) -> GetInfoResponse:
        """Return what the server knows of this model. Blocks; it is not ordered with the other calls.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     info = training.get_info()
        ...     info.model_name, info.lora_rank
        ('tinker-sync/tiny', 4)
        """
        request = GetInfoRequest(model_id=self.model_id)
        info: GetInfoResponse = self._core.call("get_info", request, usual_s=_deadlines.REST_S)
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
        """The tokenizer of this model. Blocks: asks the server which one, and loads it once in a process.

        Args:
            backend: "transformers" gives an object of that library, which has to be installed.

        Raises:
            TokenizerError: it is not to be had; the text says which files to put where.

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
        """Where this run is shown in a browser.

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
        self._place.refuse_freed()
        self._goes_ahead()

    def _until(self, deadline: float | None, usual_s: float = _deadlines.TRAIN_S) -> float:
        core = self._core
        return _deadlines.deadline_at(core.clock.now(), deadline, core.settings.deadline_s, usual_s)

    forward_backward_async = future_twin(forward_backward)
    forward_async = future_twin(forward)
    forward_backward_custom_async = future_twin(forward_backward_custom)
    forward_custom_async = future_twin(forward_custom)
    optim_step_async = future_twin(optim_step)
    save_state_async = future_twin(save_state)
    save_weights_for_sampler_async = future_twin(save_weights_for_sampler)
    save_weights_external_async = future_twin(save_weights_external)
    load_state_async = future_twin(load_state)
    load_state_with_optimizer_async = future_twin(load_state_with_optimizer)
    save_weights_and_get_sampling_client_async = result_twin(save_weights_and_get_sampling_client)
    create_sampling_client_async = result_twin(create_sampling_client)
    unload_async = future_twin(unload)
    get_info_async = blocking_twin(get_info)
    get_tokenizer_async = blocking_twin(get_tokenizer)


def _note_load(suffix: str) -> None:
    warnings.warn(_LOAD_NOTE.format(name=f"load_state{suffix}", suffix=suffix), FutureWarning, stacklevel=3)


def _note_loss(
    curve: deque[tuple[float, float]], clock: Clock, passed: APIFuture[ForwardBackwardOutput]
) -> None:
    """Keep the loss of a pass, in the thread that ended it. Nothing of the client is held until then."""
    if passed.cancelled() or passed.failure is not None:
        return
    metrics = passed.result().metrics
    loss = metrics.get("loss:mean", metrics.get("loss:sum"))
    if loss is not None:
        curve.append((clock.now(), loss))
