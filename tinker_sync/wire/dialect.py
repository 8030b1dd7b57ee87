"""The dialect of a server, decided from its answers.

Servers speak different versions of the protocol: the hosted service the newest one, open servers 0.25
(TuFT), parts of 0.18, in JSON or protobuf (hatchery-core, open-rl, SkyRL), or what was there before there
were settings (skyrl-tx). This module determines which from the answers; `adapt.py` fits requests to it, and
the rows of `endpoints` say which versions have a call. Pure, except for `DialectCache`, a locked dictionary.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import chain
from typing import Any, Final, Literal, NamedTuple

from attrs import evolve, frozen

from tinker_sync._base.policy import NO_SUCH_CALL, Stage, rule_for
from tinker_sync.errors import ConfigurationError, UnsupportedByServerError
from tinker_sync.wire.endpoints import ENDPOINTS, PROTOBUF, Version

CURRENT: Final[Version] = (0, 38)
# The last version whose settings name the flag below.
_LAST_WITH_FLAG: Final[Version] = (0, 36)
_LOAD_FLAG: Final = "create_model_via_load_weights"
# The first version with protobuf as its only form of bodies and results, and with chunk sizes of the server.
_CHUNKS: Final[Version] = (0, 25)
# Servers without `client/config` are older than the version that introduced it.
_BEFORE_CONFIG: Final[Version] = (0, 17)
_WITH_CONFIG: Final[Version] = (0, 18)

# The version that introduced each setting, the newest first. A server with the setting is at least that new.
_CONFIG_MARKS: Final[Mapping[str, Version]] = {
    "custom_loss_server_side": (0, 36),
    "sample_join_sampling_session": (0, 33),
    "sample_use_retrieve_futures": (0, 28),
    "sample_cancel_enabled": (0, 26),
    "fwdbwd_max_chunk_len": _CHUNKS,
    "refresh_interval_sec": _CHUNKS,
}
# Settings that servers had from 0.19 to 0.24 alone. None of these is left.
_BETWEEN: Final = "proto_write_fwdbwd"


class NewerPart(NamedTuple):
    """A part of a request that older servers do not know."""

    name: str
    since: Version
    used: Callable[[Any], bool] | None = None
    """Returns True for a request with this part, of which older servers would skip it silently; None if
    nothing is lost without it."""
    field: str | None = None
    """The field of the part, if requests always carry it: bodies for older servers, which may refuse it, do
    not."""


def _number_or_flag(name: str, since: Version) -> NewerPart:
    return NewerPart(name, since, lambda request: bool(getattr(request, name)), name)


def _optional(name: str, since: Version) -> NewerPart:
    return NewerPart(name, since, lambda request: getattr(request, name) is not None)


def _not_adam(field: str) -> Callable[[Any], bool]:
    adam = {"AdamParams", "AdamOptimizerConfig"}
    return lambda request: adam.isdisjoint(base.__name__ for base in type(getattr(request, field)).__mro__)


NEWER_PARTS: Final[Mapping[str, tuple[NewerPart, ...]]] = {
    "SampleRequest": (
        _number_or_flag("topk_sample_logprobs", (0, 29)),
        _number_or_flag("prompt_alt_tokens_k", (0, 31)),
        _number_or_flag("record_stability_info", (0, 26)),
        _optional("target_prompt_logprobs", (0, 30)),
        _optional("prompt_logprobs_last_n", (0, 33)),
    ),
    "ForwardBackwardInput": (
        NewerPart(
            "text in loss_fn_config",
            (0, 26),
            lambda given: any(isinstance(value, str) for value in (given.loss_fn_config or {}).values()),
        ),
        NewerPart(
            "provenance spans",
            (0, 26),
            lambda given: any(datum.model_input_spans is not None for datum in given.data),
        ),
    ),
    "OptimStepRequest": (NewerPart("optimizers other than Adam", (0, 29), _not_adam("optim_params")),),
    "CreateModelRequest": (
        NewerPart(
            "optimizers other than Adam", (0, 29), _not_adam("optimizer_config"), field="optimizer_config"
        ),
    ),
    "LoadWeightsRequest": (
        NewerPart("create_model_via_load_weights", (0, 24), lambda request: request.model_id is None),
    ),
    "SaveWeightsRequest": (NewerPart("overwrite", (0, 18), field="overwrite"),),
    "SaveWeightsForSamplerRequest": (
        NewerPart(
            "inflight sampling clients", (0, 38), lambda request: request.kind == "inflight", field="kind"
        ),
    ),
    "CreateCustomLossRequest": (NewerPart("custom losses on the server", (0, 36), lambda _: True),),
    "FutureRetrieveRequest": (NewerPart("allow_metadata_only", (0, 18), field="allow_metadata_only"),),
}
"""The newer parts of requests, by the class of the request, of which a program loads only those it uses.

