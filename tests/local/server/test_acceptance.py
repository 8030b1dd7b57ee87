"""Every call of the clients works on the embedded server, and training lowers the loss."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from support.acceptance import Acceptance
from support.embedded import KEY, running

from tinker_sync.config.settings import paced


@pytest.fixture(autouse=True)
def _deprecated_calls_too() -> None:
    warnings.simplefilter("ignore", FutureWarning)


def test_as_it_is(tmp_path: Path) -> None:
    with running(tmp_path, seed=1, pjwt_auth_enabled=True, fwdbwd_max_chunk_len=16) as server:
        results = dict(Acceptance("tinker_sync", server.url, KEY).run())
    assert len(results) > 90
    assert results["losses"][-1] < 0.5 * results["losses"][0]


def test_as_an_older_server_of_json_only(tmp_path: Path) -> None:
    with running(tmp_path, seed=1, json_only=True) as server, paced(0.01):
        results = dict(Acceptance("tinker_sync", server.url, KEY, newer=False).run())
    assert len(results) > 50
    assert results["losses"][-1] < 0.5 * results["losses"][0]


def test_equal_seeds_give_equal_numbers(tmp_path: Path) -> None:
    def numbers(name: str) -> object:
        with running(tmp_path / name, seed=5) as server:
            session = server.session()
            model = server.model(session, lora_config={"rank": 2})  # the seed is the server's
            server.pass_(model, 1)
            loss = server.passed(model, 2).metrics
            server.sampler(session)
            return (
                session,
                loss,
                server.sampled(f"{session}:sample:0", 0, params={"max_tokens": 20})["sequences"][0]["tokens"],
            )

    assert numbers("one") == numbers("two")
