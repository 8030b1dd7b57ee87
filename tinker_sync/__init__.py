"""A blocking client for the Tinker training and sampling API.

Each name loads its module on first use, so `import tinker_sync` alone loads neither numpy nor the network
stack.
"""

from __future__ import annotations

from tinker_sync._base.lazy import lazy_names

_HOMES = {
    "tinker_sync._version": "__title__ __version__",
    "tinker_sync": "auth data errors losses types",
    "tinker_sync.batch.item": "BatchItem",
    "tinker_sync.batch.waiting": "as_completed gather",
    "tinker_sync.clients.rest": "AdminClient RestClient",
    "tinker_sync.clients.rest.bulk": "BulkProgress CheckpointOutcome",
    "tinker_sync.clients.sampling": "RetryConfig SamplingClient",
    "tinker_sync.clients.service": "ServiceClient",
    "tinker_sync.clients.training": "TrainingClient",
    "tinker_sync.config": "RequestOptions Timeout",
    "tinker_sync.data.tokenizer": "Tokenizer get_tokenizer",
    "tinker_sync.errors": """
        APIConnectionError APIError APIResponseValidationError APIStatusError APITimeoutError
        AuthenticationError BadRequestError BillingError BudgetExceededError ClientClosedError
        ConfigurationError ConflictError CredentialError DeadlineError EarlierCallFailedError
        ExperimentalWarning InternalServerError InvalidInputError MissingExtraError
        NotFoundError PermissionDeniedError RateLimitError RequestErrorCategory RequestFailedError RequestInfo
        ResponseInfo SessionLostError TinkerError TokenizerError TransferError UnprocessableEntityError
        UnsafeArchiveError UnsupportedByServerError VerificationError WireError
    """,
    "tinker_sync.lib": "",
    "tinker_sync.lib.names": "BackcompatSamplingClientFuture BackcompatTrainingClientFuture",
    "tinker_sync.losses.handle": "LossHandle PerDatumLossFn",
    "tinker_sync.runtime.futures": "APIFuture",
    "tinker_sync.runtime.polls": "QueueReport",
    "tinker_sync.runtime.rate_limiter": "RateLimiter",
    "tinker_sync.transport.files.download": "CheckpointDownload",
    "tinker_sync.transport.files.progress": "TransferProgress",
    "tinker_sync.types": """
        AdamOptimizerConfig AdamParams Checkpoint CheckpointType Datum DimuonOptimizerConfig DimuonParams
        DmelChunk EncodedTextChunk ForwardBackwardOutput ImageAssetPointerChunk ImageChunk LoraConfig
        ModelID ModelInput ModelInputChunk OptimParams OptimStepRequest OptimStepResponse
        ParsedCheckpointTinkerPath PromptProvenanceSpan QueueState SampleRequest SampleResponse
        SampledProvenanceSpan SampledSequence SamplingParams StopReason TensorData TensorDtype TrainingRun
    """,
}

_OTHER_PATHS = "_exceptions"
# Packages by their names in earlier versions.
_MOVED = {
    "diagnose": "tinker_sync.insight",
    "display": "tinker_sync.insight.displays",
    "text": "tinker_sync.data",
    "transfer": "tinker_sync.transport.files",
    "usage": "tinker_sync.insight",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOMES, other_paths=_OTHER_PATHS, moved=_MOVED)
