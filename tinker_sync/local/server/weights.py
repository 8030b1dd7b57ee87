"""Calls that save, export, load, describe and copy checkpoints; `sampler_weights` saves those of samplers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np

from tinker_sync.errors import InvalidInputError
from tinker_sync.local.engine.lora import LoraParams, LoraSettings
from tinker_sync.local.engine.training import AdamState
from tinker_sync.local.server.calls import Calls
from tinker_sync.local.server.models import check_free, check_optimizer, known_request, start_model
from tinker_sync.local.server.problems import Refused, UserFault
from tinker_sync.local.server.training import submit
from tinker_sync.local.store import StoreError
from tinker_sync.types.checkpoint import ParsedCheckpointTinkerPath
from tinker_sync.types.future import UntypedAPIFuture
from tinker_sync.types.weights import (
    CopyWeightsRequest,
    CopyWeightsResponse,
    LoadWeightsRequest,
    LoadWeightsResponse,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponseInternal,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    SaveWeightsResponse,
    WeightsInfoResponse,
)

if TYPE_CHECKING:
    from tinker_sync.local.engine.model import ModelConfig
    from tinker_sync.local.engine.safetensors import Array
    from tinker_sync.local.engine.training import AdapterTrainer
    from tinker_sync.local.server.calls import Ask
    from tinker_sync.local.server.service import LiveModel, Service
    from tinker_sync.local.store import CheckpointKind
    from tinker_sync.types.checkpoint import Checkpoint

calls = Calls()

MIN_TTL_S: Final = 3600
MAX_TTL_S: Final = 10 * 365 * 24 * 3600
_MAX_RECIPIENTS: Final = 10
_FIRST, _SECOND, _STEPS = "optimizer.first", "optimizer.second", "optimizer.steps"


def checked_ttl(ttl_s: object) -> int | None:
    """Check a time to live, and return it unchanged; None means no limit.

    Raises:
        UserFault: the time is too short, too long or no whole number.
    """
    if ttl_s is None:
        return None
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int) or not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise UserFault(
            f"ttl_seconds: must be {MIN_TTL_S} (an hour) to {MAX_TTL_S} (ten years), got {ttl_s!r}"
        )
    return ttl_s


def parse(path: str) -> tuple[str, CheckpointKind, str]:
    """Return the run, kind and name in the path of a checkpoint. Raises `UserFault` for any other text."""
    try:
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    except InvalidInputError as problem:
        raise UserFault(str(problem)) from None
    return parsed.training_run_id, parsed.checkpoint_type, parsed.checkpoint_id.partition("/")[2]


def parse_state(path: str) -> tuple[str, CheckpointKind, str]:
    """Return the run, kind and name in the path of a checkpoint to train from.

    Raises:
        UserFault: the path is malformed, or names a checkpoint for sampling.
    """
    run_id, kind, name = parse(path)
    if kind == "sampler":
        raise UserFault(
            f"{path} has weights for sampling only; train on from what save_state saved, "
            "tinker://RUN/weights/NAME"
        )
    return run_id, kind, name


def parse_sampler(path: str) -> tuple[str, CheckpointKind, str]:
    """Return the run, kind and name in the path of a checkpoint to sample from.

    Raises:
        UserFault: the path is malformed, or names a checkpoint for training.
    """
    run_id, kind, name = parse(path)
    if kind == "training":
        raise UserFault(
            f"{path} is a checkpoint for training; sample from what save_weights_for_sampler saved, "
            "tinker://RUN/sampler_weights/NAME"
        )
    return run_id, kind, name


# ------------------------------------------------------------------------------------------------ saving


def info_of(base_model: str, lora: LoraSettings) -> dict[str, Any]:
    """Return the `info` of a checkpoint: the base model, and the settings of the adapter."""
    return {"base_model": base_model, **attrs.asdict(lora)}


def _snapshot(run: AdapterTrainer, *, optimizer: bool) -> dict[str, Array]:
    """Copy the arrays of a run for a checkpoint, by name. Runs on the training thread."""
    arrays: dict[str, Array] = dict(run.params.snapshot().named())
    if optimizer:
        arrays[_FIRST] = run.optimizer.first.copy()
        arrays[_SECOND] = run.optimizer.second.copy()
        arrays[_STEPS] = np.array([run.optimizer.steps], dtype=np.int64)
    return arrays


async def save(
    service: Service, model: LiveModel, kind: CheckpointKind, name: str, **options: Any
) -> Checkpoint:
    arrays = await service.computed(
        service.host.train(model.run_id, lambda run: _snapshot(run, optimizer=kind == "training"))
    )
    saved = await service.on_disk(
        service.store.save_checkpoint,
        model.run_id,
        kind,
        name,
        arrays,
        info_of(model.base.name, model.lora),
        **options,
    )
    service.note_event("checkpoint_created", saved.tinker_path)
    return saved


def name_of(service: Service, request: SaveWeightsRequest | SaveWeightsForSamplerRequest) -> str:
    """Return the name for a new checkpoint: that of the request, or else a generated one."""
    return request.path or f"checkpoint-{request.seq_id or service.new_id()}"


@calls.of("save_weights")
async def save_weights(service: Service, ask: Ask) -> Any:
    """Save the weights and the optimizer state of a model, to train from."""
    request = ask.read(SaveWeightsRequest)
    model = service.model(request.model_id)

    async def work() -> Any:
        saved = await save(
            service,
            model,
            "training",
            name_of(service, request),
            ttl_s=checked_ttl(request.ttl_seconds),
            overwrite=request.overwrite,
            user_metadata=request.user_metadata,
        )
        return SaveWeightsResponse(path=saved.tinker_path, type="save_weights")

    return submit(service, ask, "SaveWeights", model, request.seq_id, work)


@calls.of("save_weights_external")
async def save_weights_external(service: Service, ask: Ask) -> Any:
    """Export weights as files to download."""
    request = ask.read(SaveWeightsExternalRequest)
    model = service.model(request.model_id)

    async def work() -> Any:
        if len(request.age_encryption_recipients or ()) > _MAX_RECIPIENTS:
            raise UserFault(f"age_encryption_recipients: at most {_MAX_RECIPIENTS}")
        if request.age_encryption_recipients:
            raise UserFault("age_encryption_recipients: this server does not encrypt; leave them out")
        saved = await save(service, model, "external", request.path, ttl_s=checked_ttl(request.ttl_seconds))
        return SaveWeightsExternalResponseInternal(
            path=saved.tinker_path, size_bytes=saved.size_bytes, type="save_weights_external"
        )

    return submit(service, ask, "SaveWeightsExternal", model, request.seq_id, work)


# ------------------------------------------------------------------------------------------------ loading


async def read_checkpoint(
    service: Service, path: str, purpose: str
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the `info` and the arrays of a checkpoint, and note the read and its purpose in the audit log.

    Raises:
        UserFault: the path is malformed.
        StoreError: there is no such checkpoint, or it cannot be read.
    """
    info, arrays = await service.on_disk(service.store.load_checkpoint, *parse(path))
    service.note_event("checkpoint_read", path, purpose=purpose)
    return info, arrays


