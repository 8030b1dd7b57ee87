"""`SamplingClient`: samples from one set of weights, thousands of samples at once if needed."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tinker_sync._base.events import ModelNamed
from tinker_sync.clients import _deadlines
from tinker_sync.clients._arguments import check_sampler_path, refuse_bare_path
from tinker_sync.clients._creation import ready, start, start_after
from tinker_sync.clients._samples import SampleCalls
from tinker_sync.clients.retry_config import RetryConfig, as_retry_config
from tinker_sync.errors import InvalidInputError
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.lazy import Lazy, Shared
from tinker_sync.runtime.naming import names_requests
from tinker_sync.runtime.sample_line import SampleLine
from tinker_sync.types.session import CreateSamplingSessionRequest

if TYPE_CHECKING:
    from tinker_sync.clients._handles import HandleContent
    from tinker_sync.runtime.client_runtime import ClientRuntime
    from tinker_sync.runtime.training import TrainingLine
    from tinker_sync.types import (
        SaveWeightsForSamplerResponseInternal,
    )


@names_requests
class SamplingClient(SampleCalls["SamplingClient"]):
    """A client that samples from one set of weights. A service or training client makes it.

    Any thread may use it. The object is also the future of its own creation, so it is usable at once. Samples
    that are started before the sampler exists are held, and then sent in the order of the calls.
    `result()` and `await` wait until the client is ready and return it. If the creation fails, the futures of
    these samples fail and later calls raise.

    `sample` returns a future at once. A copy for another process, by pickle or as a handle, carries no key
    unless you ask for it: the other process finds its own.

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
        self._last = (None, None)
        self._described = Lazy()
        self._base_model = self._line.base_model = base_model
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
    if asked.model_path is not None and runtime.server.ready().facts.dialect.knows_all:
        refuse_bare_path(asked.model_path, "create_sampling_client")
    request = asked.model_copy(update={"session_id": runtime.server.open_session()})
    runtime.server.published.check_model(asked.base_model, runtime.server.ready().facts.dialect)
    created = runtime.server.call("create_sampling_session", request, usual_s=_deadlines.CREATE_S)
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
