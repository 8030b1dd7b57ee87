"""Calls that save, export, load, describe, copy, list, change, delete, download and upload checkpoints.

The addresses of files are signed and expire. A request to such an address needs no key. The files of an
upload are in memory until the upload is finished or expires. Uploads are experimental.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from email.utils import format_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, unquote

import attrs
import numpy as np

from tinker_sync.errors import InvalidInputError
from tinker_sync.local.engine import safetensors
from tinker_sync.local.engine.lora import LoraParams, LoraSettings
from tinker_sync.local.engine.training import AdamState
from tinker_sync.local.server.calls import Calls, Refused, UserFault
from tinker_sync.local.server.http import Answer
from tinker_sync.local.server.state import Upload, path_of
from tinker_sync.local.server.training import (
    check_free,
    check_optimizer,
    known_request,
    lora_settings,
    start_model,
    submit,
)
from tinker_sync.local.store import FOLDERS, StoreError, peft
from tinker_sync.types.checkpoint import (
    CheckpointsListResponse,
    Cursor,
    ExternalWeightsUrlsResponse,
    ParsedCheckpointTinkerPath,
)
from tinker_sync.types.described import TrainingRunsResponse
from tinker_sync.types.future import UntypedAPIFuture
from tinker_sync.types.search import CheckpointSearchRequest, CheckpointSearchResponse
from tinker_sync.types.weights import (
    CopyWeightsRequest,
    CopyWeightsResponse,
    ExternalWeightsUploadFinishRequest,
    ExternalWeightsUploadFinishResult,
    ExternalWeightsUploadStartRequest,
    ExternalWeightsUploadStartResult,
    LoadWeightsRequest,
    LoadWeightsResponse,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponseInternal,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    SaveWeightsResponse,
    WeightsInfoResponse,
)
from tinker_sync.wire import json as json_codec
from tinker_sync.wire.paths import segment

if TYPE_CHECKING:
    from tinker_sync.local.engine.model import ModelConfig
    from tinker_sync.local.engine.safetensors import Array
    from tinker_sync.local.engine.training import AdapterTrainer
    from tinker_sync.local.server.calls import Ask
    from tinker_sync.local.server.http import Request
    from tinker_sync.local.server.state import LiveModel, Service
    from tinker_sync.local.store import CheckpointKind
    from tinker_sync.local.store.folders import StoredFile
    from tinker_sync.types.checkpoint import Checkpoint
    from tinker_sync.types.described import TrainingRun

calls = Calls()


# ---------------------------------------------------------------------------------- saving, loading, copying


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
    service.count_usage(model.session_id, model.base.name, "checkpoint", 1)
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
    info = (await service.on_disk(service.store.checkpoint, run_id, kind, name)).info
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
    info = (await service.on_disk(service.store.checkpoint, run_id, kind, name)).info
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
    """Copy a checkpoint to a new run, in the project or under the model number that the request names."""
    request = ask.read(CopyWeightsRequest)
    to_session = request.session_id is not None and request.model_seq_id is not None
    if to_session == (request.destination_project_id is not None):
        raise Refused(400, "give destination_project_id, or session_id and model_seq_id")
    check_access(service, request.weights_access_token or ask.headers.get("x-tinker-weights-access-token"))
    ttl_s = checked_ttl(request.ttl_seconds)
    make = partial(service.on_disk, _copy, service, request, service.new_id(), ttl_s)
    if not to_session:
        return CopyWeightsResponse(tinker_path=await make())
    # Until the copy is saved, the record of its run looks like one that was never used.
    name = ("model", f"{request.session_id}:train:{request.model_seq_id}")
    return CopyWeightsResponse(tinker_path=await service.once(name, ask.digest, make))


def _copy(service: Service, request: CopyWeightsRequest, copy_id: str, ttl_s: int | None) -> str:
    run_id, kind, name = parse(request.source_path)
    store = service.store
    source = store.checkpoint(run_id, kind, name).described
    info, arrays = store.load_checkpoint(run_id, kind, name)
    session_id, number = request.session_id or store.run_session(run_id), request.model_seq_id
    # A client numbers its models.
    target = f"{session_id}:copy:{copy_id}" if number is None else f"{session_id}:train:{number}"
    check_free(service, target)
    store.add_run(
        target,
        session_id=session_id,
        model_seq_id=-1 if number is None else number,
        base_model=info["base_model"],
        lora=settings_of(info),
        user_metadata=store.run(run_id).user_metadata,
        project_id=request.destination_project_id,
    )
    try:
        copied = store.save_checkpoint(
            target, kind, name, arrays, info, ttl_s=ttl_s, user_metadata=source.user_metadata
        )
    except StoreError:
        store.set_run_corrupted(target)
        raise
    service.note_event("checkpoint_copied", copied.tinker_path, source_path=request.source_path)
    return copied.tinker_path


# -------------------------------------------------------------------------------------- runs and checkpoints


_KINDS: dict[str, CheckpointKind] = {folder: kind for kind, folder in FOLDERS.items()}
_SCOPES = ("owned", "accessible")


def _check_scope(ask: Ask) -> None:
    if ask.query.get("access_scope", "owned") not in _SCOPES:
        raise Refused(422, f"access_scope must be one of {', '.join(_SCOPES)}")


# ------------------------------------------------------------------------------------------------ runs


@calls.of("get_training_run")
async def get_training_run(service: Service, ask: Ask) -> Any:
    """Return one run."""
    _check_scope(ask)
    return _with_last_request(service, await service.on_disk(service.store.run, ask.ids["run"]))


@calls.of("list_training_runs")
async def list_training_runs(service: Service, ask: Ask) -> Any:
    """Return a page of runs, the newest first."""
    _check_scope(ask)
    limit, offset = ask.number("limit", 20, least=1), ask.number("offset", 0, most=1 << 40)
    runs, total = await service.on_disk(service.store.list_runs, limit, offset, ask.query.get("project_id"))
    return TrainingRunsResponse(
        training_runs=[_with_last_request(service, run) for run in runs],
        cursor=Cursor(offset=offset, limit=limit, total_count=total),
    )


def _with_last_request(service: Service, run: TrainingRun) -> TrainingRun:
    live = service.models.get(run.training_run_id)
    if live is None:
        return run
    return run.model_copy(update={"last_request_time": max(live.seen, run.last_request_time)})


@calls.of("list_checkpoints")
async def list_checkpoints(service: Service, ask: Ask) -> Any:
    """Return all checkpoints of a run on one page, the newest first."""
    found = await service.on_disk(service.store.list_checkpoints, ask.ids["run"])
    return CheckpointsListResponse(checkpoints=found)


@calls.of("list_user_checkpoints")
async def list_user_checkpoints(service: Service, ask: Ask) -> Any:
    """Return a page of all checkpoints, the newest first."""
    limit, offset = ask.number("limit", 100, least=1), ask.number("offset", 0, most=1 << 40)
    found, total = await service.on_disk(service.store.list_user_checkpoints, limit, offset)
    return CheckpointsListResponse(
        checkpoints=found,
        cursor=Cursor(offset=offset, limit=limit, total_count=total),
    )


@calls.of("search_checkpoints")
async def search_checkpoints(service: Service, ask: Ask) -> Any:
    """Return a page of the checkpoints that match a search, the newest first. The call is experimental."""
    request = ask.read(CheckpointSearchRequest)
    found, cursor = await service.on_disk(service.store.search_checkpoints, request)
    return CheckpointSearchResponse(checkpoints=found, next_cursor=cursor)


async def _named(service: Service, ask: Ask) -> tuple[str, CheckpointKind, str]:
    """Return the run, the kind and the name of the checkpoint that a request names.

    Older clients send a name without a kind. It names the sampler checkpoint if kinds share the name.

    Raises:
        Refused: the kind is unknown, or no checkpoint has a name that came without a kind.
        StoreError: the run of a name without a kind does not exist.
    """
    run_id = ask.ids["run"]
    folder, slash, name = ask.ids["checkpoint"].partition("/")
    if slash:
        kind = _KINDS.get(folder)
        if kind is None:
            raise Refused(400, f"a checkpoint id begins with one of {', '.join(_KINDS)}")
        return run_id, kind, name
    found = [each.checkpoint_id for each in await service.on_disk(service.store.list_checkpoints, run_id)]
    for kind in ("sampler", *_KINDS.values()):
        if f"{FOLDERS[kind]}/{folder}" in found:
            return run_id, kind, folder
    raise Refused(404, f"run {run_id} has no checkpoint {folder}")


@calls.of("delete_checkpoint")
async def delete_checkpoint(service: Service, ask: Ask) -> Any:
    """Delete a checkpoint and its files. Later samples of samplers that use it fail."""
    key = await _named(service, ask)
    save_id = (await service.on_disk(service.store.checkpoint, *key)).save_id
    await service.on_disk(service.store.delete_checkpoint, *key)
    service.adapters.drop(save_id)
    service.note_event("checkpoint_deleted", path_of(save_id))
    return {}


@calls.of("publish_checkpoint")
async def publish_checkpoint(service: Service, ask: Ask) -> Any:
    """Make a checkpoint public."""
    return await _publish(service, ask, published=True)


@calls.of("unpublish_checkpoint")
async def unpublish_checkpoint(service: Service, ask: Ask) -> Any:
    """Make a checkpoint private."""
    return await _publish(service, ask, published=False)


async def _publish(service: Service, ask: Ask, *, published: bool) -> Any:
    key = await _named(service, ask)
    found = (await service.on_disk(service.store.checkpoint, *key)).described
    if found.public == published:
        raise Refused(409, f"{found.tinker_path} is already {'public' if published else 'private'}")
    await service.on_disk(service.store.set_published, *key, published)
    service.note_event(f"checkpoint_{'' if published else 'un'}published", found.tinker_path)
    return {}


@calls.of("set_checkpoint_ttl")
async def set_checkpoint_ttl(service: Service, ask: Ask) -> Any:
    """Set the time from now until a checkpoint expires; null means never."""
    tree = ask.tree("ttl_seconds")
    if "ttl_seconds" not in tree:
        raise Refused(422, [{"loc": ["body", "ttl_seconds"], "msg": "is missing", "type": "missing"}])
    ttl_s = checked_ttl(tree["ttl_seconds"])
    key = await _named(service, ask)
    await service.on_disk(service.store.set_ttl, *key, ttl_s)
    path = (await service.on_disk(service.store.checkpoint, *key)).described.tinker_path
    service.note_event("checkpoint_ttl_set", path, ttl_seconds=ttl_s)
    return {}


# ----------------------------------------------------------------------------------------------------- files


PREFIX: Final = "/api/v1/files/"
_OCTETS: Final = "application/octet-stream"


# ------------------------------------------------------------------------------------------------ addresses


@calls.of("get_external_weights_urls")
async def get_external_weights_urls(service: Service, ask: Ask) -> Any:
    """Return a signed address for each file of an exported checkpoint."""
    key: tuple[str, CheckpointKind, str] = (ask.ids["run"], "external", ask.ids["name"])
    stored = await service.on_disk(service.store.checkpoint, *key)
    urls = {}
    expires = 0
    for name in sorted(stored.files):
        path = f"{PREFIX}external/{segment(key[0])}/{segment(key[2])}/{segment(name)}"
        urls[name], expires = signed_url(service, ask, path)
    service.note_event("checkpoint_read", stored.described.tinker_path, purpose="download")
    return ExternalWeightsUrlsResponse(urls=urls, expires=datetime.fromtimestamp(expires, timezone.utc))


def signed_url(service: Service, ask: Ask, path: str) -> tuple[str, int]:
    """Return a signed address for a path, and the moment at which it expires, in seconds since 1970."""
    query, expires = service.signer.query(path, service.flags.url_life_s)
    return f"http://{ask.headers.get('host', 'localhost')}{path}?{query}", expires


@calls.of("get_checkpoint_archive")
async def get_checkpoint_archive(service: Service, ask: Ask) -> Any:
    """Redirect to the signed address of an archive of a checkpoint's files, as older servers do."""
    run_id, kind, name = await _named(service, ask)
    found = (await service.on_disk(service.store.checkpoint, run_id, kind, name)).described
    url, expires = signed_url(
        service, ask, f"{PREFIX}archive-{kind}/{segment(run_id)}/{segment(name)}/{segment(name)}.tar.gz"
    )
    service.note_event("checkpoint_read", found.tinker_path, purpose="download")
    moment = format_datetime(datetime.fromtimestamp(expires, timezone.utc), usegmt=True)
    return Answer(status=302, headers={"location": url, "expires": moment})


