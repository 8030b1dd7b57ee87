"""`ServiceClient`: the client that makes all other clients.

Each method imports the class that it needs, so a program that samples does not load training or REST.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from tinker_sync import types
from tinker_sync._spelling import describe_unknown_parameter, find_closest
from tinker_sync.clients import _deadlines
from tinker_sync.clients._arguments import check_credential, check_service
from tinker_sync.clients._async import async_blocking, async_result
from tinker_sync.clients._shared import BaseClient
from tinker_sync.clients._spending import Spending
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.config import Settings, Timeout
from tinker_sync.config.settings import MAX_RETRIES
from tinker_sync.errors import ClientClosedError
from tinker_sync.runtime.client_runtime import CLOSE_LIMIT_S, ClientRuntime
from tinker_sync.runtime.exits import EXIT_LIMIT_S
from tinker_sync.runtime.heartbeat import OUTLIVE_S
from tinker_sync.runtime.naming import names_requests
from tinker_sync.runtime.pending import PENDING_LIMIT_S
from tinker_sync.runtime.session import Session
from tinker_sync.types._console import session_url, sessions_url

if TYPE_CHECKING:
    import requests
    from typing_extensions import Self

    from tinker_sync.clients.rest import RestClient
    from tinker_sync.clients.retry_config import RetryConfig
    from tinker_sync.clients.training import TrainingClient
    from tinker_sync.insight.recording import Recording
    from tinker_sync.journal.record import RunJournal
    from tinker_sync.loop.checkpoints import LoopCheckpoints
    from tinker_sync.loop.recorder import StepRecorder
    from tinker_sync.losses.handle import LossHandle, PerDatumLossFn
    from tinker_sync.runtime.futures import APIFuture
    from tinker_sync.runtime.notices import QueueReport
    from tinker_sync.runtime.rate_limiter import RateLimiter
    from tinker_sync.text.tokenizer import Tokenizer
    from tinker_sync.types import (
        CustomLossInputRank,
        GetServerCapabilitiesResponse,
        LoadWeightsRequest,
        OptimizerConfig,
    )
    from tinker_sync.usage import Budget, PriceTable, Reconciliation, Usage
    from tinker_sync.wire.dialect import Dialect


@names_requests
class ServiceClient(BaseClient):
    """The client of the service. It makes training and sampling clients, and owns their session.

    It connects to the server with the first request. Use it in a `with` block, or call `close`; a script that
    does neither ends its session when it exits. Any thread may use it.

    Args:
        user_metadata: your own notes about this session.
        project_id: the project of the session; None: `TINKER_PROJECT_ID`.
        display_name: the name of the session in lists.
        base_url: the server; "local" starts one on this machine for this process, with the first request;
            None: `TINKER_BASE_URL`, else the hosted service.
        api_key: the key; None: `TINKER_API_KEY`, else the stored one.
        default_headers_overrides: headers of every request; the older name of `default_headers`.
        default_headers: headers of every request.
        timeout: the longest silence of the server, seconds.
        max_retries: the number of retries of a call; None: ten, or as many as fit into five minutes if that
            is more.
        session: a `requests.Session` for headers, proxies, certificates, user name and password, and cookies.
        deadline: the longest time of any call, seconds; None: hours, by kind of call.
        dialect: "auto", "proto", "json" or a `Dialect`.
        on_queue_state: called on a worker thread with a `QueueReport` each time the server reports on a
            request that waits.
        rate_limiter: a separate limiter; None: the one that all clients of this server and key share.
        telemetry: report failures to the service, by kind and place, never by content; None: report to the
            hosted service only, unless `TINKER_TELEMETRY` forbids it.
        journal: a file that records the requests, so that the same script can be started again after a crash
            and goes on; see `TrainingClient.steps`. None: no journal.
        keeper: start a small process that sends the heartbeats of the session while this process cannot: when
            a C library holds the interpreter lock for minutes, or this process is stopped. If this process
            dies, the keeper continues for ten minutes, or for the given number of seconds, so that `attach`
            finds the session alive. The keeper ends with this client.
        pace: a factor for the pauses before retries; None: `TINKER_PACE`, else 1. For tests.
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
        telemetry: bool | None = None,
        journal: str | PathLike[str] | None = None,
        keeper: bool | float = False,
        pace: float | None = None,
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
            api_key=api_key,
            timeout=timeout,
            deadline=deadline,
            on_queue_state=on_queue_state,
            keeper=keeper,
            session=session,
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
            telemetry=telemetry,
            pace=pace,
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
                journal=None if journal is None else _open_journal(journal, settings),
                keeper_s=_keeper_time(keeper),
            ),
            limiter=rate_limiter,
        )
        if settings.telemetry:
            from tinker_sync.telemetry.sender import Telemetry

            self._runtime.lifecycle.owned_observer = Telemetry(
                self._runtime.connection.caller, settings, clock=self._runtime.clock
            )
        if on_queue_state is not None:
            self._runtime.notices.listen(on_queue_state)
        self._spending = Spending(self._runtime)
        self._recordings: list[Recording] = []
        self._trainings: tuple[TrainingClient, ...] | None = None

    @classmethod
    def attach(cls, journal: str | PathLike[str], **options: Any) -> Self:
        """Continue the session of a journal, in any process, without the script that began it.

        `trainings` has the training clients of the session. Each continues with its next sequence number, and
        its `unread` has the results that had not arrived. If the server no longer has the session, each model
        is restored from its last checkpoint, and a log line lists the lost steps.

        Args:
            journal: the file.
            options: arguments of `ServiceClient`; the default of `base_url` is the address in the journal.

        Raises:
            JournalError: the journal has no session to continue, or another process uses it.

        >>> import tempfile
        >>> import tinker_sync
        >>> from tinker_sync.testing import LocalServer
        >>> path = f"{tempfile.mkdtemp()}/run.journal"
        >>> with LocalServer(model="tinker-sync/random") as server:
        ...     service = server.service(journal=path)
        ...     training = service.create_lora_training_client("tinker-sync/random", rank=4)
        ...     stepped = training.optim_step(tinker_sync.AdamParams()).result()
        ...     closed = service.close("errored").result()  # the session stays open
        ...     with tinker_sync.ServiceClient.attach(path, api_key=server.key) as service:
        ...         [again] = service.trainings
        ...         again.model_id == training.model_id, again.unread, again.settled
        (True, (), ())
        """
        from tinker_sync.journal.record import find_session

        last = find_session(Path(journal))
        service = cls(journal=journal, **{"base_url": last.url, **options})
        opened = service._runtime.server.session.journal
        assert opened is not None  # noqa: S101  # the path is an argument
        opened.replays = False
        return service

    @property
    def trainings(self) -> tuple[TrainingClient, ...]:
        """The training clients of the journal's session, in the order in which they were made.

        It is empty except after `attach`.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     service.trainings
        ()
        """
        journal = self._runtime.server.session.journal
        if self._trainings is None:
            from tinker_sync.clients._recorded import RecordedModel
            from tinker_sync.clients.training import TrainingClient

            models = () if journal is None or journal.replays else journal.models
            self._trainings = tuple(
                TrainingClient._make(self._runtime, RecordedModel(number, self._until(None)))
                for number in models
            )
        return self._trainings

    # -------------------------------------------------------------------------------------- the service

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        """Return the models that the server offers. Blocks.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     [model.model_name for model in service.get_server_capabilities().supported_models]
        ['tinker-sync/tiny']
        """
        capabilities: GetServerCapabilitiesResponse = self._runtime.server.call(
            "get_server_capabilities", usual_s=_deadlines.REST_S
        )
        return capabilities

    def get_console_url(self) -> str:
        """Return the address of the web page of this session, or of all sessions before this one exists.

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

    @overload
    def get_tokenizer(self, model: str, *, backend: Literal["tokenizers"] = "tokenizers") -> Tokenizer: ...
    @overload
    def get_tokenizer(self, model: str, *, backend: Literal["transformers"]) -> Any: ...
    def get_tokenizer(
        self, model: str, *, backend: Literal["tokenizers", "transformers"] = "tokenizers"
    ) -> Any:
        """Return the tokenizer of a model. A process loads it once.

        Args:
            model: the name of a base model, or the path of weights, ``tinker://…``, whose base model the
                server names.
            backend: "transformers" returns an object of that library, which must be installed.

        Raises:
            TokenizerError: it cannot be loaded; the message names the files to provide.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     tokenizer = service.get_tokenizer("tinker-sync/tiny")
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("final").result().path
        ...     tokenizer.decode([20, 223, 14]), service.get_tokenizer(path) is tokenizer
        ('2 ,', True)
        """
        from tinker_sync.text.loading import get_tokenizer

        if model.startswith("tinker://"):
            model = self.create_rest_client().get_weights_info_by_tinker_path(model).result().base_model
        return get_tokenizer(model, backend=backend)

    # -------------------------------------------------------------------------------------- training

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
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

        `result()` and `await` wait until the model exists. Errors of the server are raised at the first use.

        Args:
            base_model: the model to fine-tune; see `get_server_capabilities`.
            rank: the rank of the LoRA matrices.
            seed: the seed of their first values.
            train_mlp: train the MLP layers.
            train_attn: train the attention layers.
            train_unembed: train the unembedding.
            user_metadata: your own notes about this run.
            optimizer: the kind of optimizer; None: AdamW.
            deadline: the seconds after which the call is given up.

        Raises:
            AssertionError: all three parts are excluded from training.
            InvalidInputError: the model has no name, or an argument has a wrong type.

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

        lora = types.LoraConfig(
            rank=rank, seed=seed, train_unembed=train_unembed, train_mlp=train_mlp, train_attn=train_attn
        )
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

        Args:
            path: the path of the checkpoint, ``tinker://…/weights/…``.
            base_model: replaces the base model of the checkpoint; it must fit the weights.
            user_metadata: your own notes about this run.
            weights_access_token: a key of another account that may read the checkpoint.
            optimizer: the kind of optimizer; None: AdamW.
            deadline: the seconds after which the call is given up.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("step-100").result().path
        ...     again = service.create_training_client_from_state(path, user_metadata={"from": "step-100"})
        ...     again.get_info().lora_rank
        4
        """
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
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        *,
        verify: bool | float = False,
        deadline: float | None = None,
    ) -> TrainingClient:
        """Create a new model with the weights and the optimizer state of a checkpoint.

        Returns the client at once. Arguments as in `create_training_client_from_state`.

        With `verify`, the creation fails with `VerificationError` unless the server restores the checkpoint
        with the weights that were saved, and with the state of the optimizer. The checkpoint must have been
        saved by ``save_state(verify=True)``, which describes the cost and the values of `verify`.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("step-100").result().path
        ...     resumed = service.create_training_client_from_state_with_optimizer(path)
        ...     resumed.get_info().lora_rank
        4
        """
        weights_access_token = self._runtime.connection.mask(weights_access_token)
        load = types.LoadWeightsRequest(
            path=path,
            optimizer=True,
            base_model=base_model,
            user_metadata=user_metadata,
            weights_access_token=weights_access_token,
        )
        return self._load(load, deadline, verify)

    def _load(
        self, load: LoadWeightsRequest, deadline: float | None, verify: bool | float = False
    ) -> TrainingClient:
        from tinker_sync.clients._models import LoadedModel
        from tinker_sync.clients.training import TrainingClient

        asked = LoadedModel.of(self._runtime, load, self._until(deadline))
        if verify is False:
            return TrainingClient._make(self._runtime, asked)
        from tinker_sync.clients import _verify

        tolerance = _verify.tolerance_of(verify, "create_training_client_from_state_with_optimizer")
        return TrainingClient._make(self._runtime, _verify.VerifiedModel(asked, tolerance))

    # -------------------------------------------------------------------------------------- sampling

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """Return at once a client that samples from saved weights or from a base model.

        `result()` and `await` wait until the server is ready.

        Args:
            model_path: the weights, ``tinker://…/sampler_weights/…``.
            base_model: a base model to sample from.
            retry_config: settings of the retries.
            record_stability_info: let the server keep, for each sample, the data that stable training needs.

        Raises:
            InvalidInputError: neither path nor model is given, or the path is not valid.

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

    # -------------------------------------------------------------------------------------- what it costs

    def usage(self, *, prices: PriceTable | None = None) -> Usage:
        """Return the tokens used so far, by model: trained, prompt, cached prompt and sampled.

        The client counts them from the results that have arrived. A price that is missing from the table is
        reported as unknown. For a model from a checkpoint, the client asks the server once for the name of
        the base model.

        Args:
            prices: the prices of tokens; None: the file `TINKER_PRICES`, else `~/.tinker/prices.json`.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     datum = tinker_sync.Datum(tinker_sync.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
        ...     passed = training.forward_backward([datum], "cross_entropy").result()
        ...     service.usage().tokens.trained
        2
        """
        return self._spending.usage(prices)

    def budget(
        self, usd: float | None = None, tokens: int | None = None, *, prices: PriceTable | None = None
    ) -> Budget:
        """Return a limit for the tokens or dollars used in a ``with`` block.

        A call that could exceed the rest of the budget raises `BudgetExceededError` and is not sent. Calls
        under way count with their highest possible use, samples with `max_tokens` each. The limit applies to
        all clients of this service client.

        Args:
            usd: the most dollars; all prices must be known.
            tokens: the most tokens of all kinds.
            prices: as for `usage`.

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
        return self._spending.budget(usd, tokens, prices)

    def reconcile(self) -> Reconciliation:
        """Compare the counted usage with the bill of the service for this session. Blocks.

        The account must be allowed to read the bill, which may lag by some hours.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     datum = tinker_sync.Datum(tinker_sync.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
        ...     passed = training.forward_backward([datum], "cross_entropy").result()
        ...     found = service.reconcile()
        >>> found.counted.trained
        2
        """
        return self._spending.reconcile()

    # -------------------------------------------------------------------------------------- where time goes

    def explain(self) -> Recording:
        """Start and return a recording of the time that calls take. `str(recording)` is an explanation.

        The explanation shows, for each method, the time in the queue, on the wire, at the server and in
        decoding. It also lists retries and pauses, and suggests changes. A client without a recording has
        almost no cost from this feature.

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
        recording = Recording(self._runtime, path)
        self._recordings.append(recording)
        return recording

    def checkpoints(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int = 100,
        keep_last: int = 3,
        best: Literal["min", "max"] = "min",
    ) -> LoopCheckpoints[TrainingClient]:
        """Return an object that saves a training loop at intervals and resumes it from the latest save.

        Args:
            directory: the directory of the run; ``checkpoints.jsonl`` in it lists the checkpoints.
            every: the number of steps between two saves.
            keep_last: the number of latest checkpoints to keep; older ones are deleted.
            best: also keep the checkpoint with the lowest ("min") or highest ("max") score.

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

        return LoopCheckpoints(self, directory, every=every, keep_last=keep_last, best=best)

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

        return StepRecorder(directory, lambda: self.usage().tokens, clock=self._runtime.clock)

    # -------------------------------------------------------------------------------------- losses

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
        only functions of torch and math, and must not branch on values of tensors. A session creates each
        loss once.

        Args:
            fn: the function; its name becomes the name of the loss.
            input_ranks: the number of dimensions of each parameter, 0 to 2.
            deadline: the seconds after which the call is given up.

        Raises:
            InvalidInputError: the function breaks a rule; the message shows the line.
            MissingExtraError: torch is not installed.

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
        from tinker_sync.losses.create import create

        return create(self._runtime, fn, input_ranks, self._until(deadline))

    # -------------------------------------------------------------------------------------- everything else

    def copy_weights(
        self, path: str, *, ttl_seconds: int | None = None, weights_access_token: str | None = None
    ) -> APIFuture[str]:
        """Copy a checkpoint into the project of this client. The future has the path of the copy.

        Args:
            path: the path of the checkpoint.
            ttl_seconds: the lifetime of the copy.
            weights_access_token: a key of another account that may read the checkpoint.

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

    def create_rest_client(self) -> RestClient:
        """Return a client for runs, checkpoints and sessions on the same server, with the same key.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     service.create_rest_client().get_server_capabilities().result() is not None
        True
        """
        from tinker_sync.clients.rest import RestClient

        return RestClient(self._runtime)

    # -------------------------------------------------------------------------------------- the end

    def close(
        self,
        status: Literal["success", "errored", "interrupted"] = "success",
        detail: str | None = None,
        *,
        timeout: float = CLOSE_LIMIT_S,
        pending: float = PENDING_LIMIT_S,
    ) -> APIFuture[None]:
        """End the session. Later calls of the clients made here raise `ClientClosedError`.

        `close` waits for calls that change something at the server (`optim_step`, saves,
        `publish_checkpoint`, deletions, ...). A pass is sent if such a call follows it; a pass without one
        has no lasting effect, so `close` does not wait for it. Calls that only read fail at once. The end of
        a ``with`` block or of the script closes the client in the same way. After 2 s a line on stderr names
        the calls that are waited for; Ctrl-C stops the wait at once.

        Args:
            status: the outcome of the session.
            detail: a note about it.
            timeout: the longest time to try to end the session at the server, seconds.
            pending: the longest time to wait for calls, seconds; a warning names the calls that remain.

        >>> import tinker_sync
        >>> service = tinker_sync.ServiceClient(base_url="local")
        >>> models = service.get_server_capabilities()
        >>> service.close().result()
        """
        for recording in self._recordings:
            recording.close()
        return self._runtime.close(status, detail, limit_s=timeout, pending_s=pending)

    def __enter__(self) -> Self:
        if self._runtime.closed:
            raise ClientClosedError("this ServiceClient is closed and cannot be entered; make a new one")
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        status = _status_after(exc_type)
        # After Ctrl-C, leave soon.
        limit_s = EXIT_LIMIT_S if status == "interrupted" else CLOSE_LIMIT_S
        try:
            self.close(status, timeout=limit_s).result()
        except KeyboardInterrupt:
            self._runtime.lifecycle.pending.give_up()
            raise

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

    def _until(self, deadline: float | None) -> float:
        return self._runtime.server.give_up_at(deadline, _deadlines.CREATE_S)

    get_tokenizer_async = async_blocking(get_tokenizer)
    get_server_capabilities_async = async_blocking(get_server_capabilities)
    create_lora_training_client_async = async_result(create_lora_training_client)
    create_training_client_from_state_async = async_result(create_training_client_from_state)
    create_training_client_from_state_with_optimizer_async = async_result(
        create_training_client_from_state_with_optimizer
    )
    create_sampling_client_async = async_result(create_sampling_client)


def _open_journal(path: str | PathLike[str], settings: Settings) -> RunJournal:
    from tinker_sync.journal.record import RunJournal

    return RunJournal(Path(path), "local" if settings.api_key_source == "local" else settings.base_url)


def _keeper_time(keeper: bool | float) -> float | None:
    """Return how long a keeper outlives this process; None: no keeper."""
    if isinstance(keeper, bool):
        return OUTLIVE_S if keeper else None
    return float(keeper)


def _status_after(exc_type: type[BaseException] | None) -> Literal["success", "errored", "interrupted"]:
    if exc_type is None:
        return "success"
    return "errored" if issubclass(exc_type, Exception) else "interrupted"


def _refuse_mistyped(unknown: Mapping[str, Any]) -> None:
    """Refuse keywords that resemble a parameter.

    Ignoring a misspelt `base_url` would send the key to another server than intended.

    Raises:
        TypeError: a keyword resembles a parameter.
    """
    import inspect  # needed only for a misspelt name

    parameters = [name for name in inspect.signature(ServiceClient.__init__).parameters if name != "unknown"]
    parameters.remove("self")
    for name in unknown:
        if find_closest(name, parameters, cutoff=0.8, loosely=False):
            raise TypeError(describe_unknown_parameter("ServiceClient", name, parameters))
