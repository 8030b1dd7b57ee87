"""Calls that list, change and delete runs and checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinker_sync.local.server.calls import Calls
from tinker_sync.local.server.problems import Refused
from tinker_sync.local.server.service import path_of
from tinker_sync.local.server.weights import checked_ttl
from tinker_sync.local.store import FOLDERS
from tinker_sync.types.checkpoint import CheckpointsListResponse, Cursor
from tinker_sync.types.described import TrainingRunsResponse
from tinker_sync.types.search import CheckpointSearchRequest, CheckpointSearchResponse

if TYPE_CHECKING:
    from tinker_sync.local.server.calls import Ask
    from tinker_sync.local.server.service import Service
    from tinker_sync.local.store import CheckpointKind

calls = Calls()

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
    return await service.on_disk(service.store.run, ask.ids["run"])


@calls.of("list_training_runs")
async def list_training_runs(service: Service, ask: Ask) -> Any:
    """Return a page of runs, the newest first."""
    _check_scope(ask)
    limit, offset = ask.number("limit", 20, least=1), ask.number("offset", 0, most=1 << 40)
    runs, total = await service.on_disk(service.store.list_runs, limit, offset, ask.query.get("project_id"))
    return TrainingRunsResponse(
        training_runs=runs,
        cursor=Cursor(offset=offset, limit=limit, total_count=total),
    )


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
    save_id = await service.on_disk(service.store.save_id, *key)
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
    found = await service.on_disk(service.store.checkpoint, *key)
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
    path = (await service.on_disk(service.store.checkpoint, *key)).tinker_path
    service.note_event("checkpoint_ttl_set", path, ttl_seconds=ttl_s)
    return {}
