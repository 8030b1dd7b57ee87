"""The table of the protocol's calls, one row each. The client and the embedded server share it.

A row says what the request and the answer of a call are, what the call changes, whether it may be repeated,
and which versions of the protocol have it: to add a call, or to learn about one, look here alone. Rows hold
the names of types, which are loaded from `tinker_sync.types` on first use. Immutable; any thread may read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from tinker_sync.wire.paths import PathTemplate

API: Final = "/api/v1"
JSON: Final = "application/json"
PROTOBUF: Final = "application/x-protobuf"

METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")

Version = tuple[int, int]


class Endpoint(NamedTuple):
    """A row of the table: one call of the protocol.

    >>> ENDPOINTS["get_training_run"].path_for(run="run-1")
    '/api/v1/training_runs/run-1'
    """

    name: str
    method: str
    """One of `METHODS`."""
    path: PathTemplate
    request: str | None = None
    """The type of the body; None without a body, or if the body has no type."""
    reply: str | None = None
    """The type of the answer; None if the answer is ignored."""
    body: Literal["none", "json", "json_or_protobuf"] = "none"
    result: str | None = None
    """The type of the result, for calls whose answer is a promise."""
    promises: str | None = None
    """The name of the call in the header `X-Tinker-Request-Type` of polls for its result."""
    result_as_protobuf: bool = False
    """True if the result may be protobuf."""
    changes: bool = False
    """True if the call changes something that others see. The end of a client waits for such calls, and a
    server that gets one a second time with the same idempotency key repeats its answer."""
    number: str | None = None
    """The field of the body that numbers the call, for calls that a server executes in order, or once."""
    repeatable: bool = True
    """True if a repetition changes nothing of importance.

    A server that keeps `number` executes any call once; others would execute a repeated call twice.
    """
    since: Version = (0, 0)
    """The first version of the protocol with the call."""
    until: Version | None = None
    """The first version without the call; None if the present version has it."""
    instead: str = ""
    """What to use on a server that lacks the call."""
    max_retries: int | None = None
    """The largest number of retries; None: as configured."""
    patient: bool = True
    """True if the call is repeated for minutes.

    The code that makes other calls repeats them, or continues without an answer.
    """
    timeout_s: float | None = None
    """The longest silence of the server; None: as configured."""
    credential: Literal["usual", "exchange"] = "usual"
    follow_redirects: bool = True
    named: bool = True
    """True if the request names the public method that causes it."""
    needed: bool = False
    """True if training cannot continue without the call. It is repeated for minutes after a 5xx, whatever
    limit of tries the policy has."""
    legacy: bool = False
    """True if only older servers, or open ones, offer the call."""
    large: bool = False
    """True if the answer may be large: it lists everything there is."""

    def path_for(self, **ids: object) -> str:
        """Return the path with the ids filled in. Raise the errors of `PathTemplate.fill`."""
        return self.path.fill(ids)

    @property
    def request_type(self) -> type[Any] | None:
        return _type(self.request)

    @property
    def reply_type(self) -> type[Any] | None:
        return _type(self.reply)


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
    columns = {"changes": True, "number": "seq_id", "repeatable": False, "needed": True, **columns}
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

_BY_RUNS: Final = "iter_training_runs() lists the runs of all sessions"

_SERVICE: Final = (
    _row(
        "client_config", "POST", "/client/config",
        request="ClientConfigRequest", reply="ClientConfigResponse", since=(0, 18), credential="exchange",
        named=False,
    ),
    _row(
        "dynamic_config", "POST", "/client/dynamic_config",
        request="ClientConfigRequest", reply="ClientDynamicConfigResponse", since=(0, 25),
        max_retries=0, timeout_s=10, patient=False, named=False,
    ),
    _row(
        "auth_token", "POST", "/auth/token",
        body="json", reply="AuthTokenResponse", since=(0, 18), credential="exchange", patient=False,
    ),
    _row(
        "create_session", "POST", "/create_session",
        request="CreateSessionRequest", reply="CreateSessionResponse",
        changes=True,  # twice: a session without heartbeats ends by itself
        named=False, needed=True,
    ),
    _row(
        "session_heartbeat", "POST", "/session_heartbeat",
        request="SessionHeartbeatRequest", reply="SessionHeartbeatResponse",
        max_retries=0, timeout_s=10, patient=False, named=False,
    ),
    _row(
        "finish_session", "POST", "/sessions/{session}/finish", body="json", changes=True, since=(0, 27),
    ),
    _row(
        "get_server_capabilities", "GET", "/get_server_capabilities", reply="GetServerCapabilitiesResponse",
    ),
    _row("healthz", "GET", "/healthz", reply="HealthResponse", patient=False),
    _row(
        "create_sampling_session", "POST", "/create_sampling_session",
        request="CreateSamplingSessionRequest", reply="CreateSamplingSessionResponse",
        number="sampling_session_seq_id", repeatable=False, needed=True,
    ),
    _row(
        "join_sampling_session", "POST", "/join_sampling_session",
        request="JoinSamplingSessionRequest", reply="JoinSamplingSessionResponse", since=(0, 32),
    ),
    _row(
        "get_sampler", "GET", "/samplers/{sampler}", reply="GetSamplerResponseInternal",
        instead="the client that made the sampler knows its base model",
    ),
    _row(
        "telemetry", "POST", "/telemetry",
        request="TelemetrySendRequest", reply="TelemetryResponse", timeout_s=5, patient=False,
        named=False,
    ),
    _row("get_info", "POST", "/get_info", request="GetInfoRequest", reply="GetInfoResponse"),
)  # fmt: skip

_PROMISES: Final = (
    _promise(
        "create_model", "CreateModelRequest", "CreateModelResponse", "CreateModel",
        number="model_seq_id",
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
        "SaveWeightsExternal", max_retries=0, since=(0, 28),
    ),
    # A load into a new model has `model_seq_id` in place of the number.
    _promise("load_weights", "LoadWeightsRequest", "LoadWeightsResponse", "LoadWeights"),
    _promise(
        "create_custom_loss", "CreateCustomLossRequest", "CreateCustomLossResponse", "CreateCustomLoss",
        number="custom_loss_seq_id", since=(0, 36),
    ),
    _promise(
        "asample", "SampleRequest", "SampleResponse", "Sample",
        result_as_protobuf=True, max_retries=0,
        changes=False, number=None, repeatable=True,  # its seq_id gives no order; without it, draws again
    ),
)  # fmt: skip

_RETRIEVAL: Final = (
    _row(
        "retrieve_future", "POST", "/retrieve_future",
        request="FutureRetrieveRequest", max_retries=0, timeout_s=45, patient=False,
    ),
    _row(
        "retrieve_futures", "POST", "/retrieve_futures",
        request="FuturesRetrieveRequest", reply="FuturesRetrieveResponse",
        since=(0, 28), max_retries=0, timeout_s=45, patient=False, named=False,
    ),
    _row(
        "cancel_future", "POST", "/cancel_future",
        body="json", since=(0, 26), max_retries=0, timeout_s=30, named=False,
    ),
)  # fmt: skip

_REST: Final = (
    _row("get_training_run", "GET", _RUN, reply="TrainingRun"),
    _row("list_training_runs", "GET", "/training_runs", reply="TrainingRunsResponse"),
    _row("list_checkpoints", "GET", _RUN + "/checkpoints", reply="CheckpointsListResponse"),
    _row(
        "list_user_checkpoints", "GET", "/checkpoints", reply="CheckpointsListResponse",
        instead="iter_checkpoints(run) lists the checkpoints of one run",
    ),
    _row("delete_checkpoint", "DELETE", _CHECKPOINT, changes=True),
    _row(
        "publish_checkpoint", "POST", _CHECKPOINT + "/publish", changes=True,
        instead="download_checkpoint(path) fetches the files, to pass on",
    ),
    _row("unpublish_checkpoint", "DELETE", _CHECKPOINT + "/publish", changes=True),
    _row(
        "set_checkpoint_ttl", "PUT", _CHECKPOINT + "/ttl", body="json", changes=True,
        instead="delete_checkpoint(run, checkpoint) deletes it when its time has come",
    ),
    _row(
        "get_external_weights_urls", "GET",
        _RUN + "/checkpoints/external_weights/{name}/external_weights_urls",
        reply="ExternalWeightsUrlsResponse", since=(0, 28),
    ),
    _row(
        "get_weights_info", "POST", "/weights_info", body="json", reply="WeightsInfoResponse",
        instead="get_training_run(run) has the base model and the rank",
    ),
    _row(
        "copy_weights", "POST", "/copy_weights",
        request="CopyWeightsRequest", reply="CopyWeightsResponse", changes=True, since=(0, 26),
    ),
    _row(
        "get_session", "GET", "/sessions/{session}", reply="GetSessionResponse", instead=_BY_RUNS,
    ),
    _row("list_sessions", "GET", "/sessions", reply="ListSessionsResponse", instead=_BY_RUNS),
    _row(
        "search_sessions", "POST", "/sessions/search",
        request="SessionSearchRequest", reply="SessionSearchResponse", since=(0, 36),
    ),
    _row(
        "assign_session_project", "PUT", "/sessions/{session}/project", body="json", changes=True,
        since=(0, 22),
    ),
    _row("export_session_trace", "GET", "/sessions/{session}/trace_export", since=(0, 24), large=True),
    _row(
        "get_billing_usage", "GET", "/billing/usage/events", reply="BillingUsageResponse", since=(0, 23),
        large=True,
    ),
    _row(
        "get_checkpoint_storage_usage", "GET", "/billing/usage/checkpoints/current",
        reply="CurrentCheckpointStorageUsageResponse", since=(0, 23), large=True,
    ),
    _row("get_audit_log", "GET", "/audit", reply="AuditLogResponse", since=(0, 22), large=True),
    _row("get_api_key", "GET", "/auth/apikey/me", credential="exchange", timeout_s=30, patient=False),
    _row(
        "revoke_api_key", "DELETE", "/auth/apikey/me",
        changes=True, credential="exchange", timeout_s=30, patient=False,
    ),
)  # fmt: skip

_LEGACY: Final = (
    _promise(
        "forward", "ForwardRequest", "ForwardBackwardOutput", "Forward",
        changes=False, repeatable=True, until=(0, 25), legacy=True, result_as_protobuf=True,
    ),
    _promise(
        "unload_model", "UnloadModelRequest", "UnloadModelResponse", "UnloadModel",
        number=None, repeatable=True, legacy=True,
    ),
    _row(
        "get_checkpoint_archive", "GET", _CHECKPOINT + "/archive", until=(0, 28), legacy=True,
        follow_redirects=False,
        instead="save_weights_external of a training client exports weights to files",
    ),
)  # fmt: skip

# Experimental in versions after the present one. The answer of a server shows whether it has them.
_NEWER: Final = (
    _row(
        "search_checkpoints", "POST", "/checkpoints/search",
        request="CheckpointSearchRequest", reply="CheckpointSearchResponse",
    ),
    _row(
        "external_weights_upload_start", "POST", "/external_weights_upload_start",
        request="ExternalWeightsUploadStartRequest", reply="ExternalWeightsUploadStartResult",
        changes=True,  # twice: an upload that is never finished comes to nothing
    ),
    _row(
        "external_weights_upload_finish", "POST", "/external_weights_upload_finish",
        request="ExternalWeightsUploadFinishRequest", reply="ExternalWeightsUploadFinishResult",
        changes=True,
    ),
)  # fmt: skip

ENDPOINTS: Final[Mapping[str, Endpoint]] = MappingProxyType(
    {row.name: row for row in (*_SERVICE, *_PROMISES, *_RETRIEVAL, *_REST, *_LEGACY)}
)

NEWER: Final[Mapping[str, Endpoint]] = MappingProxyType({row.name: row for row in _NEWER})


def row_of(name: str) -> Endpoint:
    """Return the row of a call, which may be an experimental one, or one that a user has made (`raw_name`).

    Raises:
        KeyError: there is no such call.

    >>> row_of("search_checkpoints").method, row_of("POST /api/v1/new_call").changes
    ('POST', True)
    """
    return ENDPOINTS.get(name) or NEWER.get(name) or _raw_row(name)


def raw_name(method: str, path: str) -> str:
    """Return the name of the row of a call that a user makes by its method and path.

    >>> raw_name("GET", "/api/v1/sessions")
    'GET /api/v1/sessions'
    """
    return f"{method} {path}"


@lru_cache(maxsize=256)
def _raw_row(name: str) -> Endpoint:
    method, _, path = name.partition(" ")
    if not path:
        raise KeyError(name)
    found = find(method, path)
    if found is not None:
        return found[0]._replace(name=name, path=PathTemplate(path), reply=None)
    reads = method == "GET"
    called = path.rpartition("/")[2]
    return Endpoint(
        name=name,
        method=method,
        path=PathTemplate(path),
        body="none" if reads else "json",
        promises="".join(word.capitalize() for word in called.split("_")),
        changes=not reads,
        repeatable=reads,
    )


def find(method: str, path: str) -> tuple[Endpoint, dict[str, str]] | None:
    """Return the row of an incoming request, and the ids in the path by name; None if no row matches.

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


# Of two matching templates the one with more fixed text counts, so that `.../a/publish` does not name a
# checkpoint.
_BY_PRECISION: Final = sorted(
    (*ENDPOINTS.values(), *NEWER.values()),
    key=lambda endpoint: (len(endpoint.path.names), -len(endpoint.path.text)),
)
