"""Every call of the clients works on the embedded server, also with fields that it does not know."""

from __future__ import annotations

import json
import logging
import random
import warnings
from pathlib import Path

import attrs
import pytest
from interop.acceptance_script import Computed
from support.embedded import KEY, running
from support.newer_fields import newer_json, newer_protobuf

from tinker_sync._base.clock import paced
from tinker_sync.local.server.http import Answer, Application, Request


@pytest.fixture(autouse=True)
def _deprecated_calls_too() -> None:
    warnings.simplefilter("ignore", FutureWarning)


def test_as_it_is(tmp_path: Path) -> None:
    with running(tmp_path, seed=1, pjwt_auth_enabled=True, fwdbwd_max_chunk_len=16) as server:
        results = dict(Computed("tinker_sync", server.url, KEY).run())
    assert len(results) > 70
    assert results["losses"][-1] < 0.5 * results["losses"][0]


def test_as_an_older_server_of_json_only(tmp_path: Path) -> None:
    with running(tmp_path, seed=1, json_only=True) as server, paced(0.01):
        results = dict(Computed("tinker_sync", server.url, KEY, newer=False).run())
    assert len(results) > 40
    assert results["losses"][-1] < 0.5 * results["losses"][0]


class Newer(Application):
    """An application that adds fields of a newer client to each request of another application."""

    def __init__(self, app: Application) -> None:
        self._app, self._rng = app, random.Random(1)
        self.max_body_bytes, self.keeps_body = app.max_body_bytes, app.keeps_body  # type: ignore[method-assign]
        self.startup, self.shutdown = app.startup, app.shutdown  # type: ignore[method-assign]

    async def __call__(self, request: Request) -> Answer:
        body = request.body
        if body and request.headers.get("content-type", "").startswith("application/json"):
            body = json.dumps(newer_json(self._rng, json.loads(body))).encode()
        elif body:
            body = newer_protobuf(self._rng, body)
        return await self._app(attrs.evolve(request, body=body))


def test_fields_of_a_newer_client_change_no_result(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for name, around in (("plain", lambda app: app), ("newer", Newer)):
        with running(tmp_path / name, seed=1, pjwt_auth_enabled=True, around=around) as server:
            found.append(Computed("tinker_sync", server.url, KEY).run())
            ignored = server.get("/healthz").json().get("ignored_fields", [])
        assert (len(ignored) > 20) is (name == "newer")
    assert found[0] == found[1]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