def settings_of(info: Mapping[str, Any]) -> LoraSettings:
    """Return the settings of the adapter from the `info` of its checkpoint."""
    return LoraSettings(**{field.name: info[field.name] for field in attrs.fields(LoraSettings)})


def params_of(info: Mapping[str, Any], arrays: Mapping[str, Array], config: ModelConfig) -> LoraParams:
    """Return the adapter of a checkpoint, read-only, from its `info` and arrays."""
    params = LoraParams.zeros(config, settings_of(info))
    for name, into in params.named().items():
        into[...] = arrays[name]
    params.flat.setflags(write=False)
    return params


def _restore(
    run: AdapterTrainer, info: Mapping[str, Any], arrays: Mapping[str, Array], *, optimizer: bool
) -> None:
    """Load a checkpoint into a run. Runs on the training thread.

    Raises:
        UserFault: the adapters of the checkpoint and of the run differ in a setting other than the seed.
    """
    saved, mine = settings_of(info), run.params.settings
    for name in ("rank", "train_attn", "train_mlp", "train_unembed"):
        if getattr(saved, name) != getattr(mine, name):
            raise UserFault(
                f"the checkpoint has {name} {getattr(saved, name)}, the model {getattr(mine, name)}"
            )
    params = params_of(info, arrays, run.weights.config)
    state = AdamState(arrays[_FIRST], arrays[_SECOND], int(arrays[_STEPS][0])) if optimizer else None
    run.restore(params.flat, state)


async def _load(service: Service, model: LiveModel, request: LoadWeightsRequest) -> Any:
    check_access(service, request.weights_access_token)
    parse_state(request.path)
    info, arrays = await read_checkpoint(service, request.path, "training")
    if info["base_model"] != model.base.name:
        raise UserFault(
            f"the checkpoint is of base model {info['base_model']}, the model of {model.base.name}"
        )
    if request.optimizer and _FIRST not in arrays:
        raise UserFault(f"{request.path} holds no optimizer state; load it without")
    await service.computed(
        service.host.train(model.run_id, lambda run: _restore(run, info, arrays, optimizer=request.optimizer))
    )
    return LoadWeightsResponse(path=request.path, model_id=model.run_id, type="load_weights")


def check_access(service: Service, token: str | None) -> None:
    """Raise `UserFault` for an access token that is neither the key nor a valid token of this server."""
    if token is not None and not service.signer.knows(token):
        raise UserFault("weights_access_token: gives no access to weights of this server")


