"""Calls that list, change and delete runs and checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinker_sync.local.server.adapters import adapter_key
from tinker_sync.local.server.calls import Calls
from tinker_sync.local.server.problems import Refused
from tinker_sync.local.server.signing import USER
from tinker_sync.local.server.weights import about, checked_ttl
from tinker_sync.local.store.database import texts
from tinker_sync.local.store.rows import DEFAULT_PROJECT, FOLDERS
from tinker_sync.types.checkpoint import Checkpoint, CheckpointsListResponse, Cursor
from tinker_sync.types.described import TrainingRun, TrainingRunsResponse
from tinker_sync.types.search import CheckpointSearchCursor, CheckpointSearchRequest, CheckpointSearchResponse

if TYPE_CHECKING:
    from tinker_sync.local.server.calls import Ask
    from tinker_sync.local.server.service import Service
    from tinker_sync.local.store.rows import CheckpointKind, CheckpointRow, RunRow

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
    return run_model(await service.on_disk(service.store.run, ask.ids["run"]))


@calls.of("list_training_runs")
async def list_training_runs(service: Service, ask: Ask) -> Any:
    """Return a page of runs, the newest first."""
    _check_scope(ask)
    limit, offset = ask.number("limit", 20, least=1), ask.number("offset", 0, most=1 << 40)
    rows, total = await service.on_disk(service.store.list_runs, limit, offset, ask.query.get("project_id"))
    return TrainingRunsResponse(
        training_runs=[run_model(row) for row in rows],
        cursor=Cursor(offset=offset, limit=limit, total_count=total),
    )


def run_model(row: RunRow) -> TrainingRun:
    """Return a run in the form of the protocol."""
    newest, sampler = row.last_checkpoint, row.last_sampler_checkpoint
    return TrainingRun(
        training_run_id=row.run_id,
        base_model=row.base_model,
        model_owner=USER,
        is_lora=True,
        corrupted=row.corrupted,
        lora_rank=row.lora.rank,
        last_request_time=row.seen_at,
        last_checkpoint=None if newest is None else checkpoint_model(newest),
        last_sampler_checkpoint=None if sampler is None else checkpoint_model(sampler),
        user_metadata=texts(row.user_metadata),
    )


# ------------------------------------------------------------------------------------------------ checkpoints


def checkpoint_model(row: CheckpointRow) -> Checkpoint:
    """Return a checkpoint in the form of the protocol."""
    return Checkpoint(
        checkpoint_id=row.checkpoint_id,
        checkpoint_type=row.kind,
        time=row.created_at,
        tinker_path=row.tinker_path,
        size_bytes=row.size_bytes,
        public=row.published,
        user_metadata=texts(row.user_metadata),
        expires_at=row.expires_at,
        base_model=row.base_model,
    )


@calls.of("list_checkpoints")
async def list_checkpoints(service: Service, ask: Ask) -> Any:
    """Return all checkpoints of a run on one page, the newest first."""
    rows = await service.on_disk(service.store.list_checkpoints, ask.ids["run"])
    return CheckpointsListResponse(checkpoints=[checkpoint_model(row) for row in rows])


@calls.of("list_user_checkpoints")
async def list_user_checkpoints(service: Service, ask: Ask) -> Any:
    """Return a page of all checkpoints, the newest first."""
    limit, offset = ask.number("limit", 100, least=1), ask.number("offset", 0, most=1 << 40)
    rows, total = await service.on_disk(service.store.list_user_checkpoints, limit, offset)
    return CheckpointsListResponse(
        checkpoints=[checkpoint_model(row) for row in rows],
        cursor=Cursor(offset=offset, limit=limit, total_count=total),
    )


@calls.of("search_checkpoints")
async def search_checkpoints(service: Service, ask: Ask) -> Any:
    """Return a page of the checkpoints that match a search, the newest first. The call is experimental."""
    request = ask.read(CheckpointSearchRequest)
    rows, _ = await service.on_disk(service.store.list_user_checkpoints, 1 << 40, 0)
    found = [row for row in _after(rows, request.cursor) if _fits(row, request)]
    page, cursor = found[: request.limit], None
    if len(found) > len(page):
        cursor = CheckpointSearchCursor(
            last_created_at=page[-1].created_at, last_checkpoint_uuid=page[-1].tinker_path
        )
    return CheckpointSearchResponse(checkpoints=[checkpoint_model(row) for row in page], next_cursor=cursor)


def _after(rows: list[CheckpointRow], cursor: CheckpointSearchCursor | None) -> list[CheckpointRow]:
    """Return the rows after the checkpoint in a cursor.

    If that checkpoint no longer exists, return the rows that are older than it was.
    """
    if cursor is None:
        return rows
    for index, row in enumerate(rows):
        if row.tinker_path == cursor.last_checkpoint_uuid:
            return rows[index + 1 :]
    return [row for row in rows if row.created_at < cursor.last_created_at]


def _fits(row: CheckpointRow, request: CheckpointSearchRequest) -> bool:
    metadata = texts(row.user_metadata) or {}
    return (
        (request.project_ids is None or (row.project_id or DEFAULT_PROJECT) in request.project_ids)
        and all(metadata.get(name) == value for name, value in request.user_metadata.items())
        and (request.checkpoint_type is None or row.kind == request.checkpoint_type)
        and (request.base_models is None or row.base_model in request.base_models)
    )


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
    rows = await service.on_disk(service.store.list_checkpoints, run_id)
    found = sorted((row for row in rows if row.name == folder), key=lambda row: row.kind != "sampler")
    if not found:
        raise Refused(404, f"run {run_id} has no checkpoint {folder}")
    return run_id, found[0].kind, folder


@calls.of("delete_checkpoint")
async def delete_checkpoint(service: Service, ask: Ask) -> Any:
    """Delete a checkpoint and its files. Later samples of samplers that use it fail."""
    key = await _named(service, ask)
    row = await service.on_disk(service.store.checkpoint, *key)
    await service.on_disk(service.store.delete_checkpoint, *key)
    service.adapters.drop(adapter_key(row.tinker_path, row.number))
    service.store.audit("checkpoint_deleted", about(row))
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
    row = await service.on_disk(service.store.checkpoint, *key)
    if row.published == published:
        raise Refused(409, f"{row.tinker_path} is already {'public' if published else 'private'}")
    await service.on_disk(service.store.set_published, *key, published)
    service.store.audit(f"checkpoint_{'' if published else 'un'}published", about(row))
    return {}


@calls.of("set_checkpoint_ttl")
async def set_checkpoint_ttl(service: Service, ask: Ask) -> Any:
    """Set the time from now until a checkpoint expires; null means never."""
    tree = ask.tree("ttl_seconds")
    if "ttl_seconds" not in tree:
        raise Refused(422, [{"loc": ["body", "ttl_seconds"], "msg": "is missing", "type": "missing"}])
    ttl_s = checked_ttl(tree["ttl_seconds"])
    key = await _named(service, ask)
    row = await service.on_disk(service.store.checkpoint, *key)
    await service.on_disk(service.store.set_ttl, *key, ttl_s)
    service.store.audit("checkpoint_ttl_set", {**about(row), "ttl_seconds": ttl_s})
    return {}
