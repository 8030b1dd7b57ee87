"""Fixtures: a stub server with runs and checkpoints, and a runner of command lines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.cli_runs import Run, fixed_now, runner
from support.cli_world import KEY, NOW, World
from support.tinker_stub import StubServer


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("TINKER_PACE", "0.01")
    fixed_now(monkeypatch, NOW)
    return runner(capsys, monkeypatch)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with StubServer(World()) as stub:
        monkeypatch.setenv("TINKER_BASE_URL", stub.url)  # type: ignore[attr-defined]
        monkeypatch.setenv("TINKER_API_KEY", KEY)
        assert isinstance(stub, World)
        yield stub
