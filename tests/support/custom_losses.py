"""A training client of a stub server, a loss in numpy, and the training requests that the stub received."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from support.hasty import FLAGS, hasty_service, number_of
from support.tinker_stub import PROTO, Asked, Stub, StubServer, _fields

from tinker_sync import types
from tinker_sync.clients.training import TrainingClient
from tinker_sync.losses import numpy_loss

PATIENCE_S = 120.0
_KINDS = {
    "/forward_backward": "backward",
    "/forward": "forward",
    "/optim_step": "step",
    "/save_weights": "save",
}


@contextmanager
def world(flags: dict[str, Any] | None = None, **behaviour: Any) -> Iterator[tuple[Stub, TrainingClient]]:
    """Yield a stub server, and a training client whose pauses take no time (see `support.hasty`)."""
    behaviour.setdefault("config", {**FLAGS, **(flags or {})})
    with StubServer(**behaviour) as stub, hasty_service(stub) as service:
        trainer: Any = service.create_lora_training_client("stub/model").result()
        trainer.service, trainer.clock = service, service.holder.clock
        stub.log.clear()
        yield stub, trainer


@numpy_loss
def squares(data: Any, logprobs: Any) -> Any:
    """Return the sum of the squares of all log-probabilities, metrics, and the gradients of the sum."""
    loss = sum(float((each * each).sum()) for each in logprobs)
    return loss, {"squares:mean": loss / len(data)}, [2 * each for each in logprobs]


def data(count: int) -> list[types.Datum]:
    """Return `count` data without weights."""
    return [
        types.Datum(types.ModelInput.from_ints([n, n + 1]), {"target_tokens": [n + 1, n + 2]})
        for n in range(count)
    ]


def arrived(stub: Stub) -> list[str]:
    """Return the training requests in order of arrival, such as `3 backward`."""
    return [
        f"{number_of(asked)} {_kind(asked)}"
        for asked in list(stub.log)
        if asked.path.removeprefix("/api/v1") in _KINDS
    ]


def weights_sent(stub: Stub, number: int) -> list[list[float]]:
    """Return the weights of each datum in the protobuf request with this number."""
    asked = next(each for each in stub.asked("/forward_backward") if number_of(each) == number)
    return [_tensor(datum, "weights") for field, datum in _fields(asked.body) if field == 3]


def _tensor(datum: bytes, name: str) -> list[float]:
    for field, entry in _fields(datum):
        if field == 2:
            parts = dict(_fields(entry))
            if parts[1].decode() == name:
                octets = dict(_fields(parts[2])).get(1, b"")
                return list(struct.unpack(f"<{len(octets) // 4}f", octets))
    raise AssertionError(name)


def _kind(asked: Asked) -> str:
    if asked.headers["content-type"] == PROTO and dict(_fields(asked.body)).get(6):
        return "forward"
    return _KINDS[asked.path.removeprefix("/api/v1")]


def log_sigmoid(x: float) -> float:
    return float(-np.logaddexp(0.0, -x))
