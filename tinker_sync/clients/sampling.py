"""`SamplingClient`: samples from one set of weights, thousands at once if need be."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, overload

from tinker_sync._observe import ModelNamed, TokensUsed
from tinker_sync._secret import mask_repr
from tinker_sync.clients import _deadlines
from tinker_sync.clients._handles import Carried, core_of_handle, encode_handle
from tinker_sync.clients._twins import blocking_twin, result_twin
from tinker_sync.clients.retry_config import RetryConfig
from tinker_sync.errors import InvalidInputError, TinkerError
from tinker_sync.runtime import _fork
from tinker_sync.runtime.admission import Plan, Pledge, length_of
from tinker_sync.runtime.chunking import estimate_prompt_bytes
from tinker_sync.runtime.combine import CombinedFuture
from tinker_sync.runtime.fetcher import decode_with
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.numbers import numbers
from tinker_sync.runtime.once import Once
from tinker_sync.runtime.sample import SampleOrder
from tinker_sync.runtime.sample_response import check_response
from tinker_sync.runtime.session_poll import SessionPoll
from tinker_sync.types import (
    CreateSamplingSessionRequest,
    GetSamplerResponseInternal,
    JoinSamplingSessionRequest,
    ModelInput,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    SaveWeightsForSamplerResponseInternal,
    TensorData,
)
from tinker_sync.wire import json as wire_json
from tinker_sync.wire import proto
from tinker_sync.wire.adapt import json_body, normalise_sample_request, refuse_unsupported

if TYPE_CHECKING:
    from tinker_sync.runtime.core import Core, Machinery
    from tinker_sync.text.tokenizer import Tokenizer
    from tinker_sync.transport.call import Reply

CLONE_BLOCK: Final = 10**9
"""Each copy of a client numbers its samples in a block of its own."""

_read_response: Final = decode_with(
    proto.decode_sample_response, lambda tree: wire_json.from_plain(tree, SampleResponse)
)


class SamplingClient:
    """Samples from one set of weights. Made by a service or training client; threads may share it.

    `sample` returns at once, with a future. Copies sent to other processes, by pickle or as a handle, carry
    no key: the other process finds its own.
    """

    def __init__(
        self,
        core: Core,
        *,
        sampling_session_id: str,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        copied: bool = False,
    ) -> None:
        self._core = core
        self._sampling_session_id = sampling_session_id
        self._retry_config = retry_config or RetryConfig()
        self._record_stability_info = record_stability_info
        # The original counts from 0 and asks nobody; a copy first needs a block of its own.
        self._numbers: Once[Callable[[], int]] = Once()
        if not copied:
            self._numbers.get(numbers)
        self._poll_for_all: Once[Callable[..., Any]] = Once()
        self._clone_id = 0
        _fork.renew_in_child(self)

    @classmethod
    def of_saved(
        cls, core: Core, saved: SaveWeightsForSamplerResponseInternal, **options: Any
    ) -> SamplingClient:
        """A client for weights that were saved for this session; where servers give a path, through it."""
        if saved.sampling_session_id is None:
            return cls.open(core, model_path=saved.path, **options)
        return cls(core, sampling_session_id=saved.sampling_session_id, **options)

    @classmethod
    def open(
        cls,
        core: Core,
        *,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """Have the server make a sampling session, and a client for it."""
        if model_path is None and base_model is None:
            raise InvalidInputError("create_sampling_client: give model_path or base_model")
        if model_path is not None and core.settings.is_vendor_host and not model_path.startswith("tinker://"):
            raise InvalidInputError(
                f"create_sampling_client: model_path must start with 'tinker://', got {model_path!r}"
            )
        session_id = core.session_id()
        request = CreateSamplingSessionRequest(
            session_id=session_id,
            sampling_session_seq_id=core.session.next_sampling_session_seq_id(),
            base_model=base_model,
            model_path=model_path,
        )
        created = core.call("create_sampling_session", request, usual_s=_deadlines.CREATE_S)
        core.tell(ModelNamed(model=created.sampling_session_id, base_model=base_model))
        return cls(
            core,
            sampling_session_id=created.sampling_session_id,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    def result(self, timeout: float | None = None) -> SamplingClient:
        """This client; it is ready. For scripts that wait for a client as for a future."""
        del timeout
        return self

    # -------------------------------------------------------------------------------------- sampling

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
        deadline: float | None = None,
    ) -> APIFuture[SampleResponse]:
        """Sample continuations of a prompt.

        Args:
            prompt: what to continue.
            num_samples: how many continuations.
            sampling_params: length, temperature, stops and so on.
            include_prompt_logprobs: also score the prompt's tokens.
            topk_prompt_logprobs: also give so many likeliest tokens at each prompt position.
            topk_sample_logprobs: also give so many likeliest tokens at each sampled position.
            target_prompt_logprobs: token ids to score, a row for each prompt token after the first.
            prompt_alt_tokens_k: draw so many alternatives to each prompt token after the first.
            prompt_logprobs_last_n: score only the last so many prompt tokens.
            deadline: seconds until to give up waiting for the result.

        Raises:
            InvalidInputError: it cannot be sent; nothing was.
        """
        request = SampleRequest(
            num_samples=num_samples,
            prompt=prompt,
            sampling_params=sampling_params,
            sampling_session_id=self._sampling_session_id,
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs,
            target_prompt_logprobs=target_prompt_logprobs,
            prompt_alt_tokens_k=prompt_alt_tokens_k,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            record_stability_info=self._record_stability_info,
        )
        request.validate()
        core = self._core
        deadline_at = _deadlines.deadline_at(
            core.clock.now(), deadline, core.settings.deadline_s, _deadlines.SAMPLE_S
        )
        machinery = core.ready(deadline_at)
        dialect = machinery.facts.dialect
        refuse_unsupported(request, dialect)
        sent = normalise_sample_request(request, dialect)
        with core.admission.admitted(partial(_plan, request)) as pledge:
            future: APIFuture[SampleResponse] = core.future()
            pledge.follow(future)
            order = SampleOrder(
                request=sent,
                next_number=self._next_number,
                estimate_bytes=estimate_prompt_bytes(prompt),
                deadline_at=deadline_at,
                decode=partial(_settled, request, pledge),
                max_attempts=self._retry_config.attempts,
                abandoned=core.abandon,
                encode=lambda numbered: json_body(numbered, dialect),
                fetch=partial(self._fetch, machinery),
            )
            if self._numbers.made is None:
                core.send_pool.run(lambda: self._put_once_numbered(order, future))
            else:
                machinery.lane.put(order, future)
        return future

    def _put_once_numbered(self, order: SampleOrder, future: APIFuture[SampleResponse]) -> None:
        """A copy asks for its numbers before its first sample; on a worker, so that nobody's call waits."""
        try:
            self._numbers.get(self._join)
            lane = self._core.machinery.lane
        except Exception as error:  # noqa: BLE001  # whatever it was, somebody waits for the sample
            future.fail(error)
        else:
            lane.put(order, future)

    def compute_logprobs(
        self,
        prompt: ModelInput,
        prompt_logprobs_last_n: int | None = None,
        *,
        deadline: float | None = None,
    ) -> APIFuture[list[float | None]]:
        """Score the tokens of a prompt; None stands where there is no score, such as at the first.

        Args:
            prompt: what to score.
            prompt_logprobs_last_n: score only the last so many tokens.
            deadline: seconds until to give up waiting for the result.
        """
        core = self._core
        sampled = self.sample(
            prompt,
            1,
            SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            deadline=deadline,
        )
        return CombinedFuture(
            [sampled],
            lambda responses: _prompt_logprobs(responses[0]),
            submit=core.callback_pool.run,
            clock=core.clock,
        )

    def _next_number(self) -> int:
        return self._numbers.get(self._join)()

    def renew_after_fork(self) -> None:
        """The child is a copy like any other: it needs numbers of its own."""
        self._numbers = Once()
        self._poll_for_all = Once()

    def _fetch(self, machinery: Machinery, *promise: Any, **options: Any) -> Any:
        """Looked up when there is a promise: by then a copy of the client has its numbers."""
        return self._poll_for_all.get(partial(self._session_poll, machinery))(*promise, **options)

    def _session_poll(self, machinery: Machinery) -> Callable[..., Any]:
        """How results are waited for: together where the server offers that, else one by one."""
        if not machinery.facts.config.sample_use_retrieve_futures:
            return machinery.fetcher.fetch
        return SessionPoll(
            machinery.fetcher, self._sampling_session_id, self._clone_id, clock=self._core.clock
        ).fetch

    def _join(self) -> Callable[[], int]:
        """A block of numbers that no other copy uses."""
        core = self._core
        if core.machinery.facts.config.sample_join_sampling_session:
            joined = core.call(
                "join_sampling_session",
                JoinSamplingSessionRequest(sampling_session_id=self._sampling_session_id),
                usual_s=_deadlines.REST_S,
            )
            clone = joined.client_counter
        else:
            clone = uuid.uuid4().int % CLONE_BLOCK + 1
        self._clone_id = clone
        return numbers(clone * CLONE_BLOCK)

    # -------------------------------------------------------------------------------------- about it

    def get_base_model(self) -> str:
        """The name of the model that was fine-tuned, or that is sampled from. Blocks."""
        return self._about().base_model

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
        """
        from tinker_sync.text.loading import get_tokenizer

        about = self._about()
        return get_tokenizer(about.base_model, about.tokenizer_id, backend=backend)

    def _about(self) -> GetSamplerResponseInternal:
        about: GetSamplerResponseInternal = self._core.call(
            "get_sampler", path={"sampler": self._sampling_session_id}, usual_s=_deadlines.REST_S
        )
        return about

    # -------------------------------------------------------------------------------------- going elsewhere

    def get_sampler_handle(self, *, include_api_key: bool = False) -> str:
        """Text from which another process makes a client for the same weights.

        Args:
            include_api_key: put the key in, readable for everybody who sees the handle. Without it the other
                process looks for a key as a new client does.
        """
        return encode_handle(
            self._core,
            self._sampling_session_id,
            record_stability_info=self._record_stability_info,
            retry_config={name: getattr(self._retry_config, name) for name in _KEPT_RETRY_FIELDS},
            include_api_key=include_api_key,
        )

    @classmethod
    def from_sampler_handle(cls, handle: str, *, api_key: str | None = None) -> SamplingClient:
        """A client of the weights a handle names.

        Args:
            handle: what `get_sampler_handle` gave.
            api_key: the key to use; None: as a new client finds one.

        Raises:
            InvalidInputError: it is no handle.
        """
        handle, api_key = mask_repr(handle), mask_repr(api_key)  # tracebacks show local variables
        core, carried = core_of_handle(handle, api_key)
        return cls(
            core,
            sampling_session_id=carried.sampling_session_id,
            retry_config=_retry_config_of(carried),
            record_stability_info=carried.record_stability_info,
            copied=True,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_pickle, (type(self), self.get_sampler_handle())

    @property
    def sampling_session_id(self) -> str:
        """What servers know this sampler by."""
        return self._sampling_session_id

    @property
    def holder(self) -> Core:
        """What is shared with the other clients of the same service client."""
        return self._core

    def on_queue_state_change(self, queue_state: Any, queue_state_reason: str | None) -> None:
        """Nothing; a place for subclasses of older scripts. See `on_queue_state` of `ServiceClient`."""

    def __repr__(self) -> str:
        return f"<SamplingClient {self._sampling_session_id}>"

    sample_async = result_twin(sample)
    compute_logprobs_async = result_twin(compute_logprobs)
    get_base_model_async = blocking_twin(get_base_model)
    get_tokenizer_async = blocking_twin(get_tokenizer)


_KEPT_RETRY_FIELDS: Final = ("max_connections", "enable_retry_logic", "max_attempts")


def _retry_config_of(carried: Carried) -> RetryConfig | None:
    kept = carried.ours.get("retry_config")
    if not isinstance(kept, Mapping):
        return None  # a handle of the reference client has none
    return RetryConfig(**{name: kept[name] for name in _KEPT_RETRY_FIELDS if name in kept})


def _from_pickle(cls: type[SamplingClient], handle: str) -> SamplingClient:
    return cls.from_sampler_handle(handle)


def _plan(request: SampleRequest) -> Plan:
    """What a sample takes at most."""
    longest = request.sampling_params.max_tokens
    return Plan(
        model=request.sampling_session_id or "",
        prompt=length_of(request.prompt),
        sampled=None if longest is None else longest * request.num_samples,
    )


def _settled(request: SampleRequest, pledge: Pledge, reply: Reply, tree: Any) -> SampleResponse:
    """Read a response, and have it counted before anybody sees it."""
    response = _read_response(reply, tree)
    length = length_of(request.prompt)
    cached = min(response.prompt_cache_hit_tokens, length)
    used = TokensUsed(
        model=request.sampling_session_id or "",
        prompt=length - cached,
        cached=cached,
        sampled=sum(_sampled(sequence) for sequence in response.sequences),
    )
    pledge.settle(used)  # also where the check finds something amiss: it was computed
    return check_response(request, response)


def _sampled(sequence: SampledSequence) -> int:
    return len(sequence.tokens if sequence.tokens_np is None else sequence.tokens_np)


def _prompt_logprobs(response: SampleResponse) -> list[float | None]:
    scored = response.prompt_logprobs
    if scored is None:
        raise TinkerError("the server scored no prompt tokens, though it was asked to")
    return scored
