"""Aliases for the service's ids and closed sets of values."""

from __future__ import annotations

from typing import Literal, TypeAlias

ModelID: TypeAlias = str
"""The id of a training run's model. Opaque: compare it, do not parse it."""

RequestID: TypeAlias = str
"""The id in a promise, under which the server keeps the result."""

TensorDtype: TypeAlias = Literal["int64", "float32"]
"""The dtype of a tensor's values on the wire."""

StopReason: TypeAlias = Literal["length", "stop"]
"""The reason for the end of sampling: `max_tokens`, or a stop token or text."""

CheckpointType: TypeAlias = Literal["training", "sampler", "external"]
"""The purpose of a checkpoint: training (with optimizer state), sampling, or use outside of the service."""

LossFnType: TypeAlias = Literal[
    "cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce", "custom"
]
"""The losses of the protocol; servers may have others."""

CustomLossInputRank: TypeAlias = Literal[0, 1, 2]
"""The rank of a custom loss input: 0 a scalar, 1 one value per token, 2 several values per token."""

ClientSessionFinishReasonType: TypeAlias = Literal["success", "errored", "interrupted"]
"""The reason for the end of a session, as the program reports it."""

Severity: TypeAlias = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
"""The severity of a telemetry event."""

EventType: TypeAlias = Literal["SESSION_START", "SESSION_END", "UNHANDLED_EXCEPTION", "GENERIC_EVENT"]
"""The kinds of telemetry events."""
