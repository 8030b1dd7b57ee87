"""Calls that make samplers, save their weights and take samples.

A sampler in memory keeps the weights that it was opened with, also if its checkpoint is replaced. An
*inflight save* is a request with `kind` "inflight": it makes a sampler, and sets the same weights in all
samplers that earlier inflight saves of the model have made.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tinker_sync.local.engine.sampling import SampleSpec
from tinker_sync.local.server.calls import Calls, Refused, UserFault
from tinker_sync.local.server.checkpoints import (
    checked_ttl,
    name_of,
    params_of,
    parse,
    parse_sampler,
    read_checkpoint,
    save,
)
from tinker_sync.local.server.promises import CLONE, Failure, note_finished
from tinker_sync.local.server.state import UNSAVED, LiveSampler, path_of
from tinker_sync.local.server.training import submit, tokens_of
from tinker_sync.local.store import StoreError
from tinker_sync.types.described import GetSamplerResponseInternal
from tinker_sync.types.future import UntypedAPIFuture
from tinker_sync.types.sampling import (
    NO_LOGPROB,
    PromptAltTokens,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    TopkLogprobs,
)
from tinker_sync.types.session import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
)
from tinker_sync.types.tensor_data import TensorData
from tinker_sync.types.weights import SaveWeightsForSamplerRequest, SaveWeightsForSamplerResponseInternal
from tinker_sync.wire.proto.samples import encode_sample_response

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinker_sync.local.engine.host import BaseModel
    from tinker_sync.local.engine.lora import LoraParams
    from tinker_sync.local.engine.sampling import Sampled, SampleResult, TopK
    from tinker_sync.local.server.calls import Ask
    from tinker_sync.local.server.promises import Promise
    from tinker_sync.local.server.state import Service, UsageKind

calls = Calls()


# ------------------------------------------------------------------------------------------------ conversion


MOST_SAMPLES: Final = 65_536
"""The most samples of one request, which bounds the ids in the answer to it."""


def sample_spec(
    request: SampleRequest, base: BaseModel, params: LoraParams | None, seed: int, max_cells: int
) -> SampleSpec:
    """Return a sample request in the form of the engine.

    Args:
        request: the request.
        base: the base model to sample from.
        params: the adapter; None for the base model itself.
        seed: the seed for a request without one.
        max_cells: the largest size of each array of scores in the response, and the most samples.

    Raises:
        UserFault: the prompt has a chunk that is not text, or the response would be too large.
    """
    prompt, asked = tokens_of(request.prompt, "prompt"), request.sampling_params
    targets = request.target_prompt_logprobs
    spec = SampleSpec(
        prompt=prompt,
        seed=seed if asked.seed is None else asked.seed,
        max_tokens=base.config.max_positions - len(prompt) if asked.max_tokens is None else asked.max_tokens,
        params=params,
        num_samples=request.num_samples,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        stop_tokens=_stop_tokens(asked.stop, base),
        stop_texts=_stop_texts(asked.stop),
        prompt_logprobs=bool(request.prompt_logprobs),
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_logprobs=request.topk_sample_logprobs,
        target_prompt_logprobs=None if targets is None else targets.to_numpy(),
        prompt_alt_tokens=request.prompt_alt_tokens_k,
    )
    _check_cells(spec, max_cells)
    return spec


def _check_cells(spec: SampleSpec, most: int) -> None:
    """Raise `UserFault` for more than `most` cells in an array of the response, or for too many samples."""
    length = len(spec.prompt)
    targets = spec.target_prompt_logprobs
    for name, cells in {
        "topk_prompt_logprobs": length * spec.topk_prompt_logprobs,
        "topk_sample_logprobs": spec.num_samples * spec.max_tokens * spec.topk_logprobs,
        "prompt_alt_tokens_k": length * spec.prompt_alt_tokens,
        "target_prompt_logprobs": 0 if targets is None else length * len(np.unique(targets)),
    }.items():
        if cells > most:
            raise UserFault(f"{name}: {cells} cells are asked for, at most {most} are computed")
    most_samples = min(most, MOST_SAMPLES)
    if spec.num_samples > most_samples:
        raise UserFault(f"num_samples: {spec.num_samples} are asked for, at most {most_samples} are drawn")


def _stop_tokens(stop: Any, base: BaseModel) -> frozenset[int]:
    if stop is None:
        return base.end_tokens
    return frozenset() if isinstance(stop, str) else frozenset(each for each in stop if isinstance(each, int))


def _stop_texts(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(each for each in stop if isinstance(each, str))


def sample_response(result: SampleResult, sequence_ids: Iterable[str | None]) -> SampleResponse:
    """Return a sample result in the form of the protocol; `sequence_ids` has an id for each sample."""
    prompt, alternatives = result.prompt, None
    if prompt.alt_tokens is not None and prompt.alt_logprobs is not None:
        alternatives = PromptAltTokens(
            TensorData.from_numpy(prompt.alt_tokens), TensorData.from_numpy(prompt.alt_logprobs)
        )
    targets = prompt.target_logprobs
    return SampleResponse(
        [_sequence(*each) for each in zip(result.samples, sequence_ids, strict=True)],
        prompt.logprobs,
        _topk(prompt.topk),
        None if targets is None else TensorData.from_numpy(targets),
        result.prompt_cache_hit_tokens,
        alternatives,
    )


def _sequence(sample: Sampled, sequence_id: str | None) -> SampledSequence:
    reason: Any = sample.stop_reason
    return SampledSequence(reason, sequence_id, sample.tokens, sample.logprobs, _topk(sample.topk))


def _topk(topk: TopK | None) -> TopkLogprobs | None:
    """Return the likeliest tokens in the form of the protocol; cells without a score get `NO_LOGPROB`."""
    if topk is None:
        return None
    missing = np.isnan(topk.logprobs)
    return TopkLogprobs(
        np.where(missing, 0, topk.token_ids).astype(np.int32),
        np.where(missing, NO_LOGPROB, topk.logprobs).astype(np.float32),
    )


# -------------------------------------------------------------------------------------- samplers and samples


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
    stored = await service.on_disk(service.store.checkpoint, *key)
    found = stored.info["base_model"]
    if base_model is not None and base_model != found:
        raise UserFault(f"{path} is of base model {found}, not {base_model}")
    return service.base_model(found).name, stored.save_id


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
    if request.sampling_session_id is None:
        raise Refused(422, "sampling_session_id is missing; create_sampling_session makes a sampler")
    sampler = await service.sampler(request.sampling_session_id)
    number = request.seq_id
    request_id: str | None = None if number is None else sampler.seen.get(number, ask.digest)
    if request_id is None:
        promise = service.promises.open("Sample", sampler.session_id)
        request_id = promise.request_id
        if number is not None:
            sampler.seen.add(number, ask.digest, request_id)
        _start(service, sampler, request, promise)
    if service.flags.json_only:
        return UntypedAPIFuture(request_id=request_id)
    return UntypedAPIFuture(
        request_id=request_id, sample_sequence_ids=sequence_ids(request_id, request.num_samples)
    )


def sequence_ids(request_id: str, count: int) -> list[str]:
    """Return an id for each sequence of a request's future result, in order; at most `MOST_SAMPLES` ids."""
    return [f"{request_id}:{index}" for index in range(max(0, min(count, MOST_SAMPLES)))]


