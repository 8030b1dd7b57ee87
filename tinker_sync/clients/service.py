"""`ServiceClient`: the client that makes all other clients and owns their session.

Its methods import the training and REST clients on first use, so that a program that only samples does not
load them.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from tinker_sync import types
from tinker_sync._base.events import ModelNamed, TokensUsed
from tinker_sync._base.left_out import Removed, refuse_arguments
from tinker_sync._base.log import Log
from tinker_sync._base.naming import names_requests
from tinker_sync._base.spelling import describe_unknown_parameter, find_closest
from tinker_sync.clients._arguments import check_credential, check_is_path, check_service
from tinker_sync.clients._async import async_blocking, async_future, async_result
from tinker_sync.clients._base import CREATE_S, REST_S, BaseClient
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.config import Settings, Timeout
from tinker_sync.config.settings import MAX_RETRIES
from tinker_sync.errors import ClientClosedError, TinkerError, UnsupportedByServerError
from tinker_sync.insight.meter import Meter
from tinker_sync.runtime import raw
from tinker_sync.runtime.client import (
    CLOSE_LIMIT_S,
    EXIT_LIMIT_S,
    INTERRUPTED_LIMIT_S,
    PENDING_LIMIT_S,
    ClientRuntime,
)
from tinker_sync.runtime.lazy import Lazy
from tinker_sync.runtime.session import Session
from tinker_sync.types._console import session_url, sessions_url

if TYPE_CHECKING:
    import requests
    from typing_extensions import Self

    from tinker_sync.clients.rest import RestClient
    from tinker_sync.clients.sampling import RetryConfig
    from tinker_sync.clients.training import TrainingClient
    from tinker_sync.data.tokenizer import Tokenizer
    from tinker_sync.insight import Budget, PriceTable, Usage
    from tinker_sync.insight.metrics import Metrics
    from tinker_sync.insight.recording import Recording
    from tinker_sync.insight.spans import Spans
    from tinker_sync.loop.checkpoints import LoopCheckpoints
    from tinker_sync.loop.recorder import StepRecorder
    from tinker_sync.losses.handle import LossHandle, PerDatumLossFn
    from tinker_sync.runtime.futures import APIFuture
    from tinker_sync.runtime.polls import QueueReport
    from tinker_sync.runtime.rate_limiter import RateLimiter
    from tinker_sync.types import (
        CustomLossInputRank,
        GetServerCapabilitiesResponse,
        LoadWeightsRequest,
        OptimizerConfig,
    )
    from tinker_sync.wire.dialect import Dialect

_log = Log("tinker_sync.clients")


@names_requests
class ServiceClient(BaseClient):
    """The entry point: it makes all other clients, and owns the session that they share. Thread-safe.

    It connects on the first request. Close it with `close` or a ``with`` block; without either, the session
    ends when the script exits.

    Args:
        user_metadata: metadata of your own for the session.
        project_id: the project of the session; None: `TINKER_PROJECT_ID`.
        display_name: the name of the session in lists.
        base_url: the server; "local" starts one on this machine for this process, with the first request;
            None: `TINKER_BASE_URL`, else the hosted service.
        api_key: the key; None: `TINKER_API_KEY`, else from `TINKER_CREDENTIAL_CMD`, else the stored one.
        default_headers_overrides: headers of every request; the older name of `default_headers`.
        default_headers: headers of every request.
        timeout: the read timeout, seconds: how long the server may stay silent; a pair sets the connect and
            the read timeout.
        max_retries: the retries of a call; None: ten, or as many as fit into five minutes if that is more.
        session: a `requests.Session` whose headers, proxies, certificates, basic auth and cookies are used.
        deadline: the default deadline of calls, seconds; None: five minutes to twelve hours, by kind of call.
        dialect: the calls and encodings that the server supports: "auto" to find out, "proto" for the present
            protocol, "json" for an open server without protobuf, or a `Dialect`.
        on_queue_state: a callback for a `QueueReport` each time the server reports on a queued request; it
            runs on a thread of the client.
        rate_limiter: a rate limiter for this client alone; None: the one that all clients of this process
            share for this server and key, because the server counts their requests together.

    Raises:
        ConfigurationError: an argument or an environment variable has a wrong type or value.
        CredentialError: there is no key for the hosted service.
        TypeError: an unknown keyword resembles a parameter, or an earlier version had it. Other unknown
            keywords cause a warning.
    """

    def __init__(
        self,
        user_metadata: dict[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        default_headers: Mapping[str, str] | None = None,
        timeout: Timeout | float | tuple[float, float] | None = None,
        max_retries: int | None = None,
        session: requests.Session | None = None,
        deadline: float | None = None,
        dialect: Literal["auto", "proto", "json"] | Dialect = "auto",
        on_queue_state: Callable[[QueueReport], object] | None = None,
        rate_limiter: RateLimiter | None = None,
        **unknown: NoReturn,  # type checkers report every keyword that is not above
    ) -> None:
        if unknown:
            _refuse_mistyped(unknown)
            warnings.warn(
                f"ServiceClient: {', '.join(sorted(unknown))} has no meaning here and is ignored",
                FutureWarning,
                stacklevel=2,
            )
        check_service(
            user_metadata=user_metadata,
            timeout=timeout,
            deadline=deadline,
            on_queue_state=on_queue_state,
        )
        settings = Settings.resolve(
            base_url=base_url,
            api_key=api_key,
            project_id=project_id,
            default_headers={**(default_headers or {}), **(default_headers_overrides or {})},
            timeout=timeout,
            max_retries=MAX_RETRIES if max_retries is None else max_retries,
            session=session,
            deadline_s=deadline,
            dialect=dialect,
        )
        check_credential(settings)
        if settings.base_url.endswith("/api/v1"):
            # A warning only: the URL may be right behind a proxy with such a prefix.
            warnings.warn(
                "the base URL ends with /api/v1, which every call adds by itself; leave it out", stacklevel=2
            )
        self._runtime = ClientRuntime(
            settings,
            session=Session(
                user_metadata=user_metadata,
                project_id=settings.project_id,
                display_name=display_name,
            ),
            limiter=rate_limiter,
        )
        if on_queue_state is not None:
            self._runtime.notices.listen(on_queue_state)
        self._meter = Meter(_name_asker(self._runtime))  # counts the tokens of the results that arrive
        self._runtime.connection.events.listen(self._meter, TokensUsed, ModelNamed)
        self._recordings: list[Recording] = []
        self._metrics: Lazy[Metrics] = Lazy()

    if not TYPE_CHECKING:  # so that type checkers report them
        attach, trainings, reconcile = Removed(), Removed(), Removed()

    # -------------------------------------------------------------------------------------- clients

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int | None = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: OptimizerConfig | None = None,
        *,
        deadline: float | None = None,
    ) -> TrainingClient:
        """Create a new LoRA model, and return at once the client that trains it.

        `result()` and `await` wait until the model exists, and raise the error if its creation fails.

        Args:
            base_model: the model to fine-tune; see `get_server_capabilities`.
            rank: the rank of the LoRA matrices. With 0, a server that supports full fine-tuning trains all
                weights; with None, the request has no LoRA settings, which is how other such servers are
                asked for that.
            seed: the seed for the initial values of these matrices; None: the server draws one.
            train_mlp: train the MLP layers.
            train_attn: train the attention layers.
            train_unembed: train the unembedding.
            user_metadata: metadata of your own for this run.
            optimizer: the kind of optimizer; None: AdamW.
            deadline: seconds until the call gives up; None: the default of the client.

        Raises:
            AssertionError: `train_mlp`, `train_attn` and `train_unembed` are all False.
            InvalidInputError: `base_model` is not the name of a model, or another argument has a wrong type
                or value.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny")
        ...     training.result() is training
        True
        """
        assert train_mlp or train_attn or train_unembed, (  # noqa: S101  # scripts catch AssertionError
            "create_lora_training_client: at least one of train_mlp, train_attn, train_unembed must be true"
        )
        from tinker_sync.clients._models import NewModel
        from tinker_sync.clients.training import TrainingClient

        flags = {"train_unembed": train_unembed, "train_mlp": train_mlp, "train_attn": train_attn}
        lora = None if rank is None else types.LoraConfig(rank=rank, seed=seed, **flags)
        model = NewModel.of(self._runtime, base_model, lora, user_metadata, optimizer, self._until(deadline))
        return TrainingClient._make(self._runtime, model)

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: OptimizerConfig | None = None,
        *,
        deadline: float | None = None,
    ) -> TrainingClient:
        """Create a new model with the weights of a checkpoint and a fresh optimizer.

        Returns at once the client that trains the new model.

        Args:
            path: the path of the checkpoint, ``tinker://…/weights/…``.
            base_model: replaces the base model of the checkpoint; it must fit the weights.
            user_metadata: metadata of your own for this run.
            weights_access_token: a key of another account that may read the checkpoint.
            optimizer: the kind of optimizer; None: AdamW.
            deadline: seconds until the call gives up; None: the default of the client.

        Raises:
            InvalidInputError: the path cannot be that of a checkpoint for training, or another argument has
                a wrong type or value.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("step-100").result().path
        ...     again = service.create_training_client_from_state(path, user_metadata={"from": "step-100"})
        ...     again.get_info().lora_rank
        4
        """
        check_is_path(path, "create_training_client_from_state")
        weights_access_token = self._runtime.connection.mask(weights_access_token)
        load = types.LoadWeightsRequest(
            path=path,
            optimizer=False,
            base_model=base_model,
            user_metadata=user_metadata,
            weights_access_token=weights_access_token,
            optimizer_config=optimizer,
        )
        return self._load(load, deadline)

    def create_training_client_from_state_with_optimizer(
        self,
        /,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        *,
        deadline: float | None = None,
        **removed: NoReturn,
    ) -> TrainingClient:
        """Create a new model with the weights and the optimizer state of a checkpoint.

        Returns at once the client that trains the new model. Arguments and errors as in
        `create_training_client_from_state`.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("step-100").result().path
        ...     resumed = service.create_training_client_from_state_with_optimizer(path)
        ...     resumed.get_info().lora_rank
        4
        """
        refuse_arguments("create_training_client_from_state_with_optimizer", removed, unknown=True)
        check_is_path(path, "create_training_client_from_state_with_optimizer")
        weights_access_token = self._runtime.connection.mask(weights_access_token)
        load = types.LoadWeightsRequest(
            path=path,
            optimizer=True,
            base_model=base_model,
            user_metadata=user_metadata,
            weights_access_token=weights_access_token,
        )
        return self._load(load, deadline)

    def _load(self, load: LoadWeightsRequest, deadline: float | None) -> TrainingClient:
        from tinker_sync.clients._models import LoadedModel
        from tinker_sync.clients.training import TrainingClient

        asked = LoadedModel.of(self._runtime, load, self._until(deadline))
        return TrainingClient._make(self._runtime, asked)

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """Return at once a client that samples from saved weights or from a base model.

        `result()` and `await` wait until the sampler exists at the server.

        Args:
            model_path: the weights, ``tinker://…/sampler_weights/…``.
            base_model: a base model to sample from.
            retry_config: settings of the retries; None: `RetryConfig()`.
            record_stability_info: let the server keep, for each sample, the data that stable training needs.

        Raises:
            InvalidInputError: neither `model_path` nor `base_model` is given, or the path is not valid.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     prompt = tinker_sync.ModelInput.from_ints([1, 2])
        ...     sampled = sampling.sample(prompt, 1, tinker_sync.SamplingParams(max_tokens=3)).result()
        ...     len(sampled.sequences[0].tokens) <= 3
        True
        """
        return SamplingClient.create(
            self._runtime,
            model_path=model_path,
            base_model=base_model,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    def create_rest_client(self) -> RestClient:
        """Return a client for runs, checkpoints and sessions on the same server, with the same key.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     service.create_rest_client().get_server_capabilities().result() is not None
        True
        """
        from tinker_sync.clients.rest import RestClient

        return RestClient(self._runtime)

    def create_custom_loss(
        self,
        fn: PerDatumLossFn,
        input_ranks: Mapping[str, CustomLossInputRank],
        *,
        deadline: float | None = None,
    ) -> APIFuture[LossHandle]:
        """Create a loss from a function of torch tensors, for `TrainingClient.forward_backward_custom`.

        The server computes the loss if it supports such losses; otherwise this process does.

        The function is traced once and not called again. It takes ``logprobs`` and, by name, further
        `loss_fn_inputs` of a datum. It returns a scalar and a dict of scalar metrics, named
        ``custom/NAME:sum`` or ``custom/NAME:mean``. The losses of the data are summed. The function may call
        only functions of torch and math, and must not branch on values of tensors. This method blocks until
        the session exists.

        Args:
            fn: the function; its name becomes the name of the loss.
            input_ranks: the number of dimensions of each parameter, 0 to 2.
            deadline: seconds until the call gives up; None: the default of the client.

        Raises:
            InvalidInputError: the function breaks a rule, and the message shows the line; or the session has
                this loss already.
            MissingExtraError: torch is not installed.
            TinkerError: the session could not be created.

        >>> import tinker_sync, torch
        >>> def squared(logprobs, weights):
        ...     loss = (weights * logprobs**2).sum()
        ...     return loss, {"custom/squared:sum": loss}
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     loss = service.create_custom_loss(squared, {"logprobs": 1, "weights": 1}).result()
        ...     inputs = {"target_tokens": [2, 3], "weights": [1.0, 1.0]}
        ...     datum = tinker_sync.Datum(tinker_sync.ModelInput.from_ints([1, 2]), inputs)
        ...     passed = training.forward_backward_custom([datum], loss).result()
        >>> passed.metrics["loss:sum"] > 0
        True
        """
        from tinker_sync.clients._models import create_loss

        return create_loss(self._runtime, fn, input_ranks, self._until(deadline))

    def copy_weights(
        self, path: str, *, ttl_seconds: int | None = None, weights_access_token: str | None = None
    ) -> APIFuture[str]:
        """Copy a checkpoint into the project of this client. The future has the path of the copy.

        Args:
            path: the path of the checkpoint.
            ttl_seconds: the number of seconds after which the copy is deleted.
            weights_access_token: a key of another account that may read the checkpoint.

        Raises:
            InvalidInputError: this client has no project.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local", project_id="project-2") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("final").result().path
        ...     copy = service.copy_weights(path, ttl_seconds=7200).result()
        >>> copy.startswith("tinker://"), copy != path
        (True, True)
        """
        weights_access_token = self._runtime.connection.mask(weights_access_token)
        return self.create_rest_client().copy_weights(
            path, ttl_seconds=ttl_seconds, weights_access_token=weights_access_token
        )

    def _until(self, deadline: float | None) -> float:
        return self._runtime.server.give_up_at(deadline, CREATE_S)

    # -------------------------------------------------------------------------------------- the service

    def request(
        self,
        method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"],
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        promise: bool = False,
        query: Mapping[str, Any] | None = None,
        extra_headers: Mapping[str, str] | None = None,
        deadline: float | None = None,
    ) -> APIFuture[Any]:
        """Make a call that this client has no method for.

        The request carries the key and the headers of the client. Reads are retried; other calls are retried
        only while the server certainly has not received them, unless the call is a known one that may be
        repeated. Calls of a model belong in its queue: see `TrainingClient.request`.

        Args:
            method: the HTTP method.
            path: the path below the base URL.
            body: the fields of the JSON body.
            promise: the server answers with a request id; the future ends with the result of that request.
                Cancelling the future cancels the request at the server too, if the server can.
            query: the query parameters.
            extra_headers: further headers of the request.
            deadline: seconds until the call gives up; None: the default of the client.

        Returns:
            The future of the parsed JSON of the answer, or of the result.

        Raises:
            InvalidInputError: an argument cannot be sent; nothing was sent.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     answer = service.request("GET", "/api/v1/get_server_capabilities").result()
        ...     answer["supported_models"][0]["model_name"]
        'tinker-sync/tiny'
        """
        name = raw.checked_name(method, path)
        if body is not None:
            body = raw.checked_body("request: body", body, numbered=False)
            raw.refuse_lost(name)
        if query is not None:
            query = raw.checked_query(query)
        headers = raw.checked_headers("request: extra_headers", extra_headers)
        deadline_at = self._runtime.server.give_up_at(deadline, CREATE_S if promise else REST_S)
        return raw.request(
            self._runtime, name, body, promise=promise, query=query, headers=headers, deadline_at=deadline_at
        )

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        """Return the models that the server offers. Blocks.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     [model.model_name for model in service.get_server_capabilities().supported_models]
        ['tinker-sync/tiny']
        """
        capabilities: GetServerCapabilitiesResponse = self._runtime.server.call(
            "get_server_capabilities", usual_s=REST_S
        )
        return capabilities

    def get_console_url(self) -> str:
        """Return the address of the web page of this session, or of all sessions until this one exists.

        Only the hosted service has such pages. For other servers, return the base URL.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     url = service.get_console_url()
        >>> url.startswith("http")
        True
        """
        settings = self._runtime.settings
        if not settings.is_vendor_host:
            return settings.base_url
        session_id = self._runtime.server.known_session_id
        return sessions_url() if session_id is None else session_url(session_id)

    @property
    def openai_base_url(self) -> str:
        """The base URL for OpenAI's client at the hosted service, which takes the same key. A beta there.

        Raises:
            UnsupportedByServerError: the server is another one; `sampling.endpoint()` serves such chats.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(api_key="tml-example") as service:
        ...     service.openai_base_url
        'https://tinker.thinkingmachines.dev/services/tinker-prod/oai/api/v1'
        """
        return self._hosted_address("openai_base_url", "/oai/api/v1")

    @property
    def anthropic_base_url(self) -> str:
        """The base URL for Anthropic's client at the hosted service, which takes the same key. A beta there.

        Raises:
            UnsupportedByServerError: the server is another one; `sampling.endpoint()` serves such chats.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(api_key="tml-example") as service:
        ...     service.anthropic_base_url
        'https://tinker.thinkingmachines.dev/services/tinker-prod/anthropic/api'
        """
        return self._hosted_address("anthropic_base_url", "/anthropic/api")

    def _hosted_address(self, name: str, path: str) -> str:
        settings = self._runtime.settings
        if not settings.is_vendor_host:
            raise UnsupportedByServerError(
                f"{name}: only the hosted service has this address; with other servers, use "
                f"`with sampling.endpoint() as gateway`, and gateway.{name}()",
                feature=name,
            )
        return settings.base_url + path

    @overload
    def get_tokenizer(self, model: str, *, backend: Literal["tokenizers"] = "tokenizers") -> Tokenizer: ...

    @overload
    def get_tokenizer(self, model: str, *, backend: Literal["transformers"]) -> Any: ...

    def get_tokenizer(
        self, model: str, *, backend: Literal["tokenizers", "transformers"] = "tokenizers"
    ) -> Any:
        """Return the tokenizer of a model. Blocks. The process keeps the last 32 tokenizers in memory.

        Args:
            model: the name of a base model, or the path of weights, ``tinker://…``, whose base model the
                server names.
            backend: "transformers" returns an object of that library, which must be installed.

        Raises:
            TokenizerError: the tokenizer cannot be loaded; the message names the files to provide.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     tokenizer = service.get_tokenizer("tinker-sync/tiny")
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("final").result().path
        ...     tokenizer.decode([20, 223, 14]), service.get_tokenizer(path) is tokenizer
        ('2 ,', True)
        """
        from tinker_sync.data.tokenizer import get_tokenizer

        if model.startswith("tinker://"):
            model = self.create_rest_client().get_weights_info_by_tinker_path(model).result().base_model
        return get_tokenizer(model, backend=backend)

    # -------------------------------------------------------------------------------------- usage

    def usage(self, *, prices: PriceTable | None = None) -> Usage:
        """Return the tokens used so far, by model: trained, prompt, cached prompt and sampled.

        The client counts them from the results that have arrived. A price that is missing from the table is
        reported as unknown. If the client does not know the base model of a model, such as one from a
        checkpoint, it asks the server for the name, which blocks.

        Args:
            prices: the prices of tokens; None: those in the file that `TINKER_PRICES` names, else in
                `~/.tinker/prices.json`.

        Raises:
            InvalidInputError: `prices` is no price table.
            ConfigurationError: the file of prices cannot be read.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     datum = tinker_sync.Datum(tinker_sync.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
        ...     passed = training.forward_backward([datum], "cross_entropy").result()
        ...     service.usage().tokens.trained
        2
        """
        from tinker_sync.insight import Usage
        from tinker_sync.insight.prices import table_of

        return Usage.of(self._meter.by_model(), table_of(prices), self._runtime.server.known_session_id)

    def budget(
        self, usd: float | None = None, tokens: int | None = None, *, prices: PriceTable | None = None
    ) -> Budget:
        """Return a limit for the tokens or dollars used in a ``with`` block.

        A call that could exceed the budget is not sent: it raises `BudgetExceededError`, or its future fails
        with this error if its client is not ready yet. Calls under way count with their highest possible use,
        samples with `max_tokens` each. The limit applies to all clients of this service client.

        Args:
            usd: the most dollars; a call whose price is unknown raises `ConfigurationError`.
            tokens: the most tokens of all kinds.
            prices: as for `usage`.

        Raises:
            InvalidInputError: no limit is given, one is no number from 0 on, or `prices` is no price table.
            ConfigurationError: the file of prices cannot be read.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     prompt = tinker_sync.ModelInput.from_ints([1, 2])
        ...     with service.budget(tokens=100):
        ...         try:
        ...             sampling.sample(prompt, 1, tinker_sync.SamplingParams(max_tokens=1000)).result()
        ...         except tinker_sync.BudgetExceededError as error:
        ...             print(type(error).__name__)
        BudgetExceededError
        """
        from tinker_sync.insight import Budget
        from tinker_sync.insight.prices import table_of

        return Budget(
            usd=usd,
            tokens=tokens,
            prices=None if usd is None else table_of(prices),
            base_model=self._meter.base_model,
            attach=self._runtime.spending.attach,
        )

    # -------------------------------------------------------------------------------------- loops

    def explain(self) -> Recording:
        """Start and return a recording of the time that calls take. `str(recording)` is an explanation.

        The explanation shows, for each method, the time in the queue, on the wire, at the server and in
        decoding. It also lists retries and pauses, and suggests changes. The recording goes on until it or
        this client is closed.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service, service.explain() as recording:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     prompt = tinker_sync.ModelInput.from_ints([1, 2])
        ...     sampled = sampling.sample(prompt, 1, tinker_sync.SamplingParams(max_tokens=3)).result()
        >>> "SamplingClient.sample" in str(recording)
        True
        """
        return self._record(None)

    def trace(self, path: str | os.PathLike[str]) -> Recording:
        """Start a recording as `explain` does. Closing the recording, or this client, writes the trace.

        Args:
            path: the file of the trace, for https://ui.perfetto.dev and chrome://tracing.

        >>> import json, pathlib, tempfile, tinker_sync
        >>> file = pathlib.Path(tempfile.mkdtemp(), "t.json")
        >>> with tinker_sync.ServiceClient(base_url="local") as service, service.trace(file):
        ...     models = service.create_rest_client().get_server_capabilities().result()
        >>> len(json.loads(file.read_text())["traceEvents"]) > 3
        True
        """
        return self._record(path)

    def _record(self, path: str | os.PathLike[str] | None) -> Recording:
        from tinker_sync.insight.recording import Recording

        self._runtime.lifecycle.refuse_if_leaving()
        runtime = self._runtime
        recording = Recording(runtime.connection.events, runtime.clock, path)
        self._recordings.append(recording)
        return recording

    def metrics(self) -> Metrics:
        """Return counters and times of the calls of this client: how they ended, and how long they took.

        The first call begins to count; later ones return the same object, whose figures go on. `str(metrics)`
        is a table, `to_dict` and `to_prometheus` are for monitors.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     metrics = service.metrics()
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     stepped = training.optim_step(tinker_sync.AdamParams(learning_rate=1e-4)).result()
        ...     service.metrics() is metrics
        True
        >>> metrics.calls["TrainingClient.optim_step"]
        {'ok': 1}
        """
        return self._metrics.get(self._make_metrics)

    def spans(self, tracer: Any = None) -> Spans:
        """Record an OpenTelemetry span for each call of this client from now on; needs the extra `otel`.

        A span is made when its call ends, as a child of the span in which the call was made. It has the name
        of the method, the moments when the request was sent, accepted and answered, and as attributes the
        method, the outcome, the model and the request id. No text of an error, prompt or header gets into it.
        A call that is sent in several requests has a span for each. Close the returned object, or use it in a
        ``with`` block, to make no more.

        Args:
            tracer: makes the spans; None: that of the global provider.

        Raises:
            MissingExtraError: OpenTelemetry is not installed.

        >>> import tinker_sync, opentelemetry.sdk.trace as sdk
        >>> ended = []
        >>> class Collector(sdk.SpanProcessor):
        ...     def on_end(self, span):
        ...         ended.append(span.name)
        >>> provider = sdk.TracerProvider()
        >>> provider.add_span_processor(Collector())
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     with service.spans(provider.get_tracer("my-program")):
        ...         training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...         stepped = training.optim_step(tinker_sync.AdamParams(learning_rate=1e-4)).result()
        >>> "TrainingClient.optim_step" in ended
        True
        """
        from tinker_sync.insight.spans import Spans

        runtime = self._runtime
        return Spans(runtime.connection.events, runtime.clock, runtime.pools.callback.run, tracer)

    def _make_metrics(self) -> Metrics:
        from tinker_sync.insight.metrics import Metrics

        return Metrics(self._runtime.connection.events, self._runtime.clock)

    def checkpoints(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int = 100,
        keep_last: int | None = None,
        best: Literal["min", "max"] = "min",
        keep: str | None = None,
        ttl_seconds: int | None = None,
    ) -> LoopCheckpoints[TrainingClient]:
        """Return an object that saves a training loop at intervals and resumes it from the latest save.

        Args:
            directory: the directory of the run; ``checkpoints.jsonl`` in it lists the checkpoints.
            every: the number of steps between two saves.
            keep_last: the number of latest checkpoints to keep; older ones are deleted, except for the best.
                None: 3.
            best: the best `score` of `after_step` is the lowest ("min") or the highest ("max").
            keep: in place of `keep_last`, which checkpoints to keep, such as "best 3, last 2, every 100".
            ttl_seconds: the lifetime of a save, renewed for those that are kept while the loop runs; None:
                the server's default. A warning in the log names kept ones that expire within a day.

        Raises:
            InvalidInputError: an argument is out of its range.

        >>> import tempfile, tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service, tempfile.TemporaryDirectory() as to:
        ...     saves = service.checkpoints(f"{to}/runs/x", every=2)
        ...     resumed = saves.resume()  # in a later process: the client of the latest, and the next step
        ...     training, first = resumed or (service.create_lora_training_client("tinker-sync/tiny"), 0)
        ...     for step in range(first, 4):
        ...         stepped = training.optim_step(tinker_sync.AdamParams(learning_rate=1e-4)).result()
        ...         saved = saves.after_step(training, step, score=1.0 / (step + 1))
        ...     [each.step for each in saves.kept]
        [1, 3]
        """
        from tinker_sync.loop.checkpoints import LoopCheckpoints

        return LoopCheckpoints(
            self,
            directory,
            every=every,
            keep_last=keep_last,
            best=best,
            keep=keep,
            ttl_seconds=ttl_seconds,
            clock=self._runtime.clock,
        )

    def recorder(self, directory: str | os.PathLike[str]) -> StepRecorder:
        """Return a recorder that writes a line of JSON to ``metrics.jsonl`` for each step of a training loop.

        Each line has metrics, timings and the tokens used. `tinker-sync plot DIRECTORY` draws the curves.

        Args:
            directory: the directory of the run, such as "runs/x"; new lines are appended to an existing run.

        >>> import tempfile, tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service, tempfile.TemporaryDirectory() as to:
        ...     with service.recorder(f"{to}/runs/x") as recorder:
        ...         line = recorder.log(0, {"loss": 2.0}, reward=0.5)
        ...     recorder.path.name, line["loss"], line["reward"]
        ('metrics.jsonl', 2.0, 0.5)
        """
        from tinker_sync.loop.recorder import StepRecorder

        return StepRecorder(
            directory, lambda: self.usage().tokens, clock=self._runtime.clock, note=self._note
        )

    def _note(self, step: int, advice: Sequence[str]) -> None:
        for recording in self._recordings:
            recording.note(step, advice)

    # -------------------------------------------------------------------------------------- the end

    def close(
        self,
        status: Literal["success", "errored", "interrupted"] = "success",
        detail: str | None = None,
        *,
        timeout: float = CLOSE_LIMIT_S,
        pending: float = PENDING_LIMIT_S,
    ) -> APIFuture[None]:
        """Begin to close this client and to end its session. Return a future that ends when both are done.

        Later calls of the clients made here raise `ClientClosedError`.

        `close` waits for calls that change something at the server (`optim_step`, saves,
        `publish_checkpoint`, deletions, ...). A pass is sent if such a call follows it; a pass without one
        has no lasting effect, so `close` does not wait for it. Calls that only read fail at once. The end of
        a ``with`` block or of the script closes the client in the same way. After 2 s a line on stderr names
        the calls that `close` waits for; Ctrl-C stops the wait at once. A ``with`` block or a script that
        Ctrl-C ends is left within two seconds, and a warning names the calls that may be lost.

        Args:
            status: the outcome of the session.
            detail: a note about it.
            timeout: the longest time to try to end the session at the server, seconds.
            pending: the longest time to wait for calls, seconds; a warning names the calls that remain.

        Raises:
            OSError: the file of `trace` cannot be written; the client closes all the same. The end of a
                ``with`` block raises it when the client is closed, or logs it if the block has raised an
                error.

        >>> import tinker_sync
        >>> service = tinker_sync.ServiceClient(base_url="local")
        >>> models = service.get_server_capabilities()
        >>> service.close().result()
        """
        try:
            with ExitStack() as recordings:  # one of the traces may not be writable
                for recording in self._recordings:
                    recordings.callback(recording.close)
        finally:
            closed = self._runtime.close(status, detail, limit_s=timeout, pending_s=pending)
        return closed

    def __enter__(self) -> Self:
        if self._runtime.closed:
            raise ClientClosedError("this ServiceClient is closed and cannot be entered; make a new one")
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        limit_s, pending_s, most_s = CLOSE_LIMIT_S, PENDING_LIMIT_S, None
        if exc_type is not None and issubclass(exc_type, KeyboardInterrupt):
            # Leave soon, also if a thread is stuck.
            limit_s, pending_s = EXIT_LIMIT_S, INTERRUPTED_LIMIT_S
            most_s = limit_s + pending_s
        try:
            try:
                self.close(_status_after(exc_type), timeout=limit_s, pending=pending_s)
            finally:  # a trace may not be writable
                self._leave(most_s)
        except KeyboardInterrupt:
            self._runtime.lifecycle.pending.give_up()
            raise
        except OSError as error:
            if exc_type is None:
                raise
            _log.warning("a trace cannot be written: %s", error)  # the error of the block goes first

    def _leave(self, most_s: float | None) -> None:
        try:
            self._runtime.close().result(most_s)
        except TimeoutError:
            self._runtime.lifecycle.leave_out_at_exit()  # it has had its time

    def result(self, timeout: float | None = None) -> Self:
        """Return this client at once. For scripts that wait for each client as for a future.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     service.result() is service
        True
        """
        del timeout
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a ServiceClient belongs to its process and cannot be pickled or copied; "
            "make one in the other process, or send a SamplingClient, which can be pickled"
        )

    create_lora_training_client_async = async_result(create_lora_training_client)
    create_training_client_from_state_async = async_result(create_training_client_from_state)
    create_training_client_from_state_with_optimizer_async = async_result(
        create_training_client_from_state_with_optimizer
    )
    create_sampling_client_async = async_result(create_sampling_client)
    get_tokenizer_async = async_blocking(get_tokenizer)
    request_async = async_future(request)
    get_server_capabilities_async = async_blocking(get_server_capabilities)


def _status_after(exc_type: type[BaseException] | None) -> Literal["success", "errored", "interrupted"]:
    if exc_type is None:
        return "success"
    return "errored" if issubclass(exc_type, Exception) else "interrupted"


def _refuse_mistyped(unknown: Mapping[str, Any]) -> None:
    """Refuse keywords that resemble a parameter.

    Ignoring a misspelt `base_url` would send the key to another server than intended.

    Raises:
        TypeError: a keyword resembles a parameter, or is one of an earlier version.
    """
    import inspect  # needed only for a misspelt name

    refuse_arguments("ServiceClient", unknown)
    parameters = [name for name in inspect.signature(ServiceClient.__init__).parameters if name != "unknown"]
    parameters.remove("self")
    for name in unknown:
        if find_closest(name, parameters, cutoff=0.8, loosely=False):
            raise TypeError(describe_unknown_parameter("ServiceClient", name, parameters))


def _name_asker(runtime: ClientRuntime) -> Callable[[str], str | None]:
    # The runtime holds the meter and so this function; a strong reference to the runtime would keep it alive.
    held = weakref.ref(runtime)

    def ask(model: str) -> str | None:
        alive = held()
        if alive is None or alive.closed:
            return None
        asks = [_of_run, _of_sampler] if ":train:" in model else [_of_sampler, _of_run]
        for each in asks:
            try:
                return each(alive, model)
            except TinkerError:
                continue
        return None

    return ask


def _of_run(runtime: ClientRuntime, model: str) -> str | None:
    info = runtime.server.call("get_info", types.GetInfoRequest(model_id=model), usual_s=REST_S)
    name: str | None = info.model_data.model_name
    return name


def _of_sampler(runtime: ClientRuntime, model: str) -> str | None:
    name: str | None = runtime.server.call("get_sampler", path={"sampler": model}, usual_s=REST_S).base_model
    return name
