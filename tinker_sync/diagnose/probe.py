"""`probe`: which calls a server has, and what it speaks.

Harmless anywhere: it only ever asks with GET, for things named "probe" that do not exist, also where a call
is a POST; a server that has the call says then that the method is not allowed. The one POST beside
`client/config` is the question every client asks of a server whose settings do not tell what it speaks: a
forward pass for a model that does not exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal

from attrs import frozen

from tinker_sync._secret import Secret
from tinker_sync.config import Settings
from tinker_sync.runtime.core import Core
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.types.service import ClientConfigResponse
from tinker_sync.wire.dialect import FEATURES, Dialect
from tinker_sync.wire.endpoints import API, ENDPOINTS, Endpoint, find

Answer = Literal["yes", "no", "unknown"]

_NAME: Final = "probe"
_NOWHERE: Final = f"{API}/this_call_exists_nowhere"
_READ_S: Final = 15.0
_RETRIES: Final = 2


@frozen(kw_only=True)
class CallFound:
    """Whether a server has one call.

    Attributes:
        there: what the server's answer says.
        expected: what clients go by: the version that the server is known to have at least.
        status: of the answer; None: there was none.
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
    """Whether a server is known to honour something in requests, which others skip without a word."""

    name: str
    since: str
    known: bool


@frozen(kw_only=True)
class ProbeReport:
    """What a server speaks."""

    base_url: str
    version: str
    """Of the protocol; it has at least this one."""
    bodies: Literal["protobuf", "json"]
    client_config: bool
    """Whether it has settings for clients; older ones have none."""
    tokens: bool
    """Whether keys are exchanged for short-lived tokens."""
    flags: Mapping[str, object]
    """Its settings for clients, where they are other than usual."""
    calls: tuple[CallFound, ...]
    features: tuple[FeatureFound, ...]


def probe(base_url: str | None = None, *, api_key: str | None = None) -> ProbeReport:
    """Ask a server what it speaks.

    Args:
        base_url: the server; None: `TINKER_BASE_URL`, else the hosted service.
        api_key: the key; None: `TINKER_API_KEY`, else the stored one.

    Raises:
        TinkerError: it cannot be reached, or does not let us in.
    """
    settings = Settings.resolve(
        base_url=base_url, api_key=None if api_key is None else Secret(api_key), max_retries=_RETRIES
    )
    core = Core(settings)
    try:
        facts = core.machinery.facts
        return ProbeReport(
            base_url=settings.base_url,
            version=_version(facts.dialect),
            bodies="protobuf" if facts.dialect.protobuf else "json",
            client_config=facts.dialect.client_config,
            tokens=facts.config.pjwt_auth_enabled,
            flags=_changed(facts.config) if facts.dialect.client_config else {},
            calls=tuple(_calls(core, facts.dialect)),
            features=tuple(
                FeatureFound(name=name, since=".".join(map(str, since)), known=facts.dialect.knows(name))
                for name, since in FEATURES.items()
            ),
        )
    finally:
        core.close().result()


def _changed(config: ClientConfigResponse) -> dict[str, object]:
    usual = ClientConfigResponse().model_dump()
    return {name: value for name, value in config.model_dump().items() if value != usual[name]}


def _version(dialect: Dialect) -> str:
    return ".".join(map(str, dialect.version))


def _calls(core: Core, dialect: Dialect) -> Iterator[CallFound]:
    nowhere = _get(core, _NOWHERE)
    for row in ENDPOINTS.values():
        there, status = _there(core, row, dialect, nowhere)
        yield CallFound(
            name=row.name,
            method=row.method,
            path=row.path.text,
            there=there,
            expected=dialect.offers(row.name),
            status=status,
            legacy=row.legacy,
        )


def _there(core: Core, row: Endpoint, dialect: Dialect, nowhere: Reply | None) -> tuple[Answer, int | None]:
    if row.name == "client_config":  # it has answered already, or not
        return ("yes" if dialect.client_config else "no"), None
    path = row.path_for(**{name.lstrip("*"): _NAME for name in row.path.names})
    if row.method != "GET" and find("GET", path) is not None:
        return "unknown", None  # the answer would be that of another call
    reply = _get(core, path)
    return judged(reply, nowhere, path), None if reply is None else reply.status


def judged(reply: Reply | None, nowhere: Reply | None, path: str) -> Answer:
    """What an answer to GET says, against the answer for a call that exists nowhere.

    >>> nowhere = Reply(404, {}, b'{"detail":"Not Found"}')
    >>> judged(Reply(405, {}), nowhere, "/x"), judged(nowhere, nowhere, "/x")
    ('yes', 'no')
    >>> judged(Reply(404, {}, b'{"detail":"no run probe"}'), nowhere, "/x")
    'yes'
    """
    if reply is None or nowhere is None:
        return "unknown"
    if reply.status == nowhere.status:
        # Some servers repeat the path as they complain.
        same = _without(reply, path) == _without(nowhere, _NOWHERE)
        return "yes" if not same else "no" if nowhere.status in (404, 405, 501) else "unknown"
    return "unknown" if reply.status in (401, 402, 403, 429) or reply.status >= 500 else "yes"


def _without(reply: Reply, path: str) -> bytes:
    return reply.body.replace(path.encode(), b"")


def _get(core: Core, path: str) -> Reply | None:
    call = Call(method="GET", path=path, read_s=_READ_S, follow_redirects=False)
    try:
        return core.http.send(call)
    except SendFailed:
        return None
