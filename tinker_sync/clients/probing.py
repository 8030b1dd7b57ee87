"""`probe`: the calls and features that a server has.

It is harmless. If an open server publishes its routes, the report lists those. Other servers get only GET
requests for things named "probe", which do not exist. A server that has a POST call answers such a request
with status 405, and its header `Allow` names POST. The start of the client sends POST requests as for any
client: `client/config`, and, if the settings are not conclusive, a forward pass for a missing model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal

from attrs import frozen

from tinker_sync._base.policy import NO_SUCH_CALL
from tinker_sync.config import Settings
from tinker_sync.runtime.client import ClientRuntime
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.types.service import ClientConfigResponse
from tinker_sync.wire.dialect import FEATURES, Dialect
from tinker_sync.wire.endpoints import API, ENDPOINTS, Endpoint, find
from tinker_sync.wire.published import PublishedApi

Answer = Literal["yes", "no", "unknown"]

_NAME: Final = "probe"
_NOWHERE: Final = f"{API}/this_call_exists_nowhere"
_READ_S: Final = 15.0
_RETRIES: Final = 2


@frozen(kw_only=True)
class CallFound:
    """The result for one call.

    Attributes:
        there: "yes" or "no" if the answer shows that the server has the call or lacks it, else "unknown".
        expected: True if servers of the version in the report have the call; the client relies on `expected`.
        status: the status of the answer; None without an answer.
        legacy: True for a call of older servers.
    """

    name: str
    method: str
    path: str
    there: Answer
    expected: bool
    status: int | None
    legacy: bool = False


@frozen(kw_only=True)
class FeatureFound:
    """A feature of requests, which servers without it ignore silently.

    Attributes:
        since: the first version of the protocol with the feature.
        known: True if the server has the feature, by its version.
    """

    name: str
    since: str
    known: bool


@frozen(kw_only=True)
class ProbeReport:
    """The calls, features and settings of a server."""

    base_url: str
    version: str
    """The lowest version of the protocol that the server can have."""
    bodies: Literal["protobuf", "json"]
    client_config: bool
    """True if the server has settings for clients; older servers have none."""
    tokens: bool
    """True if clients exchange keys for short-lived tokens."""
    flags: Mapping[str, object]
    """The settings for clients that differ from the defaults."""
    calls: tuple[CallFound, ...]
    features: tuple[FeatureFound, ...]


def probe(base_url: str | None = None, *, api_key: str | None = None) -> ProbeReport:
    """Find out which calls and features a server has.

    Args:
        base_url: the server; None: `TINKER_BASE_URL`, else the hosted service.
        api_key: the key; None: `TINKER_API_KEY`, else from `TINKER_CREDENTIAL_CMD`, else the stored one.

    Raises:
        ConfigurationError: a setting cannot be used.
        TinkerError: the server cannot be reached, or refuses the key.
    """
    settings = Settings.resolve(base_url=base_url, api_key=api_key, max_retries=_RETRIES)
    runtime = ClientRuntime(settings)
    try:
        facts = runtime.server.ready().facts
        return ProbeReport(
            base_url=settings.base_url,
            version=".".join(map(str, facts.dialect.version)),
            bodies="protobuf" if facts.dialect.protobuf else "json",
            client_config=facts.dialect.client_config,
            tokens=facts.config.pjwt_auth_enabled,
            flags=_find_changed_flags(facts.config) if facts.dialect.client_config else {},
            calls=tuple(_probe_calls(runtime, facts.dialect)),
            features=tuple(
                FeatureFound(name=name, since=".".join(map(str, since)), known=facts.dialect.knows(name))
                for name, since in FEATURES.items()
            ),
        )
    finally:
        runtime.close().result()


def _find_changed_flags(config: ClientConfigResponse) -> dict[str, object]:
    defaults = ClientConfigResponse().model_dump()
    return {name: value for name, value in config.model_dump().items() if value != defaults[name]}


def _probe_calls(runtime: ClientRuntime, dialect: Dialect) -> Iterator[CallFound]:
    api = None if dialect.knows_all else runtime.server.published.api()
    nowhere = _send_get(runtime, _NOWHERE)
    for row in ENDPOINTS.values():
        there, status = _probe_call(runtime, row, dialect, nowhere, api)
        yield CallFound(
            name=row.name,
            method=row.method,
            path=row.path.text,
            there=there,
            expected=dialect.offers(row.name),
            status=status,
            legacy=row.legacy,
        )


def _probe_call(
    runtime: ClientRuntime, row: Endpoint, dialect: Dialect, nowhere: Reply | None, api: PublishedApi | None
) -> tuple[Answer, int | None]:
    if row.name == "client_config":  # the client has sent it already
        return ("yes" if dialect.client_config else "no"), None
    if api is not None:
        return ("yes" if api.offers(row) else "no"), None
    path = row.path_for(**{name.lstrip("*"): _NAME for name in row.path.names})
    if row.method != "GET" and find("GET", path) is not None:
        return "unknown", None  # a GET request to this path is another call
    reply = _send_get(runtime, path)
    if row.name == "unpublish_checkpoint" and reply is not None and "allow" in reply.headers:
        return "unknown", reply.status  # many servers match this path to the call that deletes a checkpoint
    return judge_reply(reply, nowhere, path, row.method), None if reply is None else reply.status


def judge_reply(reply: Reply | None, nowhere: Reply | None, path: str, method: str) -> Answer:
    """Judge from the answer to a GET request if the server has a call: "yes", "no" or "unknown".

    Args:
        reply: the answer.
        nowhere: the answer for a call that does not exist.
        path: the path of the request.
        method: the method of the call.

    >>> nowhere = Reply(404, {}, b'{"detail":"Not Found"}')
    >>> judge_reply(Reply(405, {}), nowhere, "/x", "POST"), judge_reply(nowhere, nowhere, "/x", "GET")
    ('yes', 'no')
    >>> judge_reply(Reply(405, {"allow": "DELETE"}), nowhere, "/x", "GET")
    'no'
    >>> judge_reply(Reply(404, {}, b'{"detail":"no run probe"}'), nowhere, "/x", "GET")
    'yes'
    """
    if reply is None or nowhere is None:
        return "unknown"
    if reply.status == nowhere.status:
        # Some servers repeat the path in their error.
        same = _remove_path(reply, path) == _remove_path(nowhere, _NOWHERE)
        return "yes" if not same else "no" if nowhere.status in NO_SUCH_CALL else "unknown"
    if reply.status == 405:  # the path has a route, but it may belong to another call
        if method == "GET":
            return "no"
        allowed = [each.strip().upper() for each in reply.headers.get("allow", method).split(",")]
        return "yes" if method in allowed else "unknown"  # many servers name one route's methods only
    return "unknown" if reply.status in (401, 402, 403, 429) or reply.status >= 500 else "yes"


def _remove_path(reply: Reply, path: str) -> bytes:
    return reply.body.replace(path.encode(), b"")


def _send_get(runtime: ClientRuntime, path: str) -> Reply | None:
    call = Call(method="GET", path=path, read_s=_READ_S, follow_redirects=False)
    try:
        return runtime.connection.http.send(call)
    except SendFailed:
        return None
