"""The calls and features of servers, harmless requests, and answers that are not conclusive."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from support import open_servers
from support.tinker_stub import _POSTS, Answer, Asked, Stub, StubServer

from tinker_sync.insight import ProbeReport, probe
from tinker_sync.testing import LocalServer
from tinker_sync.wire.endpoints import ENDPOINTS, find


@pytest.fixture
def stub() -> Iterator[Stub]:
    with StubServer() as stub:
        yield stub


def there(report: ProbeReport) -> dict[str, str]:
    return {call.name: call.there for call in report.calls}


@pytest.mark.parametrize("json_only", [False, True])
def test_the_embedded_server(json_only: bool) -> None:
    with LocalServer(model="tinker-sync/random", json_only=json_only) as server:
        report = probe(server.url, api_key=server.key)
        asked = {call.endpoint for call in server.calls}
    assert report.bodies == ("json" if json_only else "protobuf")
    assert report.client_config is not json_only
    assert report.version == ("0.17" if json_only else "0.38")
    found = there(report)
    # A GET request to the paths of these two calls is another call, so the probe does not send it.
    hidden = {"search_sessions", "revoke_api_key"}
    for call in report.calls:
        if call.name in hidden:
            assert call.there == "unknown"
        elif not call.legacy:
            assert (call.there == "yes") == call.expected, call
    assert found["asample"] == "yes"
    assert all(feature.known is not json_only for feature in report.features)
    assert not asked & {"create_session", "create_model", "telemetry", "optim_step"}


def test_a_probe_sends_only_harmless_requests(stub: Stub) -> None:
    probe(stub.url, api_key="tml-probe")  # type: ignore[attr-defined]
    methods = {(asked.method, asked.path.removeprefix("/api/v1")) for asked in stub.log}
    posts = {path for method, path in methods if method != "GET"}
    assert posts == {"/client/config", "/client/dynamic_config"}
    for _, path in methods - {("POST", path) for path in posts}:
        hit = find("GET", f"/api/v1{path}")
        # All ids in the requests are "probe", so the probe reads no existing thing.
        assert hit is None or not hit[1] or set(hit[1].values()) == {"probe"}
    assert len(methods) > 40


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("kind", open_servers.ALL, ids=lambda kind: kind.name)
def test_open_servers_have_no_calls_they_lack(kind: type[open_servers.OpenServer], published: bool) -> None:
    with StubServer(kind()) as stub:
        stub.publishes = published
        found = there(probe(stub.url, api_key="tml-open"))  # type: ignore[attr-defined]
    routes = {(method, re.sub(r"{[^}]*}", "{}", path)) for method, path in kind.routes}
    for row in ENDPOINTS.values():
        name = row.path.text.removeprefix("/api/v1")
        if row.name == "client_config" or name in ("/healthz", "/get_server_capabilities"):
            continue
        posted = row.method == "POST" and name in set(_POSTS) - stub.missing()
        has = posted or (row.method, re.sub(r"{[^}]*}", "{}", name)) in routes
        expected = {"yes" if has else "no"} | (set() if published else {"unknown"})
        assert found[row.name] in expected, row.name


def test_equal_answers_are_not_conclusive(stub: Stub) -> None:
    def alike(asked: Asked) -> Answer | None:
        return Answer(403, {"detail": "not for you"}) if asked.method == "GET" else None

    stub.script("*", *[alike] * 200)
    found = there(probe(stub.url, api_key="tml-probe"))  # type: ignore[attr-defined]
    assert set(found) == set(ENDPOINTS)
    assert {name for name, answer in found.items() if answer != "unknown"} == {"client_config"}
