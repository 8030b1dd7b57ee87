"""`TrainingClient`: the calls that train one model, sent in the order in which they are made."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

from tinker_sync._base.left_out import Removed
from tinker_sync.clients import _deadlines
from tinker_sync.clients._async import async_blocking, async_future, async_result
from tinker_sync.clients._creation import ready, start
from tinker_sync.clients._weights import WeightCalls
from tinker_sync.errors import APIResponseValidationError, InvalidInputError, TinkerError
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.naming import names_requests
from tinker_sync.runtime.training import TrainingLine
from tinker_sync.types import (
    GetInfoRequest,
    GetInfoResponse,
    SamplingClientKind,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponseInternal,
    UnloadModelResponse,
)
from tinker_sync.types._console import training_run_url

if TYPE_CHECKING:
    from tinker_sync.clients._models import LoadedModel, NewModel
    from tinker_sync.clients.retry_config import RetryConfig
    from tinker_sync.clients.sampling import SamplingClient
    from tinker_sync.data.tokenizer import Tokenizer
    from tinker_sync.runtime.client_runtime import ClientRuntime


@names_requests
class TrainingClient(WeightCalls["TrainingClient"]):
    """A client that trains one model. A `ServiceClient` makes it. Any thread may use it.

    The object is also the future of its own creation, so it is usable at once. Calls that are made before the
    model exists are held and sent in order when it exists. If the creation fails, the futures of these calls
    fail and later calls raise.

    The methods that train, save and load return futures. Each call is sent at once, in the order of the
    calls, and answered later. Scripts may make further calls without waiting for results; the server keeps
    the order.

    If the server refuses a call, that call alone fails and later calls are still sent. An `optim_step` after
    a refused `forward_backward` thus applies the gradients that were accumulated before. A pass over many
    data is sent in several requests. If the server refuses one of them, the later ones are not sent, but the
    gradients of the accepted requests stay accumulated. The error counts these requests, and the next
    `optim_step` applies their gradients.

    If a call gets no answer, even after retries, the client cannot know if the server has received it. Its
    error is then `ambiguous`, and the client keeps a copy of the request. The next call of the client, also
    one that was already queued, first sends that request again, with the same bytes and the same number, and
    is sent only when the server has answered. The failed call then counts as done exactly once, also if it
    has several requests; only its result is lost, and the log says so. So do not repeat it, unless it is a
    forward pass, which changes nothing and whose error is not `ambiguous`. `recover` makes a new client from
    the last checkpoint instead.

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

    # -------------------------------------------------------------------------------------- going on

    if not TYPE_CHECKING:  # so that type checkers report them
        steps, unread, settled = Removed(), Removed(), Removed()

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
        asked = LoadedModel.of(runtime, request, until)
        return TrainingClient._make(runtime, asked)

    def unload(self, *, deadline: float | None = None) -> APIFuture[UnloadModelResponse]:
        """Free the place of this model at the server, after all calls made before. Later calls raise.

        Checkpoints stay. Open servers have few places, and free those of a session only some minutes after
        its end. So `ServiceClient.close` unloads the models of its clients on such servers.

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
        return self._line.unload(self._until(deadline, _deadlines.SAVE_S))

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
            _deadlines.SAVE_S,
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

    save_weights_and_get_sampling_client_async = async_result(save_weights_and_get_sampling_client)
    create_sampling_client_async = async_result(create_sampling_client)
    unload_async = async_future(unload)
    get_info_async = async_blocking(get_info)
    get_tokenizer_async = async_blocking(get_tokenizer)
