"""The calls that return one result or announce which samples have ended, and the call that cancels a request.

Several processes may share a sampler. Each of them is a *clone*, and asks only for its own samples.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from tinker_sync.local.server.calls import Answer, Calls
from tinker_sync.local.server.problems import Refused
from tinker_sync.local.server.promises import Failure, Result, held, wake
from tinker_sync.types.completion import (
    FutureFailed,
    FutureFinished,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
)
from tinker_sync.types.future import FutureRetrieveRequest, QueueState
from tinker_sync.wire import json as json_codec

if TYPE_CHECKING:
    from tinker_sync.local.server.calls import Ask
    from tinker_sync.local.server.promises import Promise
    from tinker_sync.local.server.service import LiveSampler, Service
    from tinker_sync.types.completion import FutureCompletion

calls = Calls()

CLONE = 10**9
"""The sequence numbers of clone 1 of a sampler begin here, and those of clone 2 at twice this number."""
_LOG = 100_000
"""The most ended requests that are remembered for each clone."""


@calls.of("retrieve_future")
async def retrieve_future(service: Service, ask: Ask) -> Any:
    """Return the outcome of a request: its result, its failure, or only the size of a large result.

    If there is no outcome within `Flags.hold_s` seconds, answer with status 408.
    """
    request = ask.read(FutureRetrieveRequest)
    promise = find(service, request.request_id)
    gone = ask.gone() if ask.gone is not None and promise.outcome is None else None
    try:
        ready = await service.promises.wait(promise, service.flags.hold_s, gone)
    finally:
        if gone is not None:
            gone.cancel()
    if not ready:
        return _not_yet(promise)
    return _outcome(service, ask, promise, allow_metadata_only=request.allow_metadata_only)


def find(service: Service, request_id: str) -> Promise:
    """Return the promise of a request. Raises `Refused` if it is gone or never existed."""
    promise = service.promises.get(request_id)
    if promise is not None:
        return promise
    if service.promises.is_gone(request_id):
        raise Refused(410, "the result is gone: it was fetched long ago, or the server was started anew")
    raise Refused(404, "there is no such request")


def _not_yet(promise: Promise) -> Answer:
    tree = {"detail": "not ready yet", "queue_state": QueueState.ACTIVE.value}
    if promise.waits_for:
        tree |= {"queue_state": QueueState.PAUSED_CAPACITY.value, "queue_state_reason": promise.waits_for}
    return Answer(json_codec.dumps(tree), 408)


def _outcome(service: Service, ask: Ask, promise: Promise, *, allow_metadata_only: bool) -> Answer:
    outcome = promise.outcome
    if isinstance(outcome, Failure):
        service.promises.mark_retrieved(promise)
        if service.flags.json_only:
            return Answer(
                json_codec.dumps({"detail": outcome.error}), 400 if outcome.category == "user" else 500
            )
        return Answer(json_codec.dumps(outcome.plain()))
    assert outcome is not None  # noqa: S101
    protobuf = ask.wants_protobuf and not service.flags.json_only
    body, content_type = outcome.form(protobuf=protobuf)
    if allow_metadata_only and len(body) > service.flags.metadata_over_bytes and not service.flags.json_only:
        return Answer(json_codec.dumps({"status": "complete_metadata", "response_payload_size": len(body)}))
    service.promises.mark_retrieved(promise)
    return Answer(body, content_type=content_type)


@calls.of("retrieve_futures")
async def retrieve_futures(service: Service, ask: Ask) -> Any:
    """Return the sample requests of one process that have ended since a cursor, without their results.

    If none has ended, first wait for one, at most the time that the request and `Flags.hold_s` allow. The
    request also names the results that the process has fetched; these are not returned again.
    """
    request = ask.read(FuturesRetrieveRequest)
    sampler = await service.sampler(request.target.sampling_session_id)
    clone = request.target.cloned_sampler_id
    for request_id in request.retrieved_request_ids:
        promise = service.promises.get(request_id)
        if promise is not None and promise.outcome is not None:
            service.promises.mark_retrieved(promise)
    _forget(sampler, clone, set(request.retrieved_request_ids))
    if not _since(sampler, clone, request.prev_cursor):
        hold_s = service.flags.hold_s
        if request.timeout is not None:
            hold_s = min(hold_s, max(0.0, request.timeout))
        await _news(service, sampler, clone, request.prev_cursor, hold_s, ask)
    found = _since(sampler, clone, request.prev_cursor)
    cursor = max((number for number, _ in found), default=request.prev_cursor)
    return FuturesRetrieveResponse(completions=[completion for _, completion in found], cursor=cursor)


async def _news(
    service: Service, sampler: LiveSampler, clone: int, cursor: int, hold_s: float, ask: Ask
) -> None:
    """Wait until a sample request of process `clone` ends, `hold_s` have passed, or the client is gone."""
    loop = asyncio.get_running_loop()
    until = loop.time() + hold_s
    gone = ask.gone() if ask.gone is not None else None
    try:
        while not (_since(sampler, clone, cursor) or loop.time() >= until or (gone and gone.done())):
            waiter = loop.create_future()
            sampler.news.add(waiter)
            try:
                await held(waiter, until - loop.time(), gone)
            finally:
                sampler.news.discard(waiter)
            if service.closing:
                return
    finally:
        if gone is not None:
            gone.cancel()


def _since(sampler: LiveSampler, clone: int, cursor: int) -> list[tuple[int, FutureCompletion]]:
    """Return the ended requests of process `clone` since a cursor, or all if this sampler has not given it.

    Such a cursor is from before the clock was set back and the sampler was made again.
    """
    if cursor > sampler.cursor:
        cursor = 0
    return [entry for entry in sampler.finished.get(clone, ()) if entry[0] > cursor]


def _forget(sampler: LiveSampler, clone: int, fetched: set[str]) -> None:
    """Drop the ended requests of process `clone` whose ids are in `fetched`."""
    log = sampler.finished.get(clone)
    if log and fetched:
        kept = [entry for entry in log if entry[1].request_id not in fetched]
        log.clear()
        log.extend(kept)


def note_finished(service: Service, sampler: LiveSampler, clone: int, promise: Promise) -> None:
    """Note that a sample request has ended, and wake the `retrieve_futures` calls that wait for this.

    Do nothing if the settings for clients turn `retrieve_futures` off.

    Args:
        service: the state of the server.
        sampler: the sampler of the request.
        clone: the number of the process that sent the request, among those that share the sampler.
        promise: the promise of the request.
    """
    if not service.flags.client.sample_use_retrieve_futures:
        return
    completion: FutureCompletion
    if isinstance(promise.outcome, Result):
        size = len(promise.outcome.form(protobuf=True)[0])
        completion = FutureFinished(request_id=promise.request_id, response_payload_uncompressed_size=size)
    else:
        completion = FutureFailed(request_id=promise.request_id)
    # A client keeps its cursor when the sampler is made again, as after a restart. The time makes the cursors
    # of the new one higher.
    sampler.cursor = max(sampler.cursor + 1, int(service.clock.time() * 1e6))
    sampler.finished.setdefault(clone, deque(maxlen=_LOG)).append((sampler.cursor, completion))
    for waiter in sampler.news:
        wake(waiter)


@calls.of("cancel_future")
async def cancel_future(service: Service, ask: Ask) -> Any:
    """Cancel a request. Finished work and work that cannot be stopped stay as they are."""
    request_id = ask.tree("request_id").get("request_id")
    if not isinstance(request_id, str):
        raise Refused(422, "request_id must be text")
    promise = service.promises.get(request_id)
    if promise is None:
        find(service, request_id)
    elif promise.cancel is not None:
        promise.cancel()
    return {}
