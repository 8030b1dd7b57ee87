"""Handles: the text that carries a sampling client to another process, without a secret unless asked for.

URL-safe base64 of compact JSON in the reference client's own form, so handles go both ways. That form is
strict but for the server's settings, where unknown ones are ignored: what only we have to say is told there.
"""

from __future__ import annotations

import base64
import binascii
import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from attrs import asdict

from tinker_sync._secret import is_secret_header
from tinker_sync.config import Settings
from tinker_sync.errors import InvalidInputError, WireError
from tinker_sync.runtime import _fork
from tinker_sync.runtime.core import Core
from tinker_sync.runtime.introduction import ServerFacts
from tinker_sync.runtime.rate_limiter import key_fingerprint
from tinker_sync.runtime.session import Session
from tinker_sync.types import ClientConfigResponse, ClientDynamicConfigResponse
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.dialect import Dialect

if TYPE_CHECKING:
    from collections.abc import MutableMapping

_WHERE: Final = "sampler handle"
_OURS: Final = "tinker_sync"


def encode_handle(
    core: Core,
    sampling_session_id: str,
    *,
    record_stability_info: bool,
    retry_config: Mapping[str, Any],
    include_api_key: bool,
) -> str:
    """The handle of a sampler."""
    settings, facts = core.settings, core.machinery.facts
    ours = {"retry_config": dict(retry_config), "dialect": asdict(facts.dialect)}
    key = settings.api_key if include_api_key else None
    state = {
        "session_id": core.session_id(),
        "sampling_session_id": sampling_session_id,
        "holder": {
            "base_url": settings.base_url,
            "default_headers_overrides": {
                name: value for name, value in settings.default_headers.items() if not is_secret_header(name)
            },
            "client_config": {**facts.config.model_dump(mode="json"), _OURS: ours},
            "client_dynamic_config": facts.dynamic.model_dump(mode="json"),
            "api_key": None if key is None else key.reveal(),
        },
        "record_stability_info": record_stability_info,
    }
    return base64.urlsafe_b64encode(wire_json.dumps(state)).decode("ascii")


def core_of_handle(handle: str, api_key: str | None) -> tuple[Core, dict[str, Any]]:
    """The shared parts for a handle's session, one set for each in this process, and what the handle says."""
    state = _decoded(handle)
    holder = state["holder"]
    settings = Settings.resolve(
        base_url=holder.get("base_url"),
        api_key=api_key or holder.get("api_key"),
        default_headers=holder.get("default_headers_overrides") or {},
    )
    key = settings.api_key
    place = (
        settings.base_url,
        str(state["session_id"]),
        key_fingerprint(key.reveal() if key is not None else ""),
        wire_json.dumps(holder.get("client_config") or {}),
        _fork.generation(),
    )
    with _lock:
        core = _cores.get(place)
        if core is None or core.closed:
            core = _cores[place] = _new_core(settings, state)
    return core, state


def _new_core(settings: Settings, state: Mapping[str, Any]) -> Core:
    holder = state["holder"]
    raw_config = holder.get("client_config") or {}
    try:
        config = wire_json.from_plain(raw_config, ClientConfigResponse)
        dynamic = wire_json.from_plain(holder.get("client_dynamic_config") or {}, ClientDynamicConfigResponse)
    except WireError as error:
        raise InvalidInputError(f"{_WHERE}: {error}") from error
    facts = ServerFacts(config, dynamic, _dialect_of(raw_config))
    return Core(settings, session=Session(joined=str(state["session_id"])), facts=facts)


def _dialect_of(raw_config: Mapping[str, Any]) -> Dialect:
    """What the server speaks, as the maker of the handle has found out."""
    found = ours_in(raw_config).get("dialect")
    if not isinstance(found, Mapping):
        return Dialect.of_vendor()
    try:
        return Dialect(**{**found, "version": tuple(found["version"])})
    except (TypeError, LookupError) as error:
        raise InvalidInputError(f"{_WHERE}: what it says of the server cannot be read: {error}") from None


def ours_in(raw_config: Any) -> Mapping[str, Any]:
    """What a handle of ours says beyond one of the reference client."""
    ours = raw_config.get(_OURS) if isinstance(raw_config, Mapping) else None
    return ours if isinstance(ours, Mapping) else {}


def _decoded(handle: str) -> dict[str, Any]:
    try:
        state = wire_json.loads(base64.urlsafe_b64decode(handle))
    except (WireError, ValueError, TypeError, binascii.Error):
        raise InvalidInputError(f"{_WHERE}: this is none; use what get_sampler_handle() gave") from None
    if not isinstance(state, dict) or not isinstance(state.get("holder"), dict):
        raise InvalidInputError(f"{_WHERE}: it has another content than expected")
    missing = [name for name in ("session_id", "sampling_session_id") if not state.get(name)]
    if missing:
        raise InvalidInputError(f"{_WHERE}: it has no {' and no '.join(missing)}")
    return state


_lock = threading.Lock()
_cores: MutableMapping[tuple[Any, ...], Core] = weakref.WeakValueDictionary()  # guarded by _lock