def _start(service: Service, sampler: LiveSampler, request: SampleRequest, promise: Promise) -> None:
    """Begin the work of a request in a task, which settles the promise."""
    clone = (request.seq_id or 0) // CLONE
    promise.on_done.append(lambda promise: note_finished(service, sampler, clone, promise))
    started_s = service.clock.time()

    async def work() -> None:
        await service.keep(promise, _sample(service, sampler, request, promise), _to_protobuf)

    def give_up() -> None:
        service.promises.settle(promise, Failure("the request was cancelled", "user"))
        service.trace(promise, started_s)
        task.cancel()

    task = service.spawn(work())
    promise.cancel = give_up


async def _sample(
    service: Service, sampler: LiveSampler, request: SampleRequest, promise: Promise
) -> SampleResponse:
    params = await _params_of(service, sampler)
    sampler.unnumbered += request.seq_id is None
    number = f"unnumbered {sampler.unnumbered}" if request.seq_id is None else request.seq_id
    seed = service.chance("sample", sampler.sampler_id, number)
    request.validate()
    spec = sample_spec(request, sampler.base, params, seed, service.flags.max_cells)
    order = service.host.sample(sampler.base.name, spec)
    try:
        result = await service.computed(order.future)
    except asyncio.CancelledError:
        service.host.cancel(order)
        raise
    _count(service, sampler, request, result)
    ids = sequence_ids(promise.request_id, request.num_samples)
    if request.record_stability_info:
        for name, sample in zip(ids, result.samples, strict=True):
            service.recorded.add(name, sample.tokens, sample.logprobs)
    return sample_response(result, [None] * len(ids) if service.flags.json_only else ids)


async def _params_of(service: Service, sampler: LiveSampler) -> LoraParams | None:
    while (key := sampler.adapter) is not None:
        try:
            return await service.adapters.get(key, partial(load_params, service, sampler))
        except Exception:
            if sampler.adapter == key:  # else an inflight save has changed the weights meanwhile
                raise
    return None


def _count(service: Service, sampler: LiveSampler, request: SampleRequest, result: SampleResult) -> None:
    prompt, cached = request.prompt.length, result.prompt_cache_hit_tokens
    counts: dict[UsageKind, int] = {
        "prefill": prompt - cached,
        "prefill_cached": cached,
        "sample": sum(len(sample.tokens) for sample in result.samples),
    }
    for kind, tokens in counts.items():
        service.count_usage(sampler.session_id, sampler.base.name, kind, tokens)