@calls.of("export_session_trace")
async def export_session_trace(service: Service, ask: Ask) -> Any:
    """Return the signed address of a session's trace: the times of its work, in a file for trace viewers."""
    session_id = ask.ids["session"]
    await service.on_disk(service.store.session, session_id)
    path = f"{PREFIX}trace/{segment(session_id)}/trace/trace.json"
    return {"status": "ready", "url": signed_url(service, ask, path)[0]}


# ------------------------------------------------------------------------------------------------ downloads


async def fetch_file(service: Service, request: Request) -> Answer:
    """Return a file, whole: nobody resumes a download from the same machine.

    Raises:
        Refused: the method is neither GET nor HEAD, the address is not genuine or too old, or there is no
            such file.
        StoreError: the checkpoint does not exist.
    """
    if request.method not in ("GET", "HEAD"):
        raise Refused(405, "files can only be fetched")
    check_address(service, request)
    kind, owner, name, file = (unquote(part) for part in request.path.removeprefix(PREFIX).split("/"))
    if kind == "trace":
        return Answer(_trace(service, owner), content_type=_OCTETS)
    checkpoint: Any = kind.removeprefix("archive-")
    files = (await service.on_disk(service.store.checkpoint, owner, checkpoint, name)).files
    try:
        if kind.startswith("archive-"):
            return Answer(await service.on_disk(_archive, files), content_type=_OCTETS)
        if file not in files:
            raise Refused(404, "there is no such file")
        digest = base64.b64encode(bytes.fromhex(files[file].sha256)).decode()
        headers = {"repr-digest": f"sha-256=:{digest}:", "cache-control": "private, no-transform"}
        body = await service.on_disk(files[file].path.read_bytes)
        return Answer(body, content_type=_OCTETS, headers=headers)
    except FileNotFoundError:  # deleted after its record was read
        raise Refused(404, "the checkpoint was deleted or replaced") from None