A field that is added to a request needs a row here, unless it is as old as the request.
"""

FEATURES: Final[Mapping[str, Version]] = {
    part.name: part.since
    for part in sorted(chain.from_iterable(NEWER_PARTS.values()), key=lambda part: part.since)
    if part.used is not None
}
"""The version that introduced each feature of requests. Older servers would skip the feature silently."""

# A protobuf request for a model that does not exist. It has no tensors and is plain ASCII, because a server
# that reads JSON may repeat the body in its error message.
PROBE_BODY: Final = b"\n\x05probe"
PROBE_CONTENT_TYPE: Final = PROTOBUF
_JSON_COMPLAINTS: Final = re.compile(r"model_attributes_type|dict_type|type_error\.dict|json")


@frozen(kw_only=True)
class Dialect:
    """The calls, fields and encodings that one server supports. Immutable.

    >>> Dialect.of_vendor().protobuf, Dialect.forced("json").protobuf
    (True, False)
    """

    version: Version
    """The lowest version that the server can have."""
    protobuf: bool
    """True if bodies of `forward_backward` are protobuf; else they are JSON. Results carry a content type."""
    zstd: bool = False
    """True if bodies of `forward_backward` may be compressed."""
    vendor: bool = False
    client_config: bool = True
    dynamic_config: bool | None = None
    """True if the server has this call; None before the client has asked."""
    create_model_via_load_weights: bool | None = None
    """The server's setting of this name; None if its settings do not contain it."""

    # Each call reads the next five, so they are computed once.

    @cached_property
    def knows_all(self) -> bool:
        """True if the server has the current protocol, and therefore refuses fields that it does not know."""
        return self.vendor or self.version >= CURRENT

    @cached_property
    def keeps_numbers(self) -> bool:
        """True if the server recognises a repeated request by its sequence number, and executes it only once.

        Servers that read only JSON ignore the number.
        """
        return self.vendor or self.protobuf

    @cached_property
    def forward_only(self) -> bool:
        """True if a forward pass is a `forward_backward` with a flag; else it is the call `forward`, in JSON.

        An older server may ignore the flag, and would train then.
        """
        return self.version >= _CHUNKS

    @cached_property
    def one_by_one(self) -> bool:
        """True if the client must wait for the result of a training call before it sends the next one.

        Servers without `client/config` have a queue for each kind of call. An `optim_step` may overtake a
        `forward_backward` that still waits there, and then lacks its gradients.

        >>> Dialect.of_vendor().one_by_one, decide(404, None).one_by_one
        (False, True)
        """
        return not self.client_config

    @cached_property
    def reads_data_only(self) -> bool:
        """True if the server reads only the flat values of a tensor, not its shape or a sparse layout."""
        return self.version < _CHUNKS

    @classmethod
    def of_vendor(cls) -> Dialect:
        """Return the dialect of the vendor's server, which supports the current version of the protocol."""
        return cls(version=CURRENT, protobuf=True, vendor=True)

    @classmethod
    def forced(cls, kind: object) -> Dialect:
        """Return the dialect that a user chooses: "proto", the current version, "json", the oldest one, or a
        `Dialect`.

        Raises:
            ConfigurationError: the value is not valid.
        """
        if isinstance(kind, Dialect):
            return kind
        if kind == "proto":
            return cls(version=CURRENT, protobuf=True)
        if kind == "json":
            return cls(version=_BEFORE_CONFIG, protobuf=False)
        raise ConfigurationError(f"dialect is auto, proto, json or a Dialect, not {kind!r}")

    @property
    def loads_into_new_models(self) -> bool:
        """True if one `load_weights` call, which names a session, creates a model from a checkpoint.

        Servers up to version 0.36 state this in a setting. All servers of version 0.38 can do it, and have no
        such setting.

        >>> Dialect.of_vendor().loads_into_new_models, Dialect.forced("json").loads_into_new_models
        (True, False)
        """
        if self.create_model_via_load_weights is not None:
            return self.create_model_via_load_weights
        return self.vendor or self.version >= _LAST_WITH_FLAG

    def with_settings(self, settings: object, *, client_config: bool = True) -> Dialect:
        """Return this dialect, with `create_model_via_load_weights` from the settings if the field is None.

        Args:
            settings: the JSON of the answer to `client/config`.
            client_config: False if the server has no such call, and therefore no settings.
        """
        known = self if client_config else evolve(self, client_config=False)
        flag = settings.get(_LOAD_FLAG) if isinstance(settings, Mapping) else None
        if flag is None or self.create_model_via_load_weights is not None:
            return known
        return evolve(known, create_model_via_load_weights=bool(flag))

    def knows(self, feature: str) -> bool:
        """Return True if the server knows this feature of `FEATURES`, False if it may skip it silently."""
        return self.version >= FEATURES[feature]

    def offers(self, endpoint: str) -> bool:
        """Return True if the server has a call.

        The version decides. For `client_config`, and for `dynamic_config` after its first call, the server's
        answer to the call decides.

        >>> Dialect.forced("json").offers("finish_session"), Dialect.forced("json").offers("forward")
        (False, True)
        """
        if endpoint == "client_config":
            return self.client_config
        if endpoint == "dynamic_config" and self.dynamic_config is not None:
            return self.dynamic_config
        row = ENDPOINTS[endpoint]
        return row.since <= self.version and (row.until is None or self.version < row.until)

    def after_dynamic_config(self, status: int, settings: object) -> Dialect:
        """Return this dialect, completed by the answer to `dynamic_config`, which may show a newer version.

        Args:
            status: the status of the answer.
            settings: the JSON of the answer.
        """
        if status in NO_SUCH_CALL:
            return evolve(self, dynamic_config=False)
        if 200 <= status < 300 and isinstance(settings, Mapping):
            return evolve(self, dynamic_config=True, version=max(self.version, _version_of(settings)))
        return self


