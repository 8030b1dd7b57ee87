"""The weights of samplers: saving them, and the weights of open samplers when a checkpoint is replaced.

A sampler in memory keeps the weights that it was opened with, also if its checkpoint is replaced. A sample
request that names a checkpoint instead of a sampler gets the newest weights. An *inflight save* is a request
with `kind` "inflight": it makes a sampler, and sets the same weights in all samplers that earlier inflight
saves of the model have made.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from tinker_sync.local.server.calls import Calls
from tinker_sync.local.server.problems import Refused, UserFault
from tinker_sync.local.server.service import UNSAVED, LiveSampler, path_of
from tinker_sync.local.server.training import submit
from tinker_sync.local.server.weights import checked_ttl, name_of, params_of, parse, read_checkpoint, save
from tinker_sync.local.store import StoreError
from tinker_sync.types.weights import SaveWeightsForSamplerRequest, SaveWeightsForSamplerResponseInternal

if TYPE_CHECKING:
    from tinker_sync.local.engine.lora import LoraParams
    from tinker_sync.local.server.calls import Ask
    from tinker_sync.local.server.service import Service

calls = Calls()


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
            newest = await service.on_disk(service.store.save_id, model.run_id, "sampler", name)
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
        key = await service.on_disk(service.store.save_id, run_id, "sampler", name)
    except StoreError:
        return None, set()
    users = [each for each in service.samplers.values() if each.adapter == key]
    for sampler in users:
        if sampler.session_id is None:  # every request of its clients has the path
            del service.samplers[sampler.sampler_id]
            service.drop_unused(key)
            continue
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
    if sampler.session_id is not None and key != await service.on_disk(service.store.save_id, *parse(path)):
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
