"""The numbers of ordered calls that are refused: they count as used, so the next call does not wait for them.

After a refusal, some clients never use the number of the refused call again, and others use it for their next
call. Both work:

- A refused number counts as used. Calls with higher numbers proceed at once.
- The server accepts the next valid call with a refused number, also if it accepted calls with higher numbers
  meanwhile. It then carries out this call in order of arrival.
- If only the model of a refused call can be read, the lane (the queue) of the model counts a missing number,
  and skips the next gap that is no larger than this count.
- If not even the model can be read, every lane counts a missing number.
- A call without a valid key counts nothing: the server drops its body unread.

A status of 500 and more is no refusal: it asks the client to send the same call again, and the lane waits for
it as for any number that has not arrived.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from tinker_sync.wire.endpoints import PROTOBUF
from tinker_sync.wire.proto.requests import peek_model_and_number

if TYPE_CHECKING:
    from tinker_sync.local.server.service import LiveModel

ORDERED: Final = frozenset(
    {
        "forward_backward", "forward", "optim_step", "save_weights", "save_weights_for_sampler",
        "save_weights_external", "load_weights",
    }
)  # fmt: skip
"""The calls that the server carries out in the order of their `seq_id`."""

_LARGE_BYTES: Final = 1024 * 1024
_EDGE_BYTES: Final = 64 * 1024
"""The size of the beginning and of the end of a large body that are searched for the number. Clients write it
near one of them."""
_MODEL: Final = re.compile(rb'"model_id"\s*:\s*("(?:[^"\\]|\\.)*")')
_NUMBER: Final = re.compile(rb'"seq_id"\s*:\s*([0-9]{1,15})\b')


def count_as_used(models: Mapping[str, LiveModel], headers: Mapping[str, str], body: bytes) -> None:
    """Count the number of a refused ordered call, which had a valid key, as used.

    Args:
        models: the models in memory.
        headers: the headers of the call; their names are in lower case.
        body: the body of the call, decompressed as far as possible.
    """
    model_id, number = _place_of(headers, body)
    if model_id is not None:
        model = models.get(model_id)
        if model is not None:
            model.lane.refuse(number)
    else:
        for model in list(models.values()):
            model.lane.refuse(None)


def _place_of(headers: Mapping[str, str], body: bytes) -> tuple[str | None, int | None]:
    """Return the model id and the sequence number in a body; None in place of each that cannot be read.

    The number is 0 if the body has none.
    """
    if headers.get("content-type", "").partition(";")[0].strip().lower() == PROTOBUF:
        return peek_model_and_number(body)
    try:
        if len(body) > _LARGE_BYTES:
            body = body[:_EDGE_BYTES] + b"\n" + body[-_EDGE_BYTES:]
        tree = json.loads(body)
    except (ValueError, RecursionError):
        models, numbers = set(_MODEL.findall(body)), set(_NUMBER.findall(body))
        return (
            _text(models.pop()) if len(models) == 1 else None,
            int(numbers.pop()) if len(numbers) == 1 else None,
        )
    if not isinstance(tree, dict):
        return None, None
    model_id, number = tree.get("model_id"), tree.get("seq_id", 0)
    return model_id if isinstance(model_id, str) else None, _whole(number)


def _text(literal: bytes) -> str | None:
    try:
        text: str = json.loads(literal)
    except ValueError:
        return None
    return text


def _whole(number: Any) -> int | None:
    """Convert a JSON value to a sequence number as the decoder of bodies does.

    Text of digits and whole floats are numbers too, and null is 0. Other values give None.
    """
    if number is None:
        return 0
    if isinstance(number, bool):
        return None
    try:
        whole = int(number)
    except (TypeError, ValueError, OverflowError):
        return None
    return whole if whole >= 0 and float(number) == whole else None
