"""Every call of the protocol, one row each; client and embedded server share the table.

A row says how a call looks and what may be done with it. Types are named and looked up in `tinker_sync.types`
when asked for, so reading the table loads none of them. Immutable; any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, Literal

from attrs import frozen

from tinker_sync.wire.paths import PathTemplate

API: Final = "/api/v1"
JSON: Final = "application/json"
PROTOBUF: Final = "application/x-protobuf"
ACCEPT_EITHER: Final = f"{PROTOBUF}, {JSON}"
"""For results that come as protobuf or JSON, whichever the server speaks."""


class Repeat(str, Enum):
    """May a call be sent again when the server may have received it already?"""

    SAFE = "safe"
    """A second time changes nothing, or nothing that matters."""
    NUMBERED = "numbered"
    """The body carries a number; a server that keeps numbers does it once. Others would do it twice."""
    UNSENT = "unsent"
    """Only if the first time surely did not arrive."""


@frozen(kw_only=True)
class Endpoint:
    """One call of the protocol.

    >>> ENDPOINTS["get_training_run"].path_for(run="run-1")
    '/api/v1/training_runs/run-1'
    """

    name: str
    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: PathTemplate
    request: str | None = None
    """Type of the body; None where there is no body or one without a type of its own."""
    reply: str | None = None
    """Type of the answer; None where it is ignored."""
    body: Literal["none", "json", "json_or_protobuf"] = "none"
    result: str | None = None
    """For calls that are answered with a promise: the type it resolves to."""
    promises: str | None = None
    """What such a promise is called in `X-Tinker-Request-Type`."""
    result_as_protobuf: bool = False
    """Whether the result may come as protobuf."""
    repeat: Repeat = Repeat.SAFE
    reason: str = "it only reads"
    """Why it may be repeated like that."""
    max_retries: int | None = None
    """None: as configured."""
    patient: bool = True
    """Worth trying for minutes; others have a caller that asks again by itself or goes on without."""
    timeout_s: float | None = None
    """How long the server may be silent; None: as configured."""
    credential: Literal["usual", "exchange"] = "usual"
    follow_redirects: bool = True
    named: bool = True
    """Whether the server is told which public method causes the call; others are the client's own."""
    needed: bool = False
    """Whether training cannot go on without it: then a server's `x-should-retry: false` is not final."""
    pool: str = "TRAIN"
    """How the reference client groups its connections; here only for information."""
    legacy: bool = False
    """Only older servers offer it."""

    def path_for(self, **ids: object) -> str:
        """The path with these ids in it."""
        return self.path.fill(ids)

    @property
    def request_type(self) -> type[Any] | None:
        return _type(self.request)

    @property
    def reply_type(self) -> type[Any] | None:
        return _type(self.reply)

    @property
    def result_type(self) -> type[Any] | None:
        return _type(self.result)


def _type(name: str | None) -> type[Any] | None:
    if name is None:
        return None
    from tinker_sync import types

    found: type[Any] = getattr(types, name)
    return found


def _row(name: str, method: Any, path: str, **columns: Any) -> Endpoint:
    if columns.get("request"):
        columns.setdefault("body", "json")
    return Endpoint(name=name, method=method, path=PathTemplate(API + path), **columns)


def _promise(name: str, request: str, result: str, promises: str, **columns: Any) -> Endpoint:
    columns.setdefault("repeat", Repeat.NUMBERED)
    columns.setdefault("reason", "seq_id numbers it")
    columns.setdefault("needed", True)
    return _row(
        name,
        "POST",
        f"/{name}",
        request=request,
        reply="UntypedAPIFuture",
        result=result,
        promises=promises,
        **columns,
    )


_RUN: Final = "/training_runs/{run}"
_CHECKPOINT: Final = _RUN + "/checkpoints/{*checkpoint}"
_SETS_THE_SAME: Final = "it sets what the first one set"
_GONE_ALREADY: Final = "what is gone stays gone; a second answer may be 404"

