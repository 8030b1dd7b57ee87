"""One script in four styles gives the same numbers, with either client, on the embedded server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.embedded import KEY, running

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("styles_script.py")
STYLES = ("values", "results", "awaits", "threads")
PATIENCE_S = 240.0


def numbers(package: str, directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the findings of a package in each style, on a server of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    settings = {"PYTHONPATH": str(ROOT), "TINKER_TELEMETRY": "0"}
    with running(directory, seed=1) as server:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), package, server.url, KEY, *STYLES],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env={**kept, **settings},
            check=False,
        )
    assert done.returncode == 0, f"{package} failed:\n{done.stderr[-4000:]}"
    found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return numbers("tinker_sync", tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return numbers("tinker", tmp_path_factory.mktemp("theirs"))


@pytest.mark.parametrize("style", STYLES)
def test_each_style_gives_the_numbers_of_the_first(
    style: str, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    for found in (ours[style], theirs[style]):
        for one, first in zip(found, ours["values"], strict=True):
            assert (one["losses"], one["tokens"]) == (first["losses"], first["tokens"])
            # The server computes samples of several models together; their last digit depends on the company.
            assert one["logprobs"][1:] == pytest.approx(first["logprobs"][1:], rel=1e-6)


def test_the_numbers_are_those_of_training(ours: dict[str, Any]) -> None:
    for found in ours["values"]:
        first, second = found["losses"]
        assert second < first
        assert found["tokens"]
        assert found["logprobs"][0] is None