def check_address(service: Service, request: Request) -> None:
    """Raise `Refused` if the signature of an address is wrong or has expired."""
    given = parse_qs(request.query)
    expires, signature = (given.get(name, [""])[0] for name in ("expires", "signature"))
    if not service.signer.allows(request.path, expires, signature):
        raise Refused(403, "this address is not valid, or not any more")


def _trace(service: Service, session_id: str) -> bytes:
    session = service.sessions.get(session_id)
    spans = [] if session is None else list(session.spans)
    return json_codec.dumps({"displayTimeUnit": "ms", "traceEvents": spans})


def _archive(files: dict[str, StoredFile]) -> bytes:
    # The numbers of a model hardly get smaller, so the quickest compression will do.
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in sorted(files):
            content = files[name].path.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


# --------------------------------------------------------------------------------------------------- uploads


FILES: Final = (peft.ADAPTER_FILE, peft.CONFIG_FILE)
SESSION: Final = "uploads"
"""The id of the session to which all uploaded checkpoints belong."""
MOST_UNDER_WAY: Final = 16


@calls.of("external_weights_upload_start")
async def external_weights_upload_start(service: Service, ask: Ask) -> Any:
    """Begin an upload, and return for each file the signed address to which the client sends it."""
    request = ask.read(ExternalWeightsUploadStartRequest)
    uploads = service.uploads
    if sum(each.path is None for each in uploads.values()) >= MOST_UNDER_WAY:
        raise Refused(429, f"{MOST_UNDER_WAY} uploads are under way; finish some of them")
    upload_id = f"up-{service.new_id()}"
    base = service.base_model(request.base_model)
    lora = lora_settings(service, request.lora_config, upload_id)
    urls, expires = {}, 0
    for name in FILES:
        path = f"{PREFIX}upload/{segment(upload_id)}/file/{segment(name)}"
        urls[name], expires = signed_url(service, ask, path)
    project = request.destination_project_id
    uploads[upload_id] = Upload(upload_id, base, lora, project, expires)
    moment = datetime.fromtimestamp(expires, timezone.utc)
    return ExternalWeightsUploadStartResult(upload_id=upload_id, urls=urls, expires=moment)