_SERVICE: Final = (
    _row(
        "client_config", "POST", "/client/config",
        request="ClientConfigRequest", reply="ClientConfigResponse", credential="exchange", pool="ONE_OFF",
        named=False,
    ),
    _row(
        "dynamic_config", "POST", "/client/dynamic_config",
        request="ClientConfigRequest", reply="ClientDynamicConfigResponse",
        max_retries=0, timeout_s=10, patient=False, pool="SESSION", named=False,
    ),
    _row(
        "auth_token", "POST", "/auth/token",
        body="json", reply="AuthTokenResponse", credential="exchange", patient=False, pool="AUTH",
        reason="a second token does not spoil the first",
    ),
    _row(
        "create_session", "POST", "/create_session",
        request="CreateSessionRequest", reply="CreateSessionResponse", pool="SESSION",
        reason="a session without heartbeats ends by itself", named=False, needed=True,
    ),
    _row(
        "session_heartbeat", "POST", "/session_heartbeat",
        request="SessionHeartbeatRequest", reply="SessionHeartbeatResponse",
        max_retries=0, timeout_s=10, patient=False, pool="SESSION", reason="a session lives or not",
        named=False,
    ),
    _row(
        "finish_session", "POST", "/sessions/{session}/finish", body="json", reason=_SETS_THE_SAME,
    ),
    _row(
        "get_server_capabilities", "GET", "/get_server_capabilities", reply="GetServerCapabilitiesResponse",
    ),
    _row("healthz", "GET", "/healthz", reply="HealthResponse", patient=False),
    _row(
        "create_sampling_session", "POST", "/create_sampling_session",
        request="CreateSamplingSessionRequest", reply="CreateSamplingSessionResponse", pool="SESSION",
        repeat=Repeat.NUMBERED, reason="sampling_session_seq_id numbers it", needed=True,
    ),
    _row(
        "join_sampling_session", "POST", "/join_sampling_session",
        request="JoinSamplingSessionRequest", reply="JoinSamplingSessionResponse", pool="SESSION",
        reason="a number handed out twice is a number unused",
    ),
    _row("get_sampler", "GET", "/samplers/{sampler}", reply="GetSamplerResponseInternal"),
    _row(
        "telemetry", "POST", "/telemetry",
        request="TelemetrySendRequest", reply="TelemetryResponse", timeout_s=5, patient=False,
        pool="TELEMETRY", reason="events have ids", named=False,
    ),
    _row("get_info", "POST", "/get_info", request="GetInfoRequest", reply="GetInfoResponse"),
)  # fmt: skip

_PROMISES: Final = (
    _promise(
        "create_model", "CreateModelRequest", "CreateModelResponse", "CreateModel",
        reason="model_seq_id numbers it",
    ),
    _promise(
        "forward_backward", "ForwardBackwardRequest", "ForwardBackwardOutput", "ForwardBackward",
        body="json_or_protobuf", result_as_protobuf=True,
    ),
    _promise("optim_step", "OptimStepRequest", "OptimStepResponse", "OptimStep"),
    _promise("save_weights", "SaveWeightsRequest", "SaveWeightsResponse", "SaveWeights", max_retries=0),
    _promise(
        "save_weights_for_sampler", "SaveWeightsForSamplerRequest", "SaveWeightsForSamplerResponseInternal",
        "SaveWeightsForSampler", max_retries=0,
    ),
    _promise(
        "save_weights_external", "SaveWeightsExternalRequest", "SaveWeightsExternalResponseInternal",
        "SaveWeightsExternal", max_retries=0,
    ),
    _promise(
        "load_weights", "LoadWeightsRequest", "LoadWeightsResponse", "LoadWeights",
        reason="seq_id, or model_seq_id for a new model, numbers it",
    ),
    _promise(
        "create_custom_loss", "CreateCustomLossRequest", "CreateCustomLossResponse", "CreateCustomLoss",
        reason="custom_loss_seq_id numbers it",
    ),
    _promise(
        "asample", "SampleRequest", "SampleResponse", "Sample",
        result_as_protobuf=True, max_retries=0, pool="SAMPLE",
        repeat=Repeat.SAFE, reason="it changes nothing; where seq_id is not kept it draws a second time",
    ),
)  # fmt: skip

_RETRIEVAL: Final = (
    _row(
        "retrieve_future", "POST", "/retrieve_future",
        request="FutureRetrieveRequest", max_retries=0, timeout_s=45, patient=False, pool="RETRIEVE_PROMISE",
    ),
    _row(
        "retrieve_futures", "POST", "/retrieve_futures",
        request="FuturesRetrieveRequest", reply="FuturesRetrieveResponse",
        max_retries=0, timeout_s=45, patient=False, pool="RETRIEVE_FUTURES",
        reason="the cursor says what is known", named=False,
    ),
    _row(
        "cancel_future", "POST", "/cancel_future",
        body="json", max_retries=0, timeout_s=30, pool="RETRIEVE_PROMISE", reason=_GONE_ALREADY,
        named=False,
    ),
)  # fmt: skip

