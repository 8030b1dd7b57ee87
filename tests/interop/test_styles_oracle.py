"""One script in four styles gives the same numbers, with either client, on the embedded server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from interop.programs import Programs
from support.embedded import KEY, running

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("styles_script.py")
STYLES = ("values", "results", "awaits", "threads")


def numbers(programs: Programs, package: str, directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the numbers of a package in each style, on a new server."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    settings = {"PYTHONPATH": str(ROOT), "TINKER_TELEMETRY": "0"}
    with running(directory, seed=1) as server:
        command = [package, server.url, KEY, *STYLES]
        found: dict[str, list[dict[str, Any]]]
        found = programs.results(package, SCRIPT, *command, environment={**kept, **settings})
    return found


@pytest.fixture(scope="module")
def ours(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return numbers(programs, "tinker_sync", tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return numbers(programs, "tinker", tmp_path_factory.mktemp("theirs"))


@pytest.mark.parametrize("style", STYLES)
def test_each_style_gives_the_numbers_of_the_first(
    style: str, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    for found in (ours[style], theirs[style]):
        for one, first in zip(found, ours["values"], strict=True):
            assert (one["losses"], one["tokens"]) == (first["losses"], first["tokens"])
            # The server computes samples together; their last digit depends on the other samples under way.
            assert one["logprobs"][1:] == pytest.approx(first["logprobs"][1:], rel=1e-6)


def test_the_numbers_are_those_of_training(ours: dict[str, Any]) -> None:
    for found in ours["values"]:
        first, second = found["losses"]
        assert second < first
        assert found["tokens"]
        assert found["logprobs"][0] is None
