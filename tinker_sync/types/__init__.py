"""The types of requests and answers: frozen data classes, enums and aliases. `tinker_sync.wire` encodes them.

The first use of a name loads the name's module, so scripts that use no arrays do not load numpy.
"""

from __future__ import annotations

from tinker_sync._base.lazy import lazy_names

_HOMES = {
    "tinker_sync.errors": "RequestErrorCategory",
    "tinker_sync.types.billing": """
        AuditLogEntry AuditLogResponse BillingEventInfo BillingUsageEvent BillingUsageResponse
        BillingUsageSession CheckpointBillingEvent CurrentCheckpointStorageUsageItem
        CurrentCheckpointStorageUsageResponse GetBillingUsageRequest GetCurrentCheckpointStorageUsageRequest
        SamplingPrefillBillingEvent SamplingSampleBillingEvent StorageBillingEvent TrainingBillingEvent
    """,
    "tinker_sync.types.checkpoint": """
        Checkpoint CheckpointsListResponse Cursor ExternalWeightsUrlsResponse ParsedCheckpointTinkerPath
    """,
    "tinker_sync.types.completion": """
        FutureCompletion FutureFailed FutureFinished FuturesRetrieveRequest FuturesRetrieveResponse
        SamplingSessionFuturesTarget
    """,
    "tinker_sync.types.custom_loss": """
        CreateCustomLossRequest CreateCustomLossResponse CustomLossGraph CustomLossInput CustomLossNode
        CustomLossNodeOp
    """,
    "tinker_sync.types.datum": """
        Datum LossFnInputs LossFnOutput PromptProvenanceSpan ProvenanceSpans SampledProvenanceSpan
    """,
    "tinker_sync.types.described": """
        GetSamplerResponse GetSamplerResponseInternal GetSessionResponse HealthResponse ListSessionsResponse
        TrainingRun TrainingRunsResponse WhoamiResponse
    """,
    "tinker_sync.types.events": """
        GenericEvent SessionEndEvent SessionStartEvent TelemetryBatch TelemetryEvent TelemetryResponse
        TelemetrySendRequest UnhandledExceptionEvent
    """,
    "tinker_sync.types.future": """
        FutureRetrieveRequest QueueState RequestFailedResponse TryAgainResponse UntypedAPIFuture
    """,
    "tinker_sync.types.model": """
        CreateModelRequest CreateModelResponse GetInfoRequest GetInfoResponse LoraConfig ModelData
        UnloadModelRequest UnloadModelResponse
    """,
    "tinker_sync.types.model_input": """
        DmelChunk EncodedTextChunk ImageAssetPointerChunk ImageChunk ModelInput ModelInputChunk
    """,
    "tinker_sync.types.optim": """
        AdamOptimizerConfig AdamParams DimuonOptimizerConfig DimuonParams OptimParams OptimParamsBase
        OptimStepRequest OptimStepResponse OptimizerConfig OptimizerConfigBase
    """,
    "tinker_sync.types.sampling": """
        PromptAltTokens SampleRequest SampleResponse SampledSequence SamplingParams TopkLogprobs
    """,
    "tinker_sync.types.scalars": """
        CheckpointType ClientSessionFinishReasonType CustomLossInputRank EventType LossFnType ModelID
        RequestID Severity StopReason TensorDtype
    """,
    "tinker_sync.types.search": """
        AccessibleSearchOwner ActiveSessionStatusQuery CancelledSessionStatusQuery CheckpointSearchCursor
        CheckpointSearchRequest CheckpointSearchResponse ClientFinishedSessionStatusQuery
        ClientSessionFinishErrored ClientSessionFinishInterrupted ClientSessionFinishReason
        ClientSessionFinishSuccess ClientSessionFinished FailedSessionStatusQuery OwnSearchOwner SearchOwner
        SessionActive SessionCancelled SessionFailed SessionFailedReason SessionFailedRequestReason
        SessionFailedSamplingSessionReason SessionFailedTrainingRunReason SessionSearchCursor
        SessionSearchRequest SessionSearchResponse SessionStatus SessionStatusQuery SessionSummary
        UserSearchOwner
    """,
    "tinker_sync.types.service": """
        AuthTokenResponse ClientConfigRequest ClientConfigResponse ClientDynamicConfigResponse
        GetServerCapabilitiesResponse SupportedModel
    """,
    "tinker_sync.types.session": """
        CreateSamplingSessionRequest CreateSamplingSessionResponse CreateSessionRequest
        CreateSessionResponse JoinSamplingSessionRequest JoinSamplingSessionResponse SessionHeartbeatRequest
        SessionHeartbeatResponse
    """,
    "tinker_sync.types.tensor_data": "TensorData",
    "tinker_sync.types.training": """
        ForwardBackwardInput ForwardBackwardOutput ForwardBackwardRequest ForwardRequest
    """,
    "tinker_sync.types.weights": """
        CopyWeightsRequest CopyWeightsResponse ExternalWeightsUploadFinishRequest
        ExternalWeightsUploadFinishResult ExternalWeightsUploadStartRequest ExternalWeightsUploadStartResult
        FutureRetrieveResponse LoadWeightsRequest LoadWeightsResponse SamplingClientKind
        SaveWeightsExternalRequest SaveWeightsExternalResponse SaveWeightsExternalResponseInternal
        SaveWeightsForSamplerRequest SaveWeightsForSamplerResponse SaveWeightsForSamplerResponseInternal
        SaveWeightsRequest SaveWeightsResponse WeightsInfoResponse
    """,
}

# Modules of the reference client's `types` from which scripts import. Here each is another name of this
# package.
_OTHER_PATHS = """
    audit_log_entry audit_log_response auth_token_response billing_usage_request billing_usage_response
    checkpoints_list_response client_config_request client_config_response client_dynamic_config_response
    copy_weights_request copy_weights_response create_custom_loss_request create_custom_loss_response
    create_model_request create_model_response create_sampling_session_request
    create_sampling_session_response create_session_request create_session_response
    current_checkpoint_storage_usage_request current_checkpoint_storage_usage_response cursor
    custom_loss_graph custom_loss_input dmel_chunk encoded_text_chunk event_type
    external_weights_urls_response forward_backward_input forward_backward_output forward_backward_request
    forward_request future_completion future_retrieve_request future_retrieve_response
    futures_retrieve_request futures_retrieve_response generic_event get_info_request get_info_response
    get_sampler_response get_server_capabilities_response get_session_response health_response
    image_asset_pointer_chunk image_chunk join_sampling_session_request join_sampling_session_response
    list_sessions_response load_weights_request load_weights_response lora_config loss_fn_inputs
    loss_fn_output loss_fn_type model_id model_input_chunk optim_step_request optim_step_response
    optimizer prompt_alt_tokens provenance_spans request_error_category request_failed_response request_id
    sample_request sample_response sampled_sequence sampling_client_kind sampling_params
    save_weights_external_request save_weights_external_response save_weights_for_sampler_request
    save_weights_for_sampler_response save_weights_request save_weights_response search_owner
    session_end_event session_heartbeat_request session_heartbeat_response session_search_cursor
    session_search_request session_search_response session_start_event session_status session_status_query
    session_summary severity shared shared.untyped_api_future stop_reason telemetry_batch telemetry_event
    telemetry_response telemetry_send_request tensor_dtype topk_logprobs training_run
    training_runs_response try_again_response unhandled_exception_event unload_model_request
    unload_model_response weights_info_response whoami_response
"""

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOMES, other_paths=_OTHER_PATHS)