_REST: Final = (
    _row("get_training_run", "GET", _RUN, reply="TrainingRun"),
    _row("list_training_runs", "GET", "/training_runs", reply="TrainingRunsResponse"),
    _row("list_checkpoints", "GET", _RUN + "/checkpoints", reply="CheckpointsListResponse"),
    _row("list_user_checkpoints", "GET", "/checkpoints", reply="CheckpointsListResponse"),
    _row("delete_checkpoint", "DELETE", _CHECKPOINT, reason=_GONE_ALREADY),
    _row("publish_checkpoint", "POST", _CHECKPOINT + "/publish", reason=_SETS_THE_SAME),
    _row("unpublish_checkpoint", "DELETE", _CHECKPOINT + "/publish", reason=_SETS_THE_SAME),
    _row("set_checkpoint_ttl", "PUT", _CHECKPOINT + "/ttl", body="json", reason=_SETS_THE_SAME),
    _row(
        "get_external_weights_urls", "GET",
        _RUN + "/checkpoints/external_weights/{name}/external_weights_urls",
        reply="ExternalWeightsUrlsResponse",
    ),
    _row("get_weights_info", "POST", "/weights_info", body="json", reply="WeightsInfoResponse"),
    _row(
        "copy_weights", "POST", "/copy_weights",
        request="CopyWeightsRequest", reply="CopyWeightsResponse", reason="the idempotency key names it",
    ),
    _row("get_session", "GET", "/sessions/{session}", reply="GetSessionResponse"),
    _row("list_sessions", "GET", "/sessions", reply="ListSessionsResponse"),
    _row(
        "search_sessions", "POST", "/sessions/search",
        request="SessionSearchRequest", reply="SessionSearchResponse",
    ),
    _row(
        "assign_session_project", "PUT", "/sessions/{session}/project", body="json", reason=_SETS_THE_SAME,
    ),
    _row("export_session_trace", "GET", "/sessions/{session}/trace_export"),
    _row("get_billing_usage", "GET", "/billing/usage/events", reply="BillingUsageResponse"),
    _row(
        "get_checkpoint_storage_usage", "GET", "/billing/usage/checkpoints/current",
        reply="CurrentCheckpointStorageUsageResponse",
    ),
    _row("get_audit_log", "GET", "/audit", reply="AuditLogResponse", pool="REST_SUPPORT_REDIRECT"),
    _row("get_api_key", "GET", "/auth/apikey/me", timeout_s=30, patient=False, pool="NONE"),
    _row(
        "revoke_api_key", "DELETE", "/auth/apikey/me",
        timeout_s=30, patient=False, pool="NONE", reason=_GONE_ALREADY,
    ),
)  # fmt: skip

_LEGACY: Final = (
    _promise(
        "forward", "ForwardRequest", "ForwardBackwardOutput", "Forward",
        legacy=True, repeat=Repeat.SAFE, reason="it leaves the model as it is", result_as_protobuf=True,
    ),
    _promise(
        "unload_model", "UnloadModelRequest", "UnloadModelResponse", "UnloadModel",
        legacy=True, repeat=Repeat.SAFE, reason=_GONE_ALREADY,
    ),
    _row(
        "get_checkpoint_archive", "GET", _CHECKPOINT + "/archive", legacy=True, follow_redirects=False,
    ),
    _row(
        "list_model_checkpoints", "GET", "/models/{model}/checkpoints",
        reply="CheckpointsListResponse", legacy=True,
    ),
)  # fmt: skip

# Experimental in versions after the one spoken here. Whether a server has them it says itself.
_NEWER: Final = (
    _row(
        "search_checkpoints", "POST", "/checkpoints/search",
        request="CheckpointSearchRequest", reply="CheckpointSearchResponse",
    ),
    _row(
        "external_weights_upload_start", "POST", "/external_weights_upload_start",
        request="ExternalWeightsUploadStartRequest", reply="ExternalWeightsUploadStartResult",
        reason="an upload that is never finished comes to nothing",
    ),
    _row(
        "external_weights_upload_finish", "POST", "/external_weights_upload_finish",
        request="ExternalWeightsUploadFinishRequest", reply="ExternalWeightsUploadFinishResult",
        reason="the upload is named, and finished once",
    ),
)  # fmt: skip

ENDPOINTS: Final[Mapping[str, Endpoint]] = MappingProxyType(
    {row.name: row for row in (*_SERVICE, *_PROMISES, *_RETRIEVAL, *_REST, *_LEGACY)}
)

NEWER: Final[Mapping[str, Endpoint]] = MappingProxyType({row.name: row for row in _NEWER})


def row_of(name: str) -> Endpoint:
    """The row of a call, experimental ones included.

    >>> row_of("search_checkpoints").method
    'POST'
    """
    return ENDPOINTS.get(name) or NEWER[name]


def find(method: str, path: str) -> tuple[Endpoint, dict[str, str]] | None:
    """The call an incoming request is, and the ids in its path; None when there is none.

    >>> endpoint, ids = find("DELETE", "/api/v1/training_runs/r/checkpoints/weights/a")
    >>> endpoint.name, ids
    ('delete_checkpoint', {'run': 'r', 'checkpoint': 'weights/a'})
    """
    for endpoint in _BY_PRECISION:
        if endpoint.method == method:
            ids = endpoint.path.match(path)
            if ids is not None:
                return endpoint, ids
    return None


# Where two templates fit, the one with more fixed text is meant: `.../a/publish` is no checkpoint "publish".
_BY_PRECISION: Final = sorted(
    ENDPOINTS.values(), key=lambda endpoint: (len(endpoint.path.names), -len(endpoint.path.text))
)
