"""Calls that make samplers and take samples."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from tinker_sync.local.server import convert
from tinker_sync.local.server.calls import Calls
from tinker_sync.local.server.problems import Refused, UserFault
from tinker_sync.local.server.promises import Result
from tinker_sync.local.server.retrieval import CLONE, note_finished
from tinker_sync.local.server.sampler_weights import load_params
from tinker_sync.local.server.service import UNSAVED, LiveSampler, path_of
from tinker_sync.local.server.weights import parse_sampler
from tinker_sync.local.store import StoreError
from tinker_sync.types.described import GetSamplerResponseInternal
from tinker_sync.types.future import UntypedAPIFuture
from tinker_sync.types.sampling import SampleRequest
from tinker_sync.types.session import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
)
from tinker_sync.wire.proto.samples import encode_sample_response

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tinker_sync.local.engine.lora import LoraParams
    from tinker_sync.local.engine.sampling import SampleResult
    from tinker_sync.local.server.calls import Ask
    from tinker_sync.local.server.promises import Promise
    from tinker_sync.local.server.service import Service
    from tinker_sync.types.sampling import SampleResponse

calls = Calls()


@calls.of("create_sampling_session")
async def create_sampling_session(service: Service, ask: Ask) -> Any:
    """Make a sampler of a base model or a checkpoint. A repeated request gets the same sampler."""
    request = ask.read(CreateSamplingSessionRequest)
    await service.session(request.session_id)
    sampler_id = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
    await service.once(("sampler", sampler_id), ask.digest, lambda: _make(service, sampler_id, request))
    return CreateSamplingSessionResponse(sampling_session_id=sampler_id)


async def _make(service: Service, sampler_id: str, request: CreateSamplingSessionRequest) -> None:
    base, source = await _source(service, request.base_model, request.model_path)
    sampler = LiveSampler(sampler_id, request.session_id, service.base_model(base), source)
    # Add it now, so that a save that replaces its checkpoint finds it.
    known = service.samplers.setdefault(sampler_id, sampler)
    if known is not sampler:
        if (known.base, known.adapter) != (sampler.base, source):
            raise Refused(
                409, f"there is a sampler {sampler_id} already; use another sampling_session_seq_id"
            )
        return  # made again from its record, after a restart
    try:
        await service.on_disk(_record, service, sampler)
    except BaseException:
        service.samplers.pop(sampler_id, None)
        service.drop_unused(sampler.adapter)
        raise


def _record(service: Service, sampler: LiveSampler) -> None:
    """Add the record of a sampler to the store, unless an earlier start of the server has added the same."""
    sampler_id, base, source = sampler.sampler_id, sampler.base.name, sampler.adapter
    assert sampler.session_id is not None  # noqa: S101
    try:
        service.store.add_sampler(sampler_id, session_id=sampler.session_id, base_model=base, source=source)
    except StoreError as problem:
        if problem.kind != "exists":
            raise
        row = service.store.sampler(sampler_id)
        if (row.base_model, row.source) != (base, source):
            raise


async def _source(service: Service, base_model: str | None, path: str | None) -> tuple[str, str | None]:
    """Return the name of the base model, and the save of the checkpoint if the request names one.

    Raises:
        UserFault: the request names neither a base model nor a checkpoint, the base model is not offered or
            is not that of the checkpoint, or the path is malformed or names a checkpoint for training.
        StoreError: the checkpoint does not exist.
    """
    if path is None:
        if base_model is None:
            raise UserFault("give base_model or model_path")
        return service.base_model(base_model).name, None
    key = parse_sampler(path)
    found = (await service.on_disk(service.store.checkpoint, *key)).base_model
    assert found is not None  # noqa: S101  # this store has it of every checkpoint
    if base_model is not None and base_model != found:
        raise UserFault(f"{path} is of base model {found}, not {base_model}")
    return service.base_model(found).name, await service.on_disk(service.store.save_id, *key)


@calls.of("join_sampling_session")
async def join_sampling_session(service: Service, ask: Ask) -> Any:
    """Return a number for one more process that shares a sampler."""
    sampler = await service.sampler(ask.read(JoinSamplingSessionRequest).sampling_session_id)
    sampler.clones += 1
    return JoinSamplingSessionResponse(client_counter=sampler.clones)


@calls.of("get_sampler")
async def get_sampler(service: Service, ask: Ask) -> Any:
    """Return the base model, the checkpoint and the tokenizer of a sampler."""
    row = await service.on_disk(service.store.sampler, ask.ids["sampler"])
    saved = row.source is not None and not row.source.startswith(UNSAVED)
    base = service.host.models.get(row.base_model)
    return GetSamplerResponseInternal(
        sampler_id=row.sampler_id,
        base_model=row.base_model,
        model_path=path_of(row.source or "") if saved else None,
        tokenizer_id=None if base is None else base.tokenizer_id,
    )


@calls.of("asample")
async def asample(service: Service, ask: Ask) -> Any:
    """Begin to take samples of one prompt, and return the promise of the result.

    A repeated request gets the promise of the first one if it has a sequence number.
    """
    request = ask.read(SampleRequest)
    sampler = await _sampler(service, request)
    number = request.seq_id
    request_id: str | None = None if number is None else sampler.seen.get(number, ask.digest)
    if request_id is None:
        promise = service.promises.open("Sample", sampler.session_id)
        request_id = promise.request_id
        if number is not None:
            sampler.seen.add(number, ask.digest, request_id)
        if sampler.session_id is None:
            _drop_later(service, sampler, promise)
        _Sampling(service, sampler, request, promise).start()
    if service.flags.json_only:
        return UntypedAPIFuture(request_id=request_id)
    return UntypedAPIFuture(
        request_id=request_id, sample_sequence_ids=sequence_ids(request_id, request.num_samples)
    )


def sequence_ids(request_id: str, count: int) -> list[str]:
    """Return an id for each sequence of a request's future result, in order; at most `MOST_SAMPLES` ids."""
    return [f"{request_id}:{index}" for index in range(max(0, min(count, convert.MOST_SAMPLES)))]


