"""Handles: texts from which another process makes a copy of a sampling client, by default without a key.

A handle is URL-safe base64 of compact JSON in the form of the vendor's own client, the reference client. So
both packages read each other's handles. The reference client refuses unknown fields, except among the
server's settings. Fields that only this package knows are therefore stored among these settings.
"""

from __future__ import annotations

import base64
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from attrs import asdict, field, fields, frozen

from tinker_sync._base.policy import NO_SUCH_CALL
from tinker_sync._base.secret import HeaderMap, Secret, is_secret_header, mask_text
from tinker_sync.clients._base import REST_S, SharedRuntimes
from tinker_sync.config import Settings
from tinker_sync.errors import APIStatusError, InvalidInputError, WireError
from tinker_sync.runtime.calls import redact_exception
from tinker_sync.runtime.client import ClientRuntime
from tinker_sync.runtime.handshake import ServerFacts
from tinker_sync.runtime.rate_limiter import key_fingerprint
from tinker_sync.runtime.session import Session
from tinker_sync.types import (
    ClientConfigResponse,
    ClientDynamicConfigResponse,
    GetInfoRequest,
    GetInfoResponse,
    GetSamplerResponseInternal,
    TrainingRun,
)
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.dialect import Dialect

_WHERE: Final = "sampler handle"
_OURS: Final = "tinker_sync"


def encode_handle(
    runtime: ClientRuntime,
    sampling_session_id: str,
    *,
    record_stability_info: bool,
    retry_config: Mapping[str, Any],
    include_api_key: bool,
    base_model: str = "",
) -> str:
    """Return the handle of a sampler: text from which another process makes a client."""
    settings, facts = runtime.settings, runtime.server.ready().facts
    ours = {"retry_config": dict(retry_config), "dialect": asdict(facts.dialect)}
    key = settings.api_key if include_api_key else None
    state = {
        "session_id": runtime.server.open_session(),
        "sampling_session_id": sampling_session_id,
        "holder": {
            "base_url": settings.base_url,
            "default_headers_overrides": {
                name: value
                for name, value in settings.default_headers.items()
                if not is_secret_header(name) and mask_text(value, runtime.connection.secrets()) == value
            },
            "client_config": {**facts.config.model_dump(mode="json"), _OURS: ours},
            "client_dynamic_config": facts.dynamic.model_dump(mode="json"),
            "api_key": None if key is None else key.reveal(),
        },
        "base_model": base_model,
        "record_stability_info": record_stability_info,
    }
    return base64.urlsafe_b64encode(wire_json.dumps(state)).decode("ascii")


def known_base_model(ask: Callable[[], GetSamplerResponseInternal]) -> str:
    """Return the base model in the description that `ask` returns; "" if the server has no call for it."""
    try:
        return ask().base_model
    except APIStatusError as error:
        if error.status_code not in NO_SUCH_CALL:
            raise
        return ""


def describe_sampler(
    runtime: ClientRuntime, sampler: str, base_model: str | None, run_id: str
) -> GetSamplerResponseInternal:
    """Return the server's description of a sampler.

    If the server has no call for that, take the base model from `base_model` or from the description of
    the run.

    Args:
        runtime: the runtime of the client.
        sampler: the id of the sampler.
        base_model: the base model, if the client was made with one.
        run_id: the run of the weights, or "".

    Raises:
        TinkerError: the server does not answer, or the base model is not known.
    """
    described: GetSamplerResponseInternal
    try:
        described = runtime.server.call("get_sampler", path={"sampler": sampler}, usual_s=REST_S)
    except APIStatusError as error:
        found = base_model or (_base_model_of(runtime, run_id) if run_id else None)
        if error.status_code not in NO_SUCH_CALL or not found:
            raise
        described = GetSamplerResponseInternal(sampler_id=sampler, base_model=found)
    return described


def _base_model_of(runtime: ClientRuntime, run_id: str) -> str | None:
    """Return the base model of a run, or None if the server does not describe the run."""
    with suppress(APIStatusError):
        run: TrainingRun = runtime.server.call("get_training_run", path={"run": run_id}, usual_s=REST_S)
        return run.base_model
    with suppress(APIStatusError):
        request = GetInfoRequest(model_id=run_id)
        info: GetInfoResponse = runtime.server.call("get_info", request, usual_s=REST_S)
        return info.model_data.model_name
    return None