@calls.of("load_weights")
async def load_weights(service: Service, ask: Ask) -> Any:
    """Load a checkpoint into a model. Make the model first if the request names none."""
    request = ask.read(LoadWeightsRequest)
    if request.model_id is None:
        return await _create_and_load(service, ask, request)
    model = service.model(request.model_id)

    async def work() -> Any:
        return await _load(service, model, request)

    return submit(service, ask, "LoadWeights", model, request.seq_id, work)


async def _create_and_load(service: Service, ask: Ask, request: LoadWeightsRequest) -> Any:
    if request.session_id is None or request.model_seq_id is None:
        raise Refused(422, "load_weights needs model_id, or session_id and model_seq_id")
    await service.session(request.session_id)
    model_id = f"{request.session_id}:train:{request.model_seq_id}"
    known = known_request(service, ask, model_id)
    if known is not None:  # its checkpoint may be deleted by now
        return UntypedAPIFuture(request_id=known, model_id=model_id)
    run_id, kind, name = parse_state(request.path)
    info = await service.on_disk(service.store.checkpoint_info, run_id, kind, name)
    check_optimizer(request.optimizer_config)

    async def work() -> Any:
        return await _load(service, service.models[model_id], request)

    request_id = start_model(
        service,
        ask,
        kind="LoadWeights",
        session_id=request.session_id,
        model_seq_id=request.model_seq_id,
        base_model=request.base_model or info["base_model"],
        settings=settings_of(info),
        user_metadata=request.user_metadata,
        then=work,
    )
    return UntypedAPIFuture(request_id=request_id, model_id=model_id)


@calls.of("get_weights_info")
async def get_weights_info(service: Service, ask: Ask) -> Any:
    """Return the base model and the adapter's settings of a checkpoint. A model that loads it needs both."""
    path = ask.tree("tinker_path").get("tinker_path")
    if not isinstance(path, str):
        raise Refused(422, "tinker_path must be text")
    run_id, kind, name = parse(path)
    info = await service.on_disk(service.store.checkpoint_info, run_id, kind, name)
    return WeightsInfoResponse(
        base_model=info["base_model"],
        is_lora=True,
        lora_rank=info["rank"],
        train_unembed=info["train_unembed"],
        train_mlp=info["train_mlp"],
        train_attn=info["train_attn"],
    )


# ------------------------------------------------------------------------------------------------ copying


@calls.of("copy_weights")
async def copy_weights(service: Service, ask: Ask) -> Any:
    """Copy a checkpoint to a new run, in the project or under the model number that the request names.

    A repeated request, recognised by its idempotency key, gets the same copy.
    """
    request = ask.read(CopyWeightsRequest)
    to_session = request.session_id is not None and request.model_seq_id is not None
    if to_session == (request.destination_project_id is not None):
        raise Refused(400, "give destination_project_id, or session_id and model_seq_id")
    check_access(service, request.weights_access_token or ask.headers.get("x-tinker-weights-access-token"))
    ttl_s = checked_ttl(request.ttl_seconds)
    # With the key, a request that is repeated after a restart finds the same copy. A seed decides all ids.
    key = ask.headers.get("x-idempotency-key") if service.flags.seed is None else None
    text = f"{request.source_path} {key or service.new_id()}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    make = partial(service.on_disk, _copy, service, request, digest, ttl_s)
    if not to_session:
        return CopyWeightsResponse(tinker_path=await make())
    # Until the copy is saved, the record of its run looks like one that was never used.
    name = ("model", f"{request.session_id}:train:{request.model_seq_id}")
    return CopyWeightsResponse(tinker_path=await service.once(name, ask.digest, make))


def _copy(service: Service, request: CopyWeightsRequest, digest: str, ttl_s: int | None) -> str:
    run_id, kind, name = parse(request.source_path)
    store = service.store
    source = store.checkpoint(run_id, kind, name)
    info, arrays = store.load_checkpoint(run_id, kind, name)
    session_id, number = request.session_id or store.run_session(run_id), request.model_seq_id
    # A client numbers its models.
    target = f"{session_id}:copy:{digest}" if number is None else f"{session_id}:train:{number}"
    check_free(service, target)
    try:
        store.add_run(
            target,
            session_id=session_id,
            model_seq_id=-1 if number is None else number,
            base_model=info["base_model"],
            lora=settings_of(info),
            user_metadata=store.run(run_id).user_metadata,
            project_id=request.destination_project_id,
        )
    except StoreError as problem:
        if number is None and problem.kind == "exists":
            return store.checkpoint(target, kind, name).tinker_path
        raise
    try:
        copied = store.save_checkpoint(
            target, kind, name, arrays, info, ttl_s=ttl_s, user_metadata=source.user_metadata
        )
    except StoreError:
        store.set_run_corrupted(target)
        raise
    service.note_event("checkpoint_copied", copied.tinker_path, source_path=request.source_path)
    return copied.tinker_path