async def put_file(service: Service, request: Request) -> Answer:
    """Receive a file of an upload, and keep it in memory.

    Raises:
        Refused: the address is not valid, or the upload has ended.
    """
    check_address(service, request)
    kind, upload_id, _, name = request.path.removeprefix(PREFIX).split("/")
    upload = service.uploads.get(upload_id)
    if kind != "upload" or upload is None or upload.path is not None or name not in FILES:
        raise Refused(404, "nothing can be put here, or not any more")
    upload.files[name] = request.body
    return Answer(b"{}")


@calls.of("external_weights_upload_finish")
async def external_weights_upload_finish(service: Service, ask: Ask) -> Any:
    """Make a checkpoint of the files of an upload. Later requests for the upload get the same checkpoint."""
    upload_id = ask.read(ExternalWeightsUploadFinishRequest).upload_id
    upload = service.uploads.get(upload_id)
    if upload is None:
        raise Refused(404, "there is no such upload, or not any more")
    missing = [name for name in FILES if name not in upload.files]
    if upload.path is None:
        if missing:
            raise Refused(409, f"{', '.join(missing)} has not been put yet")
        name = "upload", upload_id
        upload.path = await service.once(name, b"", lambda: service.on_disk(_save, service, upload))
        upload.files.clear()
    return ExternalWeightsUploadFinishResult(tinker_path=upload.path)