@frozen
class NeedsProbe:
    """The result of `decide` for a server whose settings do not determine its dialect.

    The caller then sends `PROBE_BODY` to `forward_backward`, passes the answer to `read_probe`, and calls
    `decide` again.
    """


Spoken = Literal["json", "protobuf"]


def decide(
    config_status: int, config: object, *, probe: Spoken | None = None, vendor: bool = False
) -> Dialect | NeedsProbe:
    """Return the dialect that the answer to `client/config` shows, or `NeedsProbe` if it does not show one.

    Args:
        config_status: the status of the answer: 2xx, or 404, 405, 501 if there is no such call.
        config: the JSON of the answer, after a 2xx.
        probe: the result of `read_probe`, after a probe.
        vendor: True for the vendor's server.

    Raises:
        UnsupportedByServerError: the server speaks a version that no maintained server does.

    >>> decide(404, None).protobuf, decide(200, {"fwdbwd_max_chunk_len": 1024}).protobuf
    (False, True)
    >>> decide(200, {"pjwt_auth_enabled": False})
    NeedsProbe()
    """
    if config_status in NO_SUCH_CALL:
        return Dialect(version=_BEFORE_CONFIG, protobuf=False, client_config=False)
    settings: Mapping[str, Any] = config if isinstance(config, Mapping) else {}
    zstd = bool(settings.get("proto_compress_fwdbwd"))
    version = max(_version_of(settings), _WITH_CONFIG)
    if vendor or version >= _CHUNKS:
        version = CURRENT if vendor else version
        found = Dialect(version=version, protobuf=True, zstd=zstd, vendor=vendor)
        return found.with_settings(settings)
    if _BETWEEN in settings:
        raise UnsupportedByServerError(
            "this server speaks a version from 0.19 to 0.24 of the protocol, which this client does not; "
            "update the server, or choose JSON, which it also speaks: ServiceClient(dialect='json')"
        )
    if probe is None:
        return NeedsProbe()
    return Dialect(version=version, protobuf=probe == "protobuf").with_settings(settings)


def _version_of(settings: Mapping[str, Any]) -> Version:
    newest = next((version for name, version in _CONFIG_MARKS.items() if name in settings), (0, 0))
    # No setting is newer than 0.36; 0.38 dropped one.
    return CURRENT if newest >= _LAST_WITH_FLAG and _LOAD_FLAG not in settings else newest


def read_probe(status: int, body: bytes) -> Spoken | None:
    """Return the form of bodies that the answer to a probe shows; None if it shows none, such as a 401.

    A server that reads JSON refuses the whole body or its content type, or fails. A server that reads
    protobuf refuses the model, which does not exist.

    >>> read_probe(422, b'{"detail": [{"loc": ["body"], "type": "model_attributes_type"}]}')
    'json'
    >>> read_probe(404, b'{"detail": "no such model"}')
    'protobuf'
    """
    # A status that may pass shows nothing, except two: a failure, and a conflict over the missing model.
    shows_nothing = rule_for(status, Stage.CALL).passes and status not in (409, 500)
    if shows_nothing or status in (401, 403):
        return None
    if status == 415 or status >= 500:
        return "json"
    if status == 422 and _is_about_the_whole_body(body):
        return "json"
    return "protobuf"


def _is_about_the_whole_body(body: bytes) -> bool:
    try:
        complaint = json.loads(body)["detail"][0]
        place, kind = list(complaint["loc"]), str(complaint.get("type", ""))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False
    return place == ["body"] or (place[:1] == ["body"] and bool(_JSON_COMPLAINTS.search(kind)))


class DialectCache:
    """The dialects of servers, by base URL. Thread-safe.

    >>> cache = DialectCache()
    >>> cache.keep("http://h", Dialect.of_vendor()) is cache.get("http://h")
    True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, Dialect] = {}  # guarded by _lock

    def get(self, base_url: str) -> Dialect | None:
        with self._lock:
            return self._found.get(base_url)

    def clear(self) -> None:
        """Forget all dialects, for the case that other servers now answer at these addresses."""
        with self._lock:
            self._found.clear()

    def keep(self, base_url: str, dialect: Dialect) -> Dialect:
        """Keep the dialect of a server, and return it."""
        with self._lock:
            self._found[base_url] = dialect
        return dialect
