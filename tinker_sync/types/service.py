"""The settings that the service gives to its clients."""

from __future__ import annotations

from tinker_sync.types._model import Model, model


@model
class ClientConfigRequest(Model):
    """A request for the settings of a client that uses this version of the protocol."""

    sdk_version: str


@model
class ClientConfigResponse(Model):
    """The service's settings for its clients; a setting that it leaves out has the default below.

    Attributes:
        pjwt_auth_enabled: exchange the credential for a short-lived token.
        credential_default_source: "credential_cmd" exchanges the output of the user's command, not the key.
        sample_dispatch_bytes_semaphore_size: most bytes of sample requests in flight at once.
        inflight_response_bytes_semaphore_size: most bytes of results fetched at once.
        parallel_fwdbwd_chunks: send the chunks of one pass side by side.
        proto_compress_fwdbwd: compress the bodies of passes.
        fwdbwd_max_chunk_len: most datums of a chunk.
        fwdbwd_max_chunk_bytes_count: most bytes of a chunk, by estimate.
        fwdbwd_dispatch_bytes_semaphore_size: most bytes of passes in flight at once.
        billing_exception_max_pause_duration_sec: the longest wait for an unpaid account.
        sample_no_retries: send a sample once only.
        sample_enable_stuck_detection: fail samples when none of them makes progress.
        sample_max_concurrent_requests: most samples in progress at once.
        use_pyqwest_transport: a transport of the reference client; ignored here.
        create_model_via_load_weights: make a model and load its weights in one request.
        sample_use_retrieve_futures: wait for all samples of a session in one request.
        custom_loss_server_side: custom losses run on the server.
        sample_join_sampling_session: ask for a number before sharing a sampling session.

    >>> ClientConfigResponse().fwdbwd_max_chunk_len
    1024
    """

    __response__ = True

    pjwt_auth_enabled: bool = False
    credential_default_source: str = "api_key"
    sample_dispatch_bytes_semaphore_size: int = 10 * 1024 * 1024
    inflight_response_bytes_semaphore_size: int = 50 * 1024 * 1024
    parallel_fwdbwd_chunks: bool = True
    proto_compress_fwdbwd: bool = False
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    fwdbwd_dispatch_bytes_semaphore_size: int = 50_000_000
    billing_exception_max_pause_duration_sec: int = 3600
    sample_no_retries: bool = False
    sample_enable_stuck_detection: bool = True
    sample_max_concurrent_requests: int = 2000
    use_pyqwest_transport: bool = True
    create_model_via_load_weights: bool = False
    sample_use_retrieve_futures: bool = False
    custom_loss_server_side: bool = False
    sample_join_sampling_session: bool = False


@model
class ClientDynamicConfigResponse(Model):
    """Settings that may change while a client runs.

    Attributes:
        refresh_interval_sec: the time until the next request for these settings.
        sample_cancel_enabled: report abandoned samples to the server.
        sample_cancel_max_batch_size: most samples in one such report.

    >>> ClientDynamicConfigResponse(refresh_interval_sec=60).sample_cancel_enabled
    False
    """

    __response__ = True

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64