def _to_protobuf(response: SampleResponse) -> bytes:
    return encode_sample_response(response).join()


# ----------------------------------------------------------------------------------- the weights of samplers


@calls.of("save_weights_for_sampler")
async def save_weights_for_sampler(service: Service, ask: Ask) -> Any:
    """Save weights to sample from: in a checkpoint, or in memory for a sampler that this call makes."""
    request = ask.read(SaveWeightsForSamplerRequest)
    model = service.model(request.model_id)
    if request.path is not None and request.sampling_session_seq_id is not None:
        raise Refused(400, "path and sampling_session_seq_id exclude each other")
    if request.kind == "inflight" and request.sampling_session_seq_id is None:
        raise Refused(
            400, "kind: inflight needs sampling_session_seq_id; a named checkpoint is always a snapshot"
        )

    async def named() -> Any:
        name = name_of(service, request)
        replaced, openers = await _pin(service, model.run_id, name)
        saved = await save(
            service,
            model,
            "sampler",
            name,
            ttl_s=checked_ttl(request.ttl_seconds),
            overwrite=True,  # the request has no field for it, and training loops use one name repeatedly
            user_metadata=request.user_metadata,
        )
        if replaced is not None:
            newest = (await service.on_disk(service.store.checkpoint, model.run_id, "sampler", name)).save_id
            for sampler in service.samplers.values():
                # Samplers that were opened while the checkpoint was being replaced get the new weights.
                if sampler.adapter == replaced and sampler.sampler_id not in openers:
                    sampler.adapter = newest
        return SaveWeightsForSamplerResponseInternal(path=saved.tinker_path, type="save_weights_for_sampler")

    async def unsaved() -> Any:
        params = await service.computed(service.host.train(model.run_id, lambda run: run.params.snapshot()))
        sampler_id = f"{model.session_id}:sample:{request.sampling_session_seq_id}"
        await service.on_disk(
            service.store.add_sampler,
            sampler_id,
            session_id=model.session_id,
            base_model=model.base.name,
            source=f"{UNSAVED}{model.run_id}",
        )
        sampler = LiveSampler(sampler_id, model.session_id, model.base, sampler_id)
        service.samplers[sampler_id] = sampler
        service.adapters.put(sampler_id, params)
        if request.kind == "inflight":
            _move(service, model.run_id, sampler)
        return SaveWeightsForSamplerResponseInternal(
            sampling_session_id=sampler_id, type="save_weights_for_sampler"
        )

    work = named if request.sampling_session_seq_id is None else unsaved
    return submit(service, ask, "SaveWeightsForSampler", model, request.seq_id, work)


async def _pin(service: Service, run_id: str, name: str) -> tuple[str | None, set[str]]:
    """Keep the weights of a sampler checkpoint that is about to be replaced, for the samplers that use it.

    Returns:
        The key of the checkpoint's adapter, None if there is no checkpoint; the ids of the samplers.
    """
    try:
        key = (await service.on_disk(service.store.checkpoint, run_id, "sampler", name)).save_id
    except StoreError:
        return None, set()
    users = [each for each in service.samplers.values() if each.adapter == key]
    for sampler in users:
        with contextlib.suppress(StoreError):  # a damaged checkpoint: each sample fails with the reason
            await service.adapters.get(key, partial(load_params, service, sampler))
    return key, {sampler.sampler_id for sampler in users}


async def load_params(service: Service, sampler: LiveSampler) -> LoraParams:
    """Return the adapter of a sampler from its checkpoint.

    Raises:
        UserFault: the weights of the sampler were never saved, or another save has replaced the checkpoint.
        StoreError: the checkpoint is gone or cannot be read.
    """
    key = sampler.adapter
    if key is None or "#" not in key:
        raise UserFault(
            f"the weights of sampler {sampler.sampler_id} have left memory, because those of newer ones need "
            "it; save weights under a name to sample from them later"
        )
    path = path_of(key)
    info, arrays = await read_checkpoint(service, path, "sampling")
    if key != (await service.on_disk(service.store.checkpoint, *parse(path))).save_id:
        raise UserFault(f"{path} was saved anew since sampler {sampler.sampler_id} was made; make a new one")
    return params_of(info, arrays, sampler.base.config)


def _move(service: Service, run_id: str, newest: LiveSampler) -> None:
    """Set the weights of `newest` in all samplers that inflight saves of the model have made."""
    newest.follows = run_id
    followers = [each for each in service.samplers.values() if each.follows == run_id]
    older = {each.adapter for each in followers}
    for sampler in followers:
        sampler.adapter = newest.adapter
    service.drop_unused(*older)