def _save(service: Service, upload: Upload) -> str:
    arrays = checked_arrays(upload)
    store, info = service.store, info_of(upload.base.name, upload.lora)
    with _existing():  # from the second upload on
        store.add_session(SESSION, display_name=SESSION)
    run_id = f"{SESSION}:{upload.upload_id}"
    with _existing():  # after a request that failed
        store.add_run(
            run_id,
            session_id=SESSION,
            model_seq_id=-1,
            base_model=upload.base.name,
            lora=upload.lora,
            project_id=upload.project_id,
        )
    saved = store.save_checkpoint(run_id, "external", upload.upload_id, arrays, info, overwrite=True)
    service.note_event("checkpoint_created", saved.tinker_path)
    return saved.tinker_path


@contextmanager
def _existing() -> Iterator[None]:
    """Ignore that what the block adds to the store exists already."""
    try:
        yield
    except StoreError as problem:
        if problem.kind != "exists":
            raise


def checked_arrays(upload: Upload) -> Mapping[str, Array]:
    """Return the arrays of an upload, by the names of `LoraParams.named`.

    Raises:
        UserFault: the files are damaged, or do not fit the adapter that the client announced.
    """
    try:
        config = json.loads(upload.files[peft.CONFIG_FILE])
        found = peft.from_file(safetensors.read(upload.files[peft.ADAPTER_FILE]))
    except ValueError as problem:
        raise UserFault(f"the files are damaged: {problem}") from None
    if not isinstance(config, dict) or config.get("r") != upload.lora.rank:
        raise UserFault(f"{peft.CONFIG_FILE}: expected r {upload.lora.rank}")
    wanted = LoraParams.zeros(upload.base.config, upload.lora).named()
    for name, array in wanted.items():
        given = found.get(name)
        if given is None or given.shape != array.shape or given.dtype.kind != "f":
            shown = "nothing" if given is None else f"{given.dtype} {given.shape}"
            raise UserFault(f"{peft.ADAPTER_FILE}: {name} must be floats of shape {array.shape}, is {shown}")
    unknown = sorted(set(found) - set(wanted))
    if unknown:
        raise UserFault(f"{peft.ADAPTER_FILE}: {unknown[0]} does not belong to this adapter")
    return {name: found[name].astype(np.float32) for name in wanted}
