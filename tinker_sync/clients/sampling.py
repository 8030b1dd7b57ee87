"""`SamplingClient`: samples from one set of weights, thousands of samples at once if needed."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, overload

from tinker_sync._base.events import ModelNamed
from tinker_sync._base.naming import find_call_site, names_requests
from tinker_sync._base.policy import Meaning, Stage, rule_for
from tinker_sync.clients._arguments import check_sample, check_sampler_path, refuse_bare_path
from tinker_sync.clients._async import async_blocking, async_result
from tinker_sync.clients._base import CREATE_S, SAMPLE_S, ClientFuture, ready, start, start_after
from tinker_sync.errors import (
    APIConnectionError,
    InternalServerError,
    InvalidInputError,
    RateLimitError,
    TinkerError,
)
from tinker_sync.runtime.futures import APIFuture, log_if_unread
from tinker_sync.runtime.lazy import Lazy, Shared
from tinker_sync.runtime.raw import Extra
from tinker_sync.runtime.samples import SampleLine
from tinker_sync.types.sampling import SampleRequest, SamplingParams
from tinker_sync.types.session import CreateSamplingSessionRequest

if TYPE_CHECKING:
    import os

    from tinker_sync.batch.item import BatchItem
    from tinker_sync.batch.samples import Prompt
    from tinker_sync.clients._handles import HandleContent
    from tinker_sync.data.tokenizer import Tokenizer
    from tinker_sync.gateway import Gateway
    from tinker_sync.runtime.client import ClientRuntime
    from tinker_sync.runtime.training import TrainingLine
    from tinker_sync.types import (
        GetSamplerResponseInternal,
        ModelInput,
        SampleResponse,
        SaveWeightsForSamplerResponseInternal,
        TensorData,
    )


# Scripts read the defaults from the class, which attrs would remove.
@dataclass(frozen=True)
class RetryConfig:
    """Settings of a sampling client's retries.

    Only `enable_retry_logic` and `max_attempts` have an effect; scripts of the reference client may set the
    other fields. The package and the server determine the pauses. A sample fails at its deadline at the
    latest.

    Raises:
        InvalidInputError: `max_connections` or `max_attempts` is less than 1.

    >>> RetryConfig(max_attempts=3).enable_retry_logic
    True
    """

    max_connections: int | None = 1000
    progress_timeout: float = 7200.0
    retry_delay_base: float = 0.5
    retry_delay_max: float = 10.0
    jitter_factor: float = 0.25
    enable_retry_logic: bool = True
    enable_stuck_detection: bool = True
    retryable_exceptions: tuple[type[Exception], ...] = (
        TimeoutError,
        APIConnectionError,
        InternalServerError,
        RateLimitError,
    )
    """The errors after which a repeated call may succeed."""
    max_attempts: int = field(default=10, kw_only=True)
    """The most tries of one submit, and the most submits of one sample."""

    def __post_init__(self) -> None:
        if self.max_connections is not None and self.max_connections <= 0:
            raise InvalidInputError(
                f"RetryConfig.max_connections: expected more than 0 or None, got {self.max_connections}"
            )
        if self.max_attempts < 1:
            raise InvalidInputError(f"RetryConfig.max_attempts: expected 1 or more, got {self.max_attempts}")

    @property
    def attempts(self) -> int:
        """`max_attempts`, or 1 without retries."""
        return self.max_attempts if self.enable_retry_logic else 1


def as_retry_config(given: Any) -> RetryConfig:
    """Return settings as they are, the defaults for None, or those of another package's `RetryConfig`.

    Raises:
        InvalidInputError: `given` is none of these.

    >>> as_retry_config(None) == RetryConfig()
    True
    """
    if given is None or isinstance(given, RetryConfig):
        return given or RetryConfig()
    if type(given).__name__ != "RetryConfig":
        raise InvalidInputError(f"retry_config: expected a RetryConfig, got {type(given).__name__}")
    names = (each.name for each in fields(RetryConfig))
    return RetryConfig(**{name: getattr(given, name) for name in names if hasattr(given, name)})


def is_retryable_status_code(status_code: int) -> bool:
    """Return True if a call that was answered with this status may succeed when it is repeated.

    >>> [is_retryable_status_code(status) for status in (404, 429, 503)]
    [False, True, True]
    """
    rule = rule_for(status_code, Stage.CALL)
    return rule.passes and rule.meaning is not Meaning.BLOCKED


@names_requests
class SamplingClient(ClientFuture["SamplingClient"]):
    """A client that samples from one set of weights. A service or training client makes it.

    Thread-safe. The object is also the future of its own creation, so you can use it at once: samples that
    are started before the sampler exists are held, and then sent in the order of the calls. `result()` and
    `await` wait until the client is ready, and return it. If the creation fails, the futures of these samples
    fail, and later calls raise.

    `sample` returns a future at once. A copy for another process, by pickle or as a handle, carries no API
    key unless you ask for it, because the other process finds its own.

    >>> import tinker_sync
    >>> from tinker_sync import types
    >>> with tinker_sync.ServiceClient(base_url="local") as service:
    ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
    ...     prompt = types.ModelInput.from_ints([1, 2])
    ...     sampled = sampling.sample(prompt, 1, types.SamplingParams(max_tokens=3))
    ...     len(sampled.result().sequences)
    1
    """

    def __init__(
        self,
        holder: ClientRuntime,
        *,
        sampling_session_id: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        copied: bool = False,
    ) -> None:
        """Make a client of an existing sampling session. Clients of new ones are made by other clients.

        Args:
            holder: the `holder` of another client.
            sampling_session_id: the session; `create` makes a new one.
            base_model: the base model of the session; the server is asked for it if it is not given.
            retry_config: settings of the retries.
            record_stability_info: let the server keep, for each sample, the data that stable training needs.
            copied: number the samples far from those of the client that made the session, which may sample
                too. Always so for an existing session.

        >>> import tinker_sync
        >>> prompt, params = tinker_sync.ModelInput.from_ints([1]), tinker_sync.SamplingParams(max_tokens=2)
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     first = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     session_id = first._sampling_session_id
        ...     second = tinker_sync.SamplingClient(service.holder, sampling_session_id=session_id)
        ...     len(second.sample(prompt, 1, params).result().sequences)
        1
        """
        self._retry_config = as_retry_config(retry_config)
        copied = copied or sampling_session_id is not None
        self._line = SampleLine(holder, self._retry_config.attempts, copied=copied)
        super().__init__(holder, self._line.held)
        self._record_stability_info = record_stability_info
        # The arguments of the last sample except its prompt, and its request; replaced as a whole.
        self._last: tuple[Any, SampleRequest | None] = (None, None)
        self._described: Lazy[GetSamplerResponseInternal] = Lazy()
        # From the arguments or from a handle; "" or None if it is not known.
        self._base_model = self._line.base_model = base_model
        # The weights or the base model that `create` was asked for; None for weights without a name.
        self._named_model: str | None = None
        if sampling_session_id is not None:
            self._line.sampling_session_id = sampling_session_id
            ready(self)

    @property
    def _sampling_session_id(self) -> str:
        """The id of the sampling session, for scripts that read this name. Waits until it exists."""
        return self.result()._line.sampling_session_id

    @classmethod
    def create(
        cls,
        holder: ClientRuntime,
        *,
        model_path: str | None = None,
        base_model: str | None = None,
        sampling_session_id: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """Return a client at once, and create a sampling session for it in the background.

        Args:
            holder: the `holder` of another client.
            model_path: the weights, ``tinker://…/sampler_weights/…``.
            base_model: a base model to sample from.
            sampling_session_id: an existing sampling session; no request is sent then.
            retry_config: settings of the retries.
            record_stability_info: let the server keep, for each sample, the data that stable training needs.

        Raises:
            InvalidInputError: neither weights, a base model nor a sampling session is given, or the path is
                not valid.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     client = tinker_sync.SamplingClient.create(service.holder, base_model="tinker-sync/tiny")
        ...     client.get_base_model()
        'tinker-sync/tiny'
        """
        client = cls(
            holder,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
            sampling_session_id=sampling_session_id,
            # For a path, ask the server for the base model of the weights.
            base_model=base_model if model_path is None else None,
        )
        if sampling_session_id is not None:
            return client
        if model_path is None and base_model is None:
            raise InvalidInputError("create_sampling_client: give model_path or base_model")
        if model_path is not None:
            check_sampler_path(model_path, holder.settings)
            client._line.run_id = model_path.removeprefix("tinker://").partition("/")[0]
        client._named_model = model_path or base_model
        holder.lifecycle.refuse_if_leaving()
        request = CreateSamplingSessionRequest(
            session_id="",
            # Drawn once, because a retry must send the same request.
            sampling_session_seq_id=holder.server.session.next_sampling_session_seq_id(),
            base_model=base_model,
            model_path=model_path,
        )
        start(client, partial(_create_session, client._line, request))
        return client

    @classmethod
    def _of_saved(
        cls,
        runtime: ClientRuntime,
        saved: APIFuture[SaveWeightsForSamplerResponseInternal],
        trained: TrainingLine,
        *,
        retry_config: RetryConfig | None,
        record_stability_info: bool,
    ) -> SamplingClient:
        """Return a client at once for the weights of a save that is under way."""
        client = cls(runtime, retry_config=retry_config, record_stability_info=record_stability_info)
        start_after(client, saved, partial(_use_saved, client._line, trained))
        return client

    # -------------------------------------------------------------------------------------- samples

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
        *,
        extra_body: Mapping[str, Any] | None = None,
        extra_headers: Mapping[str, str] | None = None,
        deadline: float | None = None,
    ) -> APIFuture[SampleResponse]:
        """Sample continuations of a prompt.

        Args:
            prompt: the input of the model.
            num_samples: the number of continuations.
            sampling_params: length, temperature, stops and so on.
            include_prompt_logprobs: also score the prompt's tokens.
            topk_prompt_logprobs: also return this many of the likeliest tokens at each prompt position.
            topk_sample_logprobs: also return this many of the likeliest tokens at each sampled position.
            target_prompt_logprobs: token ids to score, a row for each prompt token after the first.
            prompt_alt_tokens_k: draw this many alternatives to each prompt token after the first.
            prompt_logprobs_last_n: score only this many prompt tokens, the last ones.
            extra_body: further fields of the request's JSON, or other values of its fields.
            extra_headers: further headers of the request.
            deadline: seconds until the call gives up; None: the default of the client.

        Raises:
            InvalidInputError: the request cannot be sent; nothing was sent.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     tokenizer = sampling.get_tokenizer()
        ...     prompt = tinker_sync.ModelInput.from_text("Q: 23+45=", tokenizer)
        ...     params = tinker_sync.SamplingParams(max_tokens=2, temperature=0.0)
        ...     sampled = sampling.sample(prompt, 1, params).result()
        >>> tokenizer.decode(sampled.sequences[0].tokens), len(sampled.sequences[0].logprobs)
        ('68', 2)
        """
        if not self._held.open:
            self._goes_ahead()
        check_sample(prompt, num_samples, sampling_params)
        asked = (
            self._line.sampling_session_id,
            num_samples,
            id(sampling_params),  # the kept request holds them, so that no others have their id
            include_prompt_logprobs,
            topk_prompt_logprobs,
            topk_sample_logprobs,
            id(target_prompt_logprobs),
            prompt_alt_tokens_k,
            prompt_logprobs_last_n,
        )
        kept, request = self._last
        if kept == asked and request is not None and type(prompt) is type(request.prompt):
            # Most samples differ from the last one by their prompt alone.
            request = request._with(prompt=prompt)
        else:
            request = SampleRequest(
                num_samples=num_samples,
                prompt=prompt,
                sampling_params=sampling_params,
                sampling_session_id=self._line.sampling_session_id,
                prompt_logprobs=include_prompt_logprobs,
                topk_prompt_logprobs=topk_prompt_logprobs,
                topk_sample_logprobs=topk_sample_logprobs,
                target_prompt_logprobs=target_prompt_logprobs,
                prompt_alt_tokens_k=prompt_alt_tokens_k,
                prompt_logprobs_last_n=prompt_logprobs_last_n,
                record_stability_info=self._record_stability_info,
            )
            unchanged = request.sampling_params is sampling_params
            if unchanged and request.target_prompt_logprobs is target_prompt_logprobs:
                self._last = asked, request
        extra = Extra.of("sample", extra_body, extra_headers)
        deadline_at = self._runtime.server.give_up_at(deadline, SAMPLE_S)
        return self._line.submit(request, deadline_at, may_forbid_retries=True, extra=extra)

    def map(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams,
        num_samples: int = 1,
        *,
        max_in_flight: int = 256,
        ordered: bool = True,
        on_error: Literal["return", "raise"] = "return",
        save_to: str | os.PathLike[str] | None = None,
        progress: bool = True,
        total: int | None = None,
        tokenizer: Any = None,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        deadline: float | None = None,
    ) -> Generator[BatchItem, None, None]:
        """Sample continuations of many prompts, and yield a `BatchItem` for each.

        Nothing is sampled before the first item is taken: iterate over the result, or make a list of it. At
        most `max_in_flight` prompts are pulled ahead of the yielded items, so memory does not grow with the
        input. Leaving the loop, closing the generator and Ctrl-C cancel the samples under way.

        With `save_to` each response is written when it arrives, before its item is yielded. The same call in
        a new process yields the responses in the file with `saved=True`, and samples the rest. Failed prompts
        are not written, so a new run samples them again. A file with another prompt, other parameters or the
        responses of another checkpoint is refused.

        Args:
            prompts: inputs of the model, rows of token ids, texts or chats; a list or a generator.
            sampling_params: length, temperature, stops and so on.
            num_samples: the number of continuations of each prompt.
            max_in_flight: the most prompts that are pulled ahead.
            ordered: yield in the order of the prompts; False yields responses as they arrive, so a slow
                one does not delay the others.
            on_error: "return" yields an item with the error of a failed prompt and goes on; "raise" raises
                the first error. An error that all later prompts would have too, such as that of a closed
                client, ends the batch and is raised after the items under way.
            save_to: a file for the responses, as JSON lines.
            progress: show a bar in a terminal or notebook if tqdm is installed; `TINKER_PROGRESS=0` hides it.
            total: the number of prompts of a generator, to estimate the time left.
            tokenizer: encodes texts and chats, and decodes the `texts` of items; None: the tokenizer of the
                model, which the first text or chat loads. Before that, items have no `texts`.
            include_prompt_logprobs: also score the tokens of the prompts.
            topk_prompt_logprobs: also return this many of the likeliest tokens at each prompt position.
            topk_sample_logprobs: also return this many of the likeliest tokens at each sampled position.
            deadline: seconds until one sample gives up; None: the default of the client.

        Raises:
            InvalidInputError: an argument is not valid; nothing was sent. The first item raises errors of the
                file `save_to`.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     params = tinker_sync.SamplingParams(max_tokens=3, temperature=0, stop=["\\n"])
        ...     for item in sampling.map(["Q: 23+45=", "Q: 71-38="], params):
        ...         print(item.index, item.texts)
        0 ['68\\n']
        1 ['33\\n']
        """
        from tinker_sync.batch.samples import Order, Window, map_samples

        options = {
            "include_prompt_logprobs": include_prompt_logprobs,
            "topk_prompt_logprobs": topk_prompt_logprobs,
            "topk_sample_logprobs": topk_sample_logprobs,
            "deadline": deadline,
        }
        order = Order(self, sampling_params, num_samples, options, tokenizer, self._named_model)
        window = Window(max_in_flight, ordered, on_error)
        return map_samples(prompts, order, window, save_to=save_to, progress=progress, total=total)

    def compute_logprobs(
        self,
        prompt: ModelInput,
        prompt_logprobs_last_n: int | None = None,
        *,
        deadline: float | None = None,
    ) -> APIFuture[list[float | None]]:
        """Compute the log-probability of each token of a prompt; None for the first token and unscored ones.

        Args:
            prompt: the tokens to score.
            prompt_logprobs_last_n: score only this many tokens, the last ones.
            deadline: seconds until the call gives up; None: the default of the client.

        Raises:
            InvalidInputError: the prompt is not a `ModelInput`, or cannot be sent.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     prompt = tinker_sync.ModelInput.from_ints([1, 2, 3])
        ...     scores = sampling.compute_logprobs(prompt).result()
        ...     [score if score is None else score < 0 for score in scores]
        [None, True, True]
        """
        from tinker_sync.runtime.futures import CombinedFuture

        if not self._held.open:
            self._goes_ahead()
        check_sample(prompt)
        request = SampleRequest(
            num_samples=1,
            prompt=prompt,
            sampling_params=SamplingParams(max_tokens=1),
            sampling_session_id=self._line.sampling_session_id,
            prompt_logprobs=True,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            record_stability_info=self._record_stability_info,
        )
        deadline_at = self._runtime.server.give_up_at(deadline, SAMPLE_S)
        scored: APIFuture[list[float | None]] = CombinedFuture(
            [self._line.submit(request, deadline_at, extra=Extra.of("compute_logprobs", None, None))],
            lambda responses: _prompt_logprobs(responses[0]),
            submit=self._runtime.pools.callback.run,
            soon=self._runtime.lifecycle.run_soon,
            clock=self._runtime.clock,
        )
        log_if_unread(scored, find_call_site())
        return scored

    def endpoint(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        key: str | None = None,
        sampling_params: SamplingParams | None = None,
        chat_template: str | None = None,
        record: str | os.PathLike[str] | None = None,
        deadline: float | None = None,
    ) -> Gateway:
        """Serve chats over this client, as OpenAI and Anthropic do, and keep the exact tokens for training.

        Use it in a `with` block, or call `close`. Blocks until the tokenizer is loaded.

        Args:
            host: the address to listen on.
            port: the port, or 0 for a free one.
            key: the key that programs must send. Needed for an address that other machines can reach; it then
                needs 16 characters.
            sampling_params: what a request does not set, such as `max_tokens` and `temperature`.
            chat_template: another template than the model's, or the name of one of the model's.
            record: a file to which exchanges are appended as JSON lines; None: they are kept in memory.
            deadline: seconds until a sample gives up; None: the default of the client.

        Raises:
            ConfigurationError: the address cannot be used, or the key is missing or too short.
            TokenizerError: the tokenizer of the model cannot be loaded.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     with sampling.endpoint() as gateway:
        ...         gateway.openai_base_url().startswith("http://127.0.0.1:")
        True
        """
        from tinker_sync.gateway import Gateway

        return Gateway(
            self,
            host=host,
            port=port,
            key=key,
            sampling_params=sampling_params,
            chat_template=chat_template,
            record=record,
            deadline=deadline,
        )

    # -------------------------------------------------------------------------------------- about it

    def get_base_model(self) -> str:
        """Return the name of the base model. Blocks until the server has answered, and keeps the answer.

        If the server does not describe samplers, return the name that the client was made with, or the name
        in the description of the training run.

        Raises:
            TinkerError: the server does not answer, or no name is known.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     sampling.get_base_model()
        'tinker-sync/tiny'
        """
        return self._about().base_model

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
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     tokenizer = sampling.get_tokenizer()
        ...     tokenizer.decode(tokenizer.encode("Q: 23+45="))
        'Q: 23+45='
        """
        from tinker_sync.data.tokenizer import get_tokenizer

        about = self._about()
        return get_tokenizer(about.base_model, about.tokenizer_id, backend=backend)

    def _about(self) -> GetSamplerResponseInternal:
        from tinker_sync.clients._handles import describe_sampler

        sampler, line = self.sampling_session_id, self._line
        return self._described.get(
            lambda: describe_sampler(self._runtime, sampler, self._base_model, line.run_id)
        )

    @property
    def sampling_session_id(self) -> str:
        """The id of this sampler at the server. Waits until the sampler exists.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     sampling.sampling_session_id.endswith(":sample:0")
        True
        """
        self.result()
        return self._line.sampling_session_id

    def _name(self) -> str:
        return self._line.sampling_session_id

    # -------------------------------------------------------------------------------------- copies

    def get_sampler_handle(self, *, include_api_key: bool = False) -> str:
        """Return text from which another process makes a client for the same weights.

        Waits until this client is ready.

        Args:
            include_api_key: include the key as plain text, which every reader of the handle can use. Without
                it, the other process looks for a key as a new client does.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     handle = sampling.get_sampler_handle()  # for another process
        ...     copy = tinker_sync.SamplingClient.from_sampler_handle(handle)
        ...     copy.get_base_model()
        'tinker-sync/tiny'
        """
        from tinker_sync.clients._handles import encode_handle, known_base_model

        return encode_handle(
            self._runtime,
            self.sampling_session_id,
            record_stability_info=self._record_stability_info,
            retry_config={name: getattr(self._retry_config, name) for name in _KEPT_RETRY_FIELDS},
            include_api_key=include_api_key,
            base_model=self._base_model or known_base_model(self._about),
        )

    @classmethod
    def from_sampler_handle(cls, handle: str, *, api_key: str | None = None) -> SamplingClient:
        """Return a client for the weights that a handle names.

        Args:
            handle: the result of `get_sampler_handle`.
            api_key: the key to use; None: the key in the handle, else the one that a new client finds.

        Raises:
            InvalidInputError: the text is not a handle.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     copy = tinker_sync.SamplingClient.from_sampler_handle(sampling.get_sampler_handle())
        ...     copy.sampling_session_id == sampling.sampling_session_id
        True
        """
        from tinker_sync.clients._handles import runtime_of_handle

        return cls._of_handle(*runtime_of_handle(handle, api_key))

    @classmethod
    def _of_handle(cls, runtime: ClientRuntime, content: HandleContent) -> SamplingClient:
        return cls.create(
            runtime,
            sampling_session_id=content.sampling_session_id,
            retry_config=_retry_config_of(content),
            record_stability_info=content.record_stability_info,
            base_model=content.base_model,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_pickle, (type(self), self.get_sampler_handle())

    def on_queue_state_change(self, queue_state: Any, queue_state_reason: str | None) -> None:
        """Do nothing. Older scripts override this method, but nothing calls it.

        The argument `on_queue_state` of `ServiceClient` replaces it.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     sampling.on_queue_state_change("paused_capacity", "all machines are busy")
        """

    sample_async = async_result(sample)
    compute_logprobs_async = async_result(compute_logprobs)
    get_base_model_async = async_blocking(get_base_model)
    get_tokenizer_async = async_blocking(get_tokenizer)


# A runtime with an equal id replaces one of these only when no client uses the old runtime.
_copies: Final[Shared[tuple[object, ...], SamplingClient]] = Shared(weakref.WeakValueDictionary())


_KEPT_RETRY_FIELDS: Final = ("max_connections", "enable_retry_logic", "max_attempts")


def _retry_config_of(content: HandleContent) -> RetryConfig | None:
    kept = content.ours.get("retry_config")
    if not isinstance(kept, Mapping):
        return None  # a handle of the reference client has no such settings
    return RetryConfig(**{name: kept[name] for name in _KEPT_RETRY_FIELDS if name in kept})


def _from_pickle(cls: type[SamplingClient], handle: str) -> SamplingClient:
    """Return the client of this process for a pickled client.

    Equal pickles give the same object as long as it is used, so that it keeps its sample numbers and the
    server's description of the sampler.
    """
    from tinker_sync.clients._handles import runtime_of_handle

    runtime, content = runtime_of_handle(handle, None)
    return _copies.get((cls, handle, id(runtime)), lambda: cls._of_handle(runtime, content))


def _create_session(line: SampleLine, asked: CreateSamplingSessionRequest) -> None:
    """Create the sampling session. Runs on a worker."""
    runtime = line.runtime
    request = asked.model_copy(update={"session_id": runtime.server.open_session()})
    if asked.model_path is not None and runtime.server.ready().facts.dialect.knows_all:
        refuse_bare_path(asked.model_path, "create_sampling_client")
    runtime.server.warn_of_unlisted(asked.base_model)
    created = runtime.server.call("create_sampling_session", request, usual_s=CREATE_S)
    runtime.lifecycle.notify(ModelNamed(model=created.sampling_session_id, base_model=asked.base_model))
    line.sampling_session_id = created.sampling_session_id


def _use_saved(line: SampleLine, trained: TrainingLine, saved: SaveWeightsForSamplerResponseInternal) -> None:
    """Use the sampler that a save has made, or create one from the saved path. Runs on a worker."""
    runtime = line.runtime
    line.run_id = trained.model_id
    if saved.sampling_session_id is not None:
        line.sampling_session_id = saved.sampling_session_id
    else:
        seq_id = runtime.server.session.next_sampling_session_seq_id()
        _create_session(
            line,
            CreateSamplingSessionRequest(
                session_id="", sampling_session_seq_id=seq_id, model_path=saved.path
            ),
        )
    runtime.lifecycle.notify(ModelNamed(model=line.sampling_session_id, like=trained.model_id))


def _prompt_logprobs(response: SampleResponse) -> list[float | None]:
    scored = response.prompt_logprobs
    if scored is None:
        raise TinkerError("the server scored no prompt tokens, though it was asked to")
    return scored
