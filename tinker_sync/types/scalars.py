"""Names for the texts and small numbers that the service uses: ids and closed lists of words."""

from __future__ import annotations

from typing import Literal, TypeAlias

ModelID: TypeAlias = str
"""What the server calls a training run's model. Opaque: compare it, do not take it apart."""

RequestID: TypeAlias = str
"""What the server calls a request it promised to answer later."""

TensorDtype: TypeAlias = Literal["int64", "float32"]
"""How the values of a tensor travel."""

StopReason: TypeAlias = Literal["length", "stop"]
"""Why sampling ended: `max_tokens` was reached, or a stop token or text was."""

CheckpointType: TypeAlias = Literal["training", "sampler", "external"]
"""What a checkpoint is for: training on (with optimizer state), sampling, or use outside of the service."""

LossFnType: TypeAlias = Literal[
    "cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce", "custom"
]
"""The losses of the protocol; servers may know others."""

CustomLossInputRank: TypeAlias = Literal[0, 1, 2]
"""The dimensions of a custom loss input: 0 a scalar, 1 one value a token, 2 several values a token."""

ClientSessionFinishReasonType: TypeAlias = Literal["success", "errored", "interrupted"]
"""How a program says its session ended."""

Severity: TypeAlias = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
"""How grave a telemetry event is."""

EventType: TypeAlias = Literal["SESSION_START", "SESSION_END", "UNHANDLED_EXCEPTION", "GENERIC_EVENT"]
"""The kinds of telemetry events."""
