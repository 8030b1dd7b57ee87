"""The settings, models and access tokens of the service, for which each client asks first."""

from __future__ import annotations

import attrs

from tinker_sync.types._model import Model, model


@model
class ClientConfigRequest(Model):
    """A request for the settings that apply to clients of version `sdk_version` of the protocol."""

    sdk_version: str


@model
class ClientConfigResponse(Model):
    """The service's settings for its clients. A setting that the answer leaves out has the default below.

    Attributes:
        pjwt_auth_enabled: exchange the credential for a short-lived token.
        credential_default_source: "credential_cmd" demands the output of the user's credential command for
            the exchange; other values allow the API key.
        sample_dispatch_bytes_semaphore_size: the limit on bytes of sample requests in flight at once.
        inflight_response_bytes_semaphore_size: the limit on bytes of results fetched at once.
        parallel_fwdbwd_chunks: send the chunks of one pass side by side.
        proto_compress_fwdbwd: the bodies of passes may be compressed.
        fwdbwd_max_chunk_len: the most examples in a chunk.
        fwdbwd_max_chunk_bytes_count: most bytes of a chunk, by estimate.
        fwdbwd_dispatch_bytes_semaphore_size: the limit on bytes of passes in flight at once.
        billing_exception_max_pause_duration_sec: the longest wait for the payment of an unpaid account.
        sample_no_retries: submit each sample only once, except those of `compute_logprobs`.
        sample_enable_stuck_detection: a setting of the reference client; ignored here.
        sample_max_concurrent_requests: most samples in progress; unused with `sample_use_retrieve_futures`.
        use_pyqwest_transport: a transport of the reference client, the vendor's own; ignored here.
        create_model_via_load_weights: make a model and load its weights in one request.
        sample_use_retrieve_futures: wait for all samples of a sampling session in one request.
        custom_loss_server_side: custom losses can run on the server.
        sample_join_sampling_session: the server gives each process that shares a sampling session a number.

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
    """The service's settings that may change while a client runs.

    Attributes:
        refresh_interval_sec: the time after which the client asks for these settings again.
        sample_cancel_enabled: cancel samples at the server when the client gives them up.
        sample_cancel_max_batch_size: ignored here; each request cancels one sample.

    >>> ClientDynamicConfigResponse(refresh_interval_sec=60).sample_cancel_enabled
    False
    """

    __response__ = True

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64


@model
class SupportedModel(Model):
    """A base model that a server offers, with the length of its context in tokens.

    `trainable` is True if the server can train the model at present, `sampleable` if it can sample from the
    model. A field is None if the server does not send it.

    >>> SupportedModel(model_name="org/base", trainable=True).sampleable is None
    True
    """

    __response__ = True

    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


@model
class GetServerCapabilitiesResponse(Model):
    """The models that the server offers.

    >>> offered = GetServerCapabilitiesResponse(supported_models=[{"model_name": "org/base"}])
    >>> [each.model_name for each in offered.supported_models]
    ['org/base']
    """

    __response__ = True

    supported_models: list[SupportedModel]


@model
class AuthTokenResponse(Model):
    """The answer with a short-lived token, which later requests carry. The repr hides the token.

    >>> AuthTokenResponse(jwt="secret")
    AuthTokenResponse()
    """

    __response__ = True

    jwt: str = attrs.field(repr=False)
