"""The requests of a training client: encoded when the call is made, numbered and sent by workers.

`sender` is what a send queue calls: it returns when the server has accepted the request, and hands the
promise to the fetcher. Bodies stay views of the user's arrays until they are sent; each is joined then, one
chunk's worth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tinker_sync._observe import TokensUsed
from tinker_sync.errors import DeadlineError
from tinker_sync.runtime.admission import Plan, Pledge, length_of
from tinker_sync.runtime.calls import read_reply
from tinker_sync.runtime.chunking import DataChunk, split
from tinker_sync.runtime.combine import CombinedFuture
from tinker_sync.runtime.fetcher import Decode, Promise, decode_with
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.merge import merge_outputs
from tinker_sync.runtime.naming import current, named
from tinker_sync.runtime.send_queue import Operation
from tinker_sync.types.future import UntypedAPIFuture
from tinker_sync.types.training import (
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
)
from tinker_sync.wire import json as wire_json
from tinker_sync.wire import proto
from tinker_sync.wire.adapt import json_body, normalise_forward_backward, refuse_unsupported
from tinker_sync.wire.endpoints import ENDPOINTS, JSON, PROTOBUF
from tinker_sync.wire.proto._varint import varint

if TYPE_CHECKING:
    from tinker_sync.runtime.core import Core
    from tinker_sync.runtime.introduction import ServerFacts
    from tinker_sync.types.datum import Datum
    from tinker_sync.wire.dialect import Dialect

_SEQ_ID_TAG: Final = b"\x10"  # field 2, varint; a message may hold its fields in any order
_FORWARD: Final = "Forward"


class TrainingPart:
    """One request, complete but for its number. Owned by the send queue once it is in it."""

    __slots__ = (
        "_encoded",
        "content_type",
        "deadline_at",
        "decode",
        "endpoint",
        "future",
        "headers",
        "made_at",
        "request_type",
        "sdk_method",
        "size",
    )

    def __init__(
        self,
        future: APIFuture[Any],
        endpoint: str,
        request_type: str,
        encoded: Callable[[int], bytes],
        decode: Decode[Any],
        *,
        size: int,
        content_type: str,
        headers: Mapping[str, str] | None = None,
        deadline_at: float,
        made_at: float,
    ) -> None:
        self.future = future
        self.endpoint = endpoint
        self.request_type = request_type
        self._encoded: Callable[[int], bytes] | None = encoded
        self.decode = decode
        self.size = size
        self.content_type = content_type
        self.headers = headers or {}
        self.deadline_at = deadline_at
        self.made_at = made_at
        self.sdk_method = current()

    def bytes_for(self, number: int) -> bytes:
        """The body under its number. Asked for once: what it was made of is let go."""
        encoded, self._encoded = self._encoded, None
        assert encoded is not None  # noqa: S101  # the queue asks once
        return encoded(number)


def json_part(
    core: Core, endpoint: str, request: Any, kind: type[Any], *, deadline_at: float
) -> TrainingPart:
    """A request with a JSON body and a JSON result."""
    body = json_body(request, core.dialect)
    return TrainingPart(
        core.future(),
        endpoint,
        ENDPOINTS[endpoint].promises or endpoint,
        partial(wire_json.with_number, body),
        lambda _reply, tree: wire_json.from_plain(tree, kind),
        size=0,
        content_type=JSON,
        deadline_at=deadline_at,
        made_at=core.clock.now(),
    )


def pass_operation(
    core: Core,
    model_id: str,
    name: str,
    whole: ForwardBackwardInput,
    *,
    forward_only: bool,
    deadline_at: float,
) -> Operation[TrainingPart]:
    """One pass over any number of data, for the send queue; its future has the output of all.

    Raises:
        InvalidInputError: the data cannot be sent.
        UnsupportedByServerError: the server has no such passes.
    """
    whole.validate()
    facts = core.machinery.facts
    if forward_only and not facts.dialect.forward_only:
        core.refuse_without_forward()
    with core.admission.admitted(lambda: Plan(model=model_id, trained=_tokens(whole.data))) as pledge:
        operation = _pass_operation(
            core, model_id, name, whole, facts, pledge, forward_only=forward_only, deadline_at=deadline_at
        )
        pledge.follow(operation.future)
    return operation


def _pass_operation(
    core: Core,
    model_id: str,
    name: str,
    whole: ForwardBackwardInput,
    facts: ServerFacts,
    pledge: Pledge,
    *,
    forward_only: bool,
    deadline_at: float,
) -> Operation[TrainingPart]:
    limits = facts.config
    chunks = split(
        whole.data, max_bytes=limits.fwdbwd_max_chunk_bytes_count, max_count=limits.fwdbwd_max_chunk_len
    )
    parts = pass_parts(
        core,
        model_id,
        whole,
        chunks,
        facts.dialect,
        pledge,
        forward_only=forward_only,
        deadline_at=deadline_at,
    )
    futures = [part.future for part in parts]
    future: APIFuture[ForwardBackwardOutput] = (
        futures[0]
        if len(futures) == 1
        else CombinedFuture(futures, merge_outputs, submit=core.callback_pool.run, clock=core.clock)
    )
    return Operation(name, parts, future, parallel=limits.parallel_fwdbwd_chunks)


def pass_parts(
    core: Core,
    model_id: str,
    whole: ForwardBackwardInput,
    chunks: Sequence[DataChunk],
    dialect: Dialect,
    pledge: Pledge,
    *,
    forward_only: bool,
    deadline_at: float,
) -> list[TrainingPart]:
    """The requests of one pass, a chunk each."""
    pledge.parts = len(chunks)
    # The metrics of several chunks are reduced once, together.
    decode = _decode_pass if len(chunks) == 1 else _read_pass
    return [
        _pass_part(
            core,
            model_id,
            whole,
            chunk,
            dialect,
            partial(_settled, decode, pledge, TokensUsed(model=model_id, trained=_tokens(chunk.data))),
            forward_only=forward_only,
            deadline_at=deadline_at,
        )
        for chunk in chunks
    ]


def _tokens(data: Sequence[Datum]) -> int:
    return sum(length_of(datum.model_input) for datum in data)


def _settled(
    decode: Decode[ForwardBackwardOutput], pledge: Pledge, used: TokensUsed, reply: Any, tree: Any
) -> ForwardBackwardOutput:
    """Read a result, and have it counted before anybody sees it."""
    output = decode(reply, tree)
    pledge.settle(used)
    return output


def _pass_part(
    core: Core,
    model_id: str,
    whole: ForwardBackwardInput,
    chunk: DataChunk,
    dialect: Dialect,
    decode: Decode[ForwardBackwardOutput],
    *,
    forward_only: bool,
    deadline_at: float,
) -> TrainingPart:
    part_input = ForwardBackwardInput(list(chunk.data), whole.loss_fn, whole.loss_fn_config)
    headers: dict[str, str] = {}
    refuse_unsupported(part_input, dialect)
    part_input = normalise_forward_backward(part_input, dialect)
    if dialect.protobuf and (dialect.forward_only or not forward_only):
        buffers = proto.encode_forward_backward_request(
            ForwardBackwardRequest(part_input, model_id), forward_only=forward_only
        )
        endpoint, content_type = "forward_backward", PROTOBUF

        compress = zstd_compressor() if dialect.zstd else None
        if compress is not None:
            headers["Content-Encoding"] = "zstd"
        encoded = partial(_numbered_proto, buffers, compress)
    else:
        kind: type[Any] = ForwardRequest if forward_only else ForwardBackwardRequest
        request = kind(part_input, model_id)
        endpoint, content_type = "forward" if forward_only else "forward_backward", JSON
        encoded = partial(wire_json.with_number, wire_json.encode(request))

    return TrainingPart(
        core.future(),
        endpoint,
        _FORWARD if forward_only else "ForwardBackward",
        encoded,
        decode,
        size=chunk.size_bytes,
        content_type=content_type,
        headers=headers,
        deadline_at=deadline_at,
        made_at=core.clock.now(),
    )


def _numbered_proto(buffers: proto.Buffers, compress: Callable[[bytes], bytes] | None, number: int) -> bytes:
    joined = b"".join([*buffers, _SEQ_ID_TAG, varint(number)])
    return joined if compress is None else compress(joined)


def zstd_compressor() -> Callable[[bytes], bytes] | None:
    """What compresses a body; None where the optional dependency is missing, and bodies go as they are."""
    try:
        import zstandard
    except ImportError:
        return None
    return lambda body: zstandard.ZstdCompressor().compress(body)


_read_pass: Final = decode_with(
    proto.decode_forward_backward_output, lambda tree: wire_json.from_plain(tree, ForwardBackwardOutput)
)


def _decode_pass(reply: Any, tree: Any) -> ForwardBackwardOutput:
    """The output of a call in one chunk, its metrics reduced as those of several would be."""
    return merge_outputs([_read_pass(reply, tree)])


def sender(core: Core) -> Callable[[TrainingPart, int], None]:
    """What sends the parts of one training client. Runs on workers; returns when the server has accepted."""

    def send(part: TrainingPart, number: int) -> None:
        machinery = core.machinery
        left_s = part.deadline_at - core.clock.now()
        if left_s <= 0:
            raise _too_late(part, core)
        budget = machinery.train_bytes
        # What has no size worth counting waits for nobody's chunks.
        if part.size and not budget.acquire(part.size, None if math.isinf(left_s) else left_s):
            raise _too_late(part, core)
        try:
            with named(part.sdk_method):
                reply = core.send(
                    part.endpoint,
                    part.bytes_for(number),
                    content_type=part.content_type,
                    headers=part.headers,
                    deadline_s=None if math.isinf(left_s) else left_s,
                )
        finally:
            if part.size:
                budget.release(part.size)
        promise: UntypedAPIFuture = read_reply(part.endpoint, reply, core.secrets)
        part.future.mark_accepted(promise.request_id)
        machinery.fetcher.fetch(
            Promise(
                promise.request_id,
                part.request_type,
                wants_proto=ENDPOINTS[part.endpoint].result_as_protobuf,
                roundtrip_s=core.clock.now() - part.made_at,
                sdk_method=part.sdk_method,
            ),
            part.future,
            part.decode,
            deadline_at=part.deadline_at,
        )

    return send


def _too_late(part: TrainingPart, core: Core) -> DeadlineError:
    return DeadlineError(
        f"{part.endpoint} was not sent within the deadline",
        method="POST",
        path=ENDPOINTS[part.endpoint].path.text,
        waited_s=core.clock.now() - part.made_at,
        last_words="it waited for its turn",
    )
