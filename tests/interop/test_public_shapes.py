"""Twelve scripts give the same numbers with either client; only their import differs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from interop.programs import Programs

from tinker_sync.testing import LocalServer

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("public_shapes.py")
THEIRS, OURS = "\nimport tinker\n", "\nimport tinker_sync as tinker\n"
SHAPES = (
    "pipelined", "waits_each_time", "thread_pool", "timeouts", "client_in_each_thread", "evaluation",
    "preferences", "group_rewards", "resume", "clients_as_futures", "subclassed", "async_loop",
)  # fmt: skip


def numbers(programs: Programs, directory: Path, *, ours: bool) -> dict[str, Any]:
    """Run the scripts with one of the clients on a new server, and return the numbers."""
    text = SCRIPT.read_text(encoding="utf-8")
    assert text.count(THEIRS) == 1
    script = directory / "script.py"
    script.write_text(text.replace(THEIRS, OURS) if ours else text, encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    with LocalServer() as server:
        environment = {**kept, "PYTHONPATH": str(ROOT), "TINKER_TELEMETRY": "0"}
        package = "tinker_sync" if ours else "tinker"
        found: dict[str, Any]
        found = programs.results(package, script, server.url, server.key, environment=environment)
    return found


@pytest.fixture(scope="module")
def found(
    programs: Programs, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Any]]:
    return (
        numbers(programs, tmp_path_factory.mktemp("ours"), ours=True),
        numbers(programs, tmp_path_factory.mktemp("theirs"), ours=False),
    )


def flat(tree: Any) -> list[Any]:
    return [leaf for each in tree for leaf in flat(each)] if isinstance(tree, list) else [tree]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_gives_the_same_numbers_with_either_client(shape: str, found: Any) -> None:
    ours, theirs = found
    if str(theirs[shape]).startswith("skipped"):
        pytest.skip(f"{shape} needs torch")
    assert len(flat(ours[shape])) == len(flat(theirs[shape])) > 0
    for one, other in zip(flat(ours[shape]), flat(theirs[shape]), strict=True):
        # The server computes samples together; their last digits depend on the other samples under way.
        assert one == (pytest.approx(other, rel=1e-4, abs=1e-4) if isinstance(other, float) else other)


def test_waiting_pipelining_and_awaiting_give_the_same_losses(found: Any) -> None:
    for one in found:
        first, second = one["pipelined"][:2]
        assert second < first
        assert one["waits_each_time"] == pytest.approx([first, second], rel=1e-6)
        assert one["async_loop"][0] == pytest.approx([first, second], rel=1e-6)


def test_resuming_goes_on_as_if_nothing_had_happened(found: Any) -> None:
    for one in found:
        went_on, resumed = one["resume"]
        assert went_on == pytest.approx(resumed, rel=1e-6)
