"""`create_custom_loss`: traces a loss, and stores it on a server that computes losses."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import evolve

from tinker_sync.errors import InvalidInputError
from tinker_sync.losses.handle import LossHandle
from tinker_sync.losses.trace import encode_graph, trace
from tinker_sync.runtime.fetcher import Promise
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.naming import carried
from tinker_sync.types.custom_loss import CreateCustomLossRequest, CreateCustomLossResponse
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.adapt import refuse_unsupported
from tinker_sync.wire.endpoints import ENDPOINTS

if TYPE_CHECKING:
    from tinker_sync.runtime.core import Core

_lock = threading.Lock()
# The keys of each session's losses. The server keeps a loss until the session ends, so `create` refuses to
# create the same loss twice.
_made: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()  # guarded by _lock


def create(
    core: Core, fn: Callable[..., Any], input_ranks: Mapping[str, int], deadline_at: float
) -> APIFuture[LossHandle]:
    """Trace a loss, and store it on the server if that computes losses.

    `ServiceClient.create_custom_loss` documents the arguments and the errors.
    """
    machinery = core.ready(deadline_at)
    handle = trace(fn, input_ranks, core.session_id(deadline_at))
    on_server = machinery.facts.config.custom_loss_server_side
    graph = encode_graph(handle.name, handle.graph) if on_server else None
    _remember(core, handle)
    future: APIFuture[LossHandle] = core.future()
    if graph is None:
        future.resolve(handle)
        return future
    future.when_done(partial(_forget_failed, weakref.ref(core), handle.key))
    try:
        request = CreateCustomLossRequest(
            session_id=handle.session_id,
            # Taken here, before the first attempt, because a retry must send the same request.
            custom_loss_seq_id=core.session.next_custom_loss_seq_id(),
            name=handle.name,
            inputs=list(handle.inputs),
            graph=graph,
        )
        refuse_unsupported(request, machinery.facts.dialect)
        core.loss_pool.run(carried(partial(_store, core, request, handle, future, deadline_at)))
    except BaseException as failure:
        future.fail(failure)
        raise
    return future


def _remember(core: Core, handle: LossHandle) -> None:
    key = handle.key
    with _lock:
        made = _made.setdefault(core, set())
        known = key in made
        made.add(key)
    if known:
        raise InvalidInputError(
            f"create_custom_loss: the session already has {handle.name} with these inputs; "
            "keep its handle and use it again"
        )


def _forget_failed(core_ref: weakref.ref[Core], key: str, future: APIFuture[LossHandle]) -> None:
    """Remove a failed loss from `_made`, so that the user can create it again."""
    core = core_ref()
    if core is not None and (future.cancelled() or future.failure is not None):
        with _lock:
            _made.get(core, set()).discard(key)


def _store(
    core: Core,
    request: CreateCustomLossRequest,
    handle: LossHandle,
    future: APIFuture[LossHandle],
    deadline_at: float,
) -> None:
    """Send the request from a worker, and poll for its result."""
    if not future.begin():
        return
    future.mark_sending()
    began_at = core.clock.now()
    try:
        promise = core.call("create_custom_loss", request, deadline_s=max(deadline_at - began_at, 0.0))
        future.mark_accepted(promise.request_id)
        core.ready().fetcher.fetch(
            Promise(
                promise.request_id,
                ENDPOINTS["create_custom_loss"].promises or "create_custom_loss",
                roundtrip_s=core.clock.now() - began_at,
            ),
            future,
            lambda _, tree: evolve(
                handle, loss_id=wire_json.from_plain(tree, CreateCustomLossResponse).loss_id
            ),
            deadline_at=deadline_at,
        )
    except BaseException as failure:  # noqa: BLE001  # the future must end in any case
        future.fail(failure)
