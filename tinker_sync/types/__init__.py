"""Values that go to and come from the service: frozen models without I/O and without a wire format.

Every name loads its module on first use, so scripts that touch only scalars never wait for numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_sync._lazy import lazy_names

if TYPE_CHECKING:
    from tinker_sync.errors import (
        RequestErrorCategory,
    )
    from tinker_sync.types.datum import (
        Datum,
        LossFnInputs,
        LossFnOutput,
        PromptProvenanceSpan,
        ProvenanceSpans,
        SampledProvenanceSpan,
    )
    from tinker_sync.types.model_input import (
        DmelChunk,
        EncodedTextChunk,
        ImageAssetPointerChunk,
        ImageChunk,
        ModelInput,
        ModelInputChunk,
        TokenSequence,
    )
    from tinker_sync.types.sampling import (
        PromptAltTokens,
        SampledSequence,
        SampleRequest,
        SampleResponse,
        SamplingParams,
        Stop,
        TopkList,
        TopkLogprobs,
    )
    from tinker_sync.types.tensor_data import (
        TensorData,
    )
    from tinker_sync.types.training import (
        ForwardBackwardInput,
        ForwardBackwardOutput,
        ForwardBackwardRequest,
        ForwardRequest,
        LossFnConfig,
    )

_HOMES = {
    "tinker_sync.errors": ("RequestErrorCategory",),
    "tinker_sync.types.datum": (
        "Datum",
        "LossFnInputs",
        "LossFnOutput",
        "PromptProvenanceSpan",
        "ProvenanceSpans",
        "SampledProvenanceSpan",
    ),
    "tinker_sync.types.model_input": (
        "DmelChunk",
        "EncodedTextChunk",
        "ImageAssetPointerChunk",
        "ImageChunk",
        "ModelInput",
        "ModelInputChunk",
        "TokenSequence",
    ),
    "tinker_sync.types.sampling": (
        "PromptAltTokens",
        "SampleRequest",
        "SampleResponse",
        "SampledSequence",
        "SamplingParams",
        "Stop",
        "TopkList",
        "TopkLogprobs",
    ),
    "tinker_sync.types.tensor_data": ("TensorData",),
    "tinker_sync.types.training": (
        "ForwardBackwardInput",
        "ForwardBackwardOutput",
        "ForwardBackwardRequest",
        "ForwardRequest",
        "LossFnConfig",
    ),
}

__all__ = [
    "Datum",
    "DmelChunk",
    "EncodedTextChunk",
    "ForwardBackwardInput",
    "ForwardBackwardOutput",
    "ForwardBackwardRequest",
    "ForwardRequest",
    "ImageAssetPointerChunk",
    "ImageChunk",
    "LossFnConfig",
    "LossFnInputs",
    "LossFnOutput",
    "ModelInput",
    "ModelInputChunk",
    "PromptAltTokens",
    "PromptProvenanceSpan",
    "ProvenanceSpans",
    "RequestErrorCategory",
    "SampleRequest",
    "SampleResponse",
    "SampledProvenanceSpan",
    "SampledSequence",
    "SamplingParams",
    "Stop",
    "TensorData",
    "TokenSequence",
    "TopkList",
    "TopkLogprobs",
]

if not TYPE_CHECKING:  # a checker that sees these would let every mistyped name pass
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
