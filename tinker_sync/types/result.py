"""`FutureRetrieveResponse`: the union of the answers to a poll for a training request."""

from __future__ import annotations

from typing import TypeAlias

from tinker_sync.types.future import RequestFailedResponse, TryAgainResponse
from tinker_sync.types.model import CreateModelResponse, UnloadModelResponse
from tinker_sync.types.optim import OptimStepResponse
from tinker_sync.types.training import ForwardBackwardOutput
from tinker_sync.types.weights import (
    LoadWeightsResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)

__all__ = ["FutureRetrieveResponse"]

FutureRetrieveResponse: TypeAlias = (
    TryAgainResponse
    | ForwardBackwardOutput
    | OptimStepResponse
    | SaveWeightsResponse
    | LoadWeightsResponse
    | SaveWeightsForSamplerResponse
    | SaveWeightsExternalResponse
    | CreateModelResponse
    | UnloadModelResponse
    | RequestFailedResponse
)
"""The possible answers to a poll for the result of a training request."""
