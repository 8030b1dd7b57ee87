"""Every call of the clients works on the embedded server, and training lowers the loss."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from interop.acceptance_script import Computed
from support.embedded import KEY, running

from tinker_sync._base.clock import paced


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
