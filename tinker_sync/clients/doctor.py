"""`examine`: checks of everything between this program and a server, each with advice.

It changes nothing and retries no request; for the address `local`, it starts an embedded server. A finding
never contains the key.
"""

from __future__ import annotations

import os
import platform
import socket
import ssl
import stat
from collections.abc import Iterator
from importlib import metadata
from typing import Final, Literal
from urllib.parse import urlsplit

from attrs import frozen

from tinker_sync._base.clock import SYSTEM_CLOCK, http_date
from tinker_sync._version import __version__
from tinker_sync.auth import describe_key_source, raise_if_tinker_not_accessible, tinker_has_credentials
from tinker_sync.config import CredentialsFile, Settings
from tinker_sync.config.address import DEFAULT_BASE_URL
from tinker_sync.errors import EXTRAS, TinkerError, pip_names
from tinker_sync.transport.auth import KeyRing
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.transport.http import Http
from tinker_sync.transport.pools import ConnectFailed, Route, connect
from tinker_sync.wire import json as wire_json

State = Literal["ok", "warning", "failure", "skipped"]

_KEY_VARIABLES: Final = ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD")
# Clients renew a token a minute before it expires; half of that is safe.
_SKEW_S: Final = 30.0
_CONNECT_S: Final = 5.0
_REACH_S: Final = 10.0
_NEEDED: Final = ("requests", "urllib3", "attrs", "cattrs", "tokenizers", "numpy")
VARIABLES: Final = frozenset(
    {
        "TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_CREDENTIAL_CMD", "TINKER_PROJECT_ID", "TINKER_TAGS",
        "TINKER_LOG", "TINKER_HTTP2", "TINKER_MAX_CONNECTIONS", "TINKER_PACE", "TINKER_PRICES",
        "TINKER_PROGRESS",
        "TINKER_LOCAL_DATA_DIR", "TINKER_LOCAL_MODEL", "TINKER_LOCAL_KEY", "TINKER_GATEWAY_KEY",
    }
)  # fmt: skip


@frozen
class Finding:
    """The result of one check.

    >>> Finding("key", "failure", "there is none", "run tinker-sync auth login").state
    'failure'
    """

    name: str
    state: State
    what: str
    advice: str = ""
    """What to do; empty if there is nothing to do."""


def examine(base_url: str | None = None) -> list[Finding]:
    """Run the checks, and return their findings. A check may have none, or be left out after a failure.

    Args:
        base_url: the server; None: `TINKER_BASE_URL`, else the hosted service.
    """
    findings = [_versions(), _extras(), *_variables()]
    try:
        settings = Settings.resolve(base_url=base_url, max_retries=0)
    except TinkerError as error:
        advice = "correct the argument, the variable or the file that the text names"
        return [*findings, Finding("settings", "failure", str(error), advice)]
    findings += [_address(settings, base_url), _key(settings), *_key_file()]
    http = Http(settings, KeyRing(settings))
    try:
        http.start_server()  # an embedded server does not listen before this call
        findings += _way(http)
        reply, reached = _reached(http)
        findings += [reached, _clocks(reply), _accepted(settings, reply)]
        findings += _ignored(http, settings, reply)
    except (SendFailed, TinkerError) as error:
        advice = "tinker-sync serve shows why it does not start"
        findings.append(Finding("server", "failure", str(error), advice))
    finally:
        http.close()
    return findings


# ------------------------------------------------------------------------------------------ this machine


def _versions() -> Finding:
    found = ", ".join(f"{name} {_installed(name)}" for name in _NEEDED)
    what = f"tinker-sync {__version__}, Python {platform.python_version()}, {found}"
    missing = [name for name in _NEEDED if _installed(name) == "missing"]
    if missing:
        return Finding("versions", "failure", what, f"pip install {' '.join(missing)}")
    return Finding("versions", "ok", what)


def _installed(name: str) -> str:
    try:
        return metadata.version(name.partition("[")[0])
    except metadata.PackageNotFoundError:
        return "missing"


