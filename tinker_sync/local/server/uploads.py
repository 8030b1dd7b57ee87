"""Uploads of weights: a client sends files to signed addresses, and the files become a checkpoint.

These calls are experimental. The files of an upload are in memory until the upload is finished or expires.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np

from tinker_sync.local.engine import safetensors
from tinker_sync.local.engine.lora import LoraParams
from tinker_sync.local.server.calls import Answer, Calls
from tinker_sync.local.server.files import PREFIX, check_address, signed_url
from tinker_sync.local.server.models import lora_settings
from tinker_sync.local.server.problems import Refused, UserFault
from tinker_sync.local.server.weights import info_of
from tinker_sync.local.store import StoreError, peft
from tinker_sync.types.weights import (
    ExternalWeightsUploadFinishRequest,
    ExternalWeightsUploadFinishResult,
    ExternalWeightsUploadStartRequest,
    ExternalWeightsUploadStartResult,
)
from tinker_sync.wire.paths import segment

if TYPE_CHECKING:
    from tinker_sync.local.engine.host import BaseModel
    from tinker_sync.local.engine.lora import LoraSettings
    from tinker_sync.local.engine.safetensors import Array
    from tinker_sync.local.server.calls import Ask
    from tinker_sync.local.server.service import Service

calls = Calls()

FILES: Final = (peft.ADAPTER_FILE, peft.CONFIG_FILE)
SESSION: Final = "uploads"
"""The id of the session to which all uploaded checkpoints belong."""
MOST_UNDER_WAY: Final = 16


@attrs.define(eq=False)
class Upload:
    """An upload, with the files received so far. A finished one has the `path` of its checkpoint."""

    upload_id: str
    base: BaseModel
    lora: LoraSettings
    project_id: str | None
    expires_s: int
    files: dict[str, bytes] = attrs.Factory(dict)
    path: str | None = None


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


async def put(service: Service, path: str, query: bytes, body: bytes) -> Answer:
    """Receive a file of an upload, and keep it in memory.

    Raises:
        Refused: the address is not valid, or the upload has ended.
    """
    check_address(service, path, query)
    kind, upload_id, _, name = path.removeprefix(PREFIX).split("/")
    upload: Upload | None = service.uploads.get(upload_id)
    if kind != "upload" or upload is None or upload.path is not None or name not in FILES:
        raise Refused(404, "nothing can be put here, or not any more")
    upload.files[name] = body
    return Answer(b"{}")


@calls.of("external_weights_upload_finish")
async def external_weights_upload_finish(service: Service, ask: Ask) -> Any:
    """Make a checkpoint of the files of an upload. Later requests for the upload get the same checkpoint."""
    upload_id = ask.read(ExternalWeightsUploadFinishRequest).upload_id
    upload: Upload | None = service.uploads.get(upload_id)
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