async def _sampler(service: Service, request: SampleRequest) -> LiveSampler:
    if request.sampling_session_id is not None:
        return await service.sampler(request.sampling_session_id)
    base, source = await _source(service, request.base_model, request.model_path)
    name = source or base
    if name not in service.samplers:
        service.samplers[name] = LiveSampler(name, None, service.base_model(base), source)
    return service.samplers[name]


def _drop_later(service: Service, sampler: LiveSampler, promise: Promise) -> None:
    """Drop the outcome of a request without a session some time after its end, and the sampler with the last.

    Other outcomes and samplers leave memory with their session.
    """
    sampler.kept += 1
    request_id = promise.request_id  # without the outcome, which may be dropped earlier

    def drop() -> None:
        kept = service.promises.get(request_id)
        if kept is not None:
            service.promises.drop(kept)
        sampler.kept -= 1
        if not sampler.kept and service.samplers.get(sampler.sampler_id) is sampler:
            del service.samplers[sampler.sampler_id]
            service.drop_unused(sampler.adapter)

    promise.on_done.append(lambda _: service.later(service.flags.abandoned_after_s, drop))


class _Sampling:
    """The work for one sample request: fetch its adapter, run the sampler, settle the promise."""

    def __init__(
        self, service: Service, sampler: LiveSampler, request: SampleRequest, promise: Promise
    ) -> None:
        self._service = service
        self._sampler = sampler
        self._request = request
        self._promise = promise
        self._started = service.clock.time()
        self._given_up = False

    def start(self) -> None:
        """Pass the request to the host: at once for a base model, else when its adapter is loaded."""
        self._promise.cancel = self._give_up
        clone = (self._request.seq_id or 0) // CLONE
        self._promise.on_done.append(
            lambda promise: note_finished(self._service, self._sampler, clone, promise)
        )
        if self._sampler.adapter is None:
            self._submit(None)
        else:
            self._service.spawn(self._fetch(self._sampler.adapter))

    def _give_up(self) -> None:
        self._given_up = True
        self._settle(UserFault("the request was cancelled"))

    async def _fetch(self, key: str) -> None:
        try:
            params = await self._service.adapters.get(key, partial(load_params, self._service, self._sampler))
        except asyncio.CancelledError:
            raise
        except Exception as problem:  # noqa: BLE001  # it is the outcome
            newer = self._sampler.adapter
            if newer is not None and newer != key:  # an inflight save has changed the weights meanwhile
                await self._fetch(newer)
            else:
                self._settle(problem)
        else:
            if not self._given_up:
                self._submit(params)

    def _submit(self, params: LoraParams | None) -> None:
        service, request = self._service, self._request
        self._sampler.unnumbered += request.seq_id is None
        number = f"unnumbered {self._sampler.unnumbered}" if request.seq_id is None else request.seq_id
        seed = service.chance("sample", self._sampler.sampler_id, number)
        try:
            request.validate()
            spec = convert.sample_spec(request, self._sampler.base, params, seed, service.flags.max_cells)
            order = service.host.sample(self._sampler.base.name, spec)
        except Exception as problem:  # noqa: BLE001  # it is the outcome
            self._settle(problem)
            return

        def give_up() -> None:
            self._give_up()
            service.host.cancel(order)

        self._promise.cancel = give_up
        order.future.add_done_callback(self._hand_over)

    def _hand_over(self, future: Future[SampleResult]) -> None:
        """Pass the outcome from the sampling thread to the event loop."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._service.loop.call_soon_threadsafe(self._computed, future)

    def _computed(self, future: Future[SampleResult]) -> None:
        if self._given_up:
            return
        problem = future.exception() if not future.cancelled() else UserFault("the request was cancelled")
        if problem is not None:
            self._settle(problem)
            return
        result = future.result()
        self._count(result)
        ids = sequence_ids(self._promise.request_id, self._request.num_samples)
        if self._request.record_stability_info:
            for name, sample in zip(ids, result.samples, strict=True):
                self._service.recorded.add(name, sample.tokens, sample.logprobs)
        response = convert.sample_response(
            result, [None] * len(ids) if self._service.flags.json_only else ids
        )
        self._service.promises.settle(self._promise, Result(response, _to_protobuf))
        self._service.trace(self._promise, self._started)

    def _count(self, result: SampleResult) -> None:
        sampler, store = self._sampler, self._service.store
        if sampler.session_id is None:
            return
        prompt, cached = self._request.prompt.length, result.prompt_cache_hit_tokens
        sampled = sum(len(sample.tokens) for sample in result.samples)
        counts: dict[Literal["prefill", "prefill_cached", "sample"], int] = {
            "prefill": prompt - cached,
            "prefill_cached": cached,
            "sample": sampled,
        }
        for kind, tokens in counts.items():
            store.record_usage(sampler.session_id, None, sampler.base.name, kind, tokens)

    def _settle(self, problem: BaseException) -> None:
        outcome = self._service.failure(problem, "Sample")
        if self._service.closing and outcome.category == "server":
            return  # it has no outcome, so that clients take it again from the next server, as after a crash
        self._service.promises.settle(self._promise, outcome)
        self._service.trace(self._promise, self._started)


def _to_protobuf(response: SampleResponse) -> bytes:
    return encode_sample_response(response).join()