def _extras() -> Finding:
    missing = {
        extra: lacking
        for extra, names in EXTRAS.items()
        if (lacking := [name for name in names if _installed(name) == "missing"])
    }
    if not missing:
        return Finding("extras", "ok", "all are installed")
    listed = "; ".join(f"{extra}: pip install {pip_names(names)}" for extra, names in missing.items())
    return Finding(
        "extras", "ok", f"not installed: {', '.join(missing)}", f"install those that you need: {listed}"
    )


def _variables() -> Iterator[Finding]:
    unknown = sorted(name for name in os.environ if name.startswith("TINKER_") and name not in VARIABLES)
    if unknown:
        advice = f"the known variables are {', '.join(sorted(VARIABLES))}"
        yield Finding("variables", "warning", f"unknown, without effect: {', '.join(unknown)}", advice)


# ------------------------------------------------------------------------------------------ settings


def _address(settings: Settings, argument: str | None) -> Finding:
    origin = "the argument" if argument else "TINKER_BASE_URL" if os.environ.get("TINKER_BASE_URL") else ""
    what = f"{settings.base_url} ({origin or 'the default'})"
    parts = urlsplit(settings.base_url)
    local = parts.hostname in ("localhost", "127.0.0.1", "::1")
    if parts.scheme == "http" and not local:
        return Finding("address", "warning", what, "others on the network can read the key: use https")
    if settings.base_url != DEFAULT_BASE_URL and parts.path.rstrip("/").endswith("/api/v1"):
        return Finding("address", "warning", what, "leave out /api/v1; the client adds it to every address")
    return Finding("address", "ok", what)


def _key(settings: Settings) -> Finding:
    try:
        what = describe_key_source(base_url=settings.base_url)
    except TinkerError as error:
        return Finding("key", "failure", str(error), "store a key: tinker-sync auth login")
    if what is None:
        state: State = "failure" if settings.is_vendor_host else "warning"
        advice = "set TINKER_API_KEY, if the server checks keys"
        if settings.is_vendor_host:
            advice = "run tinker-sync auth login, or set TINKER_API_KEY"
        return Finding("key", state, "there is none", advice)
    ignored = [name for name in _KEY_VARIABLES if os.environ.get(name) and name != what[5:]]
    if ignored:
        what += f"; {' and '.join(ignored)} {'is' if len(ignored) == 1 else 'are'} not used"
        return Finding("key", "warning", what, "unset what is not used, or pass api_key to use another key")
    return Finding("key", "ok", what)


def _key_file() -> Iterator[Finding]:
    path = CredentialsFile().path
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return
    if os.name == "posix" and mode & 0o077:
        yield Finding("key file", "warning", f"other users can read {path} ({mode:o})", f"chmod 600 {path}")


# ------------------------------------------------------------------------------------------ the connection