@frozen
class HandleContent:
    """The content of a handle, the text from which another process makes a copy of a sampling client.

    The repr shows no key and no value of a header.
    """

    session_id: str
    sampling_session_id: str
    record_stability_info: bool
    base_model: str
    """The base model; "" if the maker of the handle does not know it."""
    base_url: str | None = field(repr=False)  # may hold a password by mistake; `Settings` refuses it later
    api_key: Secret | None
    default_headers: HeaderMap = field(repr=False)
    config: Mapping[str, Any] = field(repr=False)
    dynamic: Mapping[str, Any] = field(repr=False)

    @property
    def ours(self) -> Mapping[str, Any]:
        """The fields that this package adds to the form of the reference client."""
        ours = self.config.get(_OURS)
        return ours if isinstance(ours, Mapping) else {}


def runtime_of_handle(handle: str, api_key: str | None) -> tuple[ClientRuntime, HandleContent]:
    """Return a runtime for the session of a handle, and the content of the handle.

    Handles of the same session, server, key and settings share a runtime in this process. `api_key`
    replaces a key in the handle.
    """
    content = read_handle(handle)
    settings = Settings.resolve(
        base_url=content.base_url, api_key=api_key or content.api_key, default_headers=content.default_headers
    )
    key = settings.api_key
    place = (
        settings.base_url,
        content.session_id,
        key_fingerprint(key.reveal() if key is not None else ""),
        wire_json.dumps(content.config),
    )
    return _runtimes.get(place, lambda: _new_runtime(settings, content)), content


def _new_runtime(settings: Settings, content: HandleContent) -> ClientRuntime:
    try:
        config = wire_json.from_plain(content.config, ClientConfigResponse)
        dynamic = wire_json.from_plain(content.dynamic, ClientDynamicConfigResponse)
    except WireError as error:
        plain = wire_json.dumps([content.config, content.dynamic])
        raise InvalidInputError(f"{_WHERE}: {redact_exception(error, plain, settings.secrets)}") from error
    facts = ServerFacts(config, dynamic, _dialect_of(content))
    return ClientRuntime(settings, session=Session(joined=content.session_id), facts=facts)


def _dialect_of(content: HandleContent) -> Dialect:
    """Return the dialect that the handle states, or that of the hosted service if it states none."""
    found = content.ours.get("dialect")
    if not isinstance(found, Mapping):
        return Dialect.of_vendor()
    try:
        known = {each.name: found[each.name] for each in fields(Dialect) if each.name in found}
        return Dialect(**{**known, "version": tuple(found["version"])})
    except (TypeError, LookupError) as error:
        raise InvalidInputError(f"{_WHERE}: what it says of the server cannot be read: {error}") from None


def read_handle(handle: str) -> HandleContent:
    """Return the content of a handle.

    Raises:
        InvalidInputError: the text is not a handle. The message does not quote it, as it may contain a key.
    """
    read = _read(handle)
    if isinstance(read, HandleContent):
        return read
    raise InvalidInputError(f"{_WHERE}: {read}")


def _read(handle: str) -> HandleContent | str:
    """Return the content of a handle, or a description of its fault."""
    try:
        state = wire_json.loads(base64.urlsafe_b64decode(handle))
    except (WireError, ValueError, TypeError):
        return "this is none; use what get_sampler_handle() gave"
    holder = state.get("holder") if isinstance(state, dict) else None
    if not isinstance(holder, dict):
        return "it has another content than expected"
    missing = [name for name in ("session_id", "sampling_session_id") if not state.get(name)]
    if missing:
        return f"it has no {' and no '.join(missing)}"
    headers, key = holder.get("default_headers_overrides") or {}, holder.get("api_key")
    config, dynamic = holder.get("client_config") or {}, holder.get("client_dynamic_config") or {}
    base_url = holder.get("base_url")
    base_model = state.get("base_model")
    if not all(isinstance(each, dict) for each in (headers, config, dynamic)) or not all(
        each is None or isinstance(each, str) for each in (key, base_url, base_model, *headers.values())
    ):
        return "it has another content than expected"
    return HandleContent(
        session_id=str(state["session_id"]),
        sampling_session_id=str(state["sampling_session_id"]),
        record_stability_info=bool(state.get("record_stability_info")),
        base_model=base_model or "",
        base_url=base_url,
        api_key=Secret(key) if key else None,
        default_headers=HeaderMap(headers),
        config=config,
        dynamic=dynamic,
    )


_runtimes: Final = SharedRuntimes(weakref.WeakValueDictionary())