def _way(http: Http) -> Iterator[Finding]:
    """Name the proxy; without one, resolve the name of the server and connect to it."""
    try:
        route = http.route()
    except TinkerError as error:
        advice = "correct what the text names; REQUESTS_CA_BUNDLE=FILE sets the trusted certificates"
        yield Finding("connection", "failure", str(error), advice)
        return
    yield _proxy(route)
    host = route.origin.host
    if route.proxy is not None:
        yield Finding("name", "skipped", "the proxy resolves it")
        return
    try:
        addresses = socket.getaddrinfo(host, route.origin.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: an empty or too long part of the name
        advice = "check the address for typing errors, and your network"
        yield Finding("name", "failure", f"{host} cannot be resolved: {error}", advice)
        return
    shown = ", ".join(dict.fromkeys(str(address[4][0]) for address in addresses))
    yield Finding("name", "ok", f"{host} is {shown}")
    yield _connection(route)


def _proxy(route: Route) -> Finding:
    host = route.origin.host
    if route.proxy is None:
        return Finding("proxy", "ok", "none for this server")
    if host in ("localhost", "127.0.0.1", "::1"):
        advice = f"this server is on your own machine: set NO_PROXY={host}"
        return Finding("proxy", "warning", str(route.proxy), advice)
    return Finding("proxy", "ok", str(route.proxy), "it sees all traffic that is not https")


def _connection(route: Route) -> Finding:
    began = SYSTEM_CLOCK.now()
    try:
        connection = connect(route, _CONNECT_S)
    except ConnectFailed as error:
        advice = (
            "check that the server runs and that no firewall is in the way; TINKER_BASE_URL sets the address"
        )
        if isinstance(error.__cause__, ssl.SSLCertVerificationError):
            advice = (
                "the clock may be wrong, or a company's proxy has its own authority: REQUESTS_CA_BUNDLE=FILE"
            )
        return Finding("connection", "failure", str(error), advice)
    tls = f"{connection.sock.version()}, " if isinstance(connection.sock, ssl.SSLSocket) else ""
    connection.close()
    what = f"port {route.origin.port}, {tls}{(SYSTEM_CLOCK.now() - began) * 1000:.0f} ms"
    return Finding("connection", "ok", what)


def _reached(http: Http) -> tuple[Reply | None, Finding]:
    call = Call(
        method="GET", path="/api/v1/healthz", credential="none", read_s=_REACH_S, deadline_s=2 * _REACH_S
    )
    began = SYSTEM_CLOCK.now()
    try:
        reply = http.send(call)
    except (SendFailed, TinkerError) as error:
        advice = "fix the failures above; otherwise try again, and check the proxy"
        return None, Finding("server", "failure", f"no answer: {error}", advice)
    what = f"it answered ({reply.status}) in {(SYSTEM_CLOCK.now() - began) * 1000:.0f} ms"
    if reply.status >= 500:
        advice = "the server has a problem: try again later"
        return reply, Finding("server", "failure", what, advice)
    return reply, Finding("server", "ok", what)


def _clocks(reply: Reply | None) -> Finding:
    if reply is None:
        return Finding("clock", "skipped", "the server cannot be reached")
    there = http_date(reply.headers.get("date"))
    if there is None:
        return Finding("clock", "skipped", "the server does not send its time")
    apart_s = SYSTEM_CLOCK.time() - there.timestamp()
    if abs(apart_s) <= _SKEW_S:
        return Finding("clock", "ok", "as the server's")
    what = f"{abs(apart_s):.0f} s {'ahead of' if apart_s > 0 else 'behind'} the server's"
    advice = "tokens may seem expired, or certificates not yet valid: set the clock of this machine"
    return Finding("clock", "warning", what, advice)


def _accepted(settings: Settings, reply: Reply | None) -> Finding:
    if reply is None:
        return Finding("access", "skipped", "the server cannot be reached")
    try:
        raise_if_tinker_not_accessible(base_url=settings.base_url)
    except TinkerError as error:
        advice = "tinker-sync auth login stores another key; billing is set up in the console"
        return Finding("access", "failure", str(error), advice)
    has_key = tinker_has_credentials(base_url=settings.base_url)
    return Finding("access", "ok", f"the server {'accepts the key' if has_key else 'answers without a key'}")


def _ignored(http: Http, settings: Settings, reply: Reply | None) -> Iterator[Finding]:
    """Report the fields of requests that an embedded server has ignored; other servers do not list them."""
    if reply is None or reply.status >= 400 or settings.is_vendor_host:
        return
    try:
        answer = http.send(Call(method="GET", path="/api/v1/healthz", read_s=_REACH_S, deadline_s=_REACH_S))
        tree = wire_json.loads(answer.body)
    except (SendFailed, TinkerError):
        return  # an earlier finding names the reason
    ignored = tree.get("ignored_fields") if isinstance(tree, dict) else None
    if ignored and isinstance(ignored, list):
        names = ", ".join(map(str, ignored))
        what = f"this server ignored fields of requests that it does not know: {names}"
        advice = "update tinker-sync where the server runs if their effect matters"
        yield Finding("fields", "warning", what, advice)
