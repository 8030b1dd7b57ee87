"""Seven scripts give the same numbers with either client; only their import differs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from interop.programs import Programs

from tinker_sync.testing import FaultPlan, LocalServer, faults

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("public_shapes.py")
THEIRS, OURS = "\nimport tinker\n", "\nimport tinker_sync as tinker\n"
SHAPES = (
    "pipelined", "thread_pool", "timeouts", "client_in_each_thread", "clients_as_futures", "subclassed",
    "async_loop",
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
    assert len(flat(ours[shape])) == len(flat(theirs[shape])) > 0
    for one, other in zip(flat(ours[shape]), flat(theirs[shape]), strict=True):
        # The server computes samples together; their last digits depend on the other samples under way.
        assert one == (pytest.approx(other, rel=1e-4, abs=1e-4) if isinstance(other, float) else other)


def test_pipelining_and_awaiting_give_the_same_losses(found: Any) -> None:
    for one in found:
        first, second = one["pipelined"][:2]
        assert second < first
        assert one["async_loop"][0] == pytest.approx([first, second], rel=1e-6)


def run(programs: Programs, server: LocalServer) -> object:
    """Train, and sample from the trained model. The server is named by the environment alone."""
    environment = os.environ | server.environment()
    shapes = ("pipelined", "async_loop")
    made: object = programs.results("tinker", SCRIPT, "", "", *shapes, environment=environment)
    return made


def test_its_training_among_faults_is_its_training_without(programs: Programs) -> None:
    with LocalServer() as server:
        quiet = run(programs, server)
        assert len(server.calls_to("optim_step")) == 5
        assert {call.headers["x-api-key"] for call in server.calls} == {"***"}
        sent = server.calls_to("forward_backward")[0].request.forward_backward_input
        assert sent.loss_fn == "cross_entropy"
    plan = (
        FaultPlan()
        .on("create_model", faults.too_many_requests(0.1), nth=1)
        .on("forward_backward", faults.lost_answer(), nth=2)
        .on("optim_step", faults.status(503, retry_after=0.1), nth=1)
        .on("asample", faults.too_many_requests(), nth=1)
        .on("retrieve_future", faults.queue_paused(reason="busy"), nth=2)
        .on("retrieve_future", faults.status(500), nth=3)
    )
    with LocalServer(plan) as server:
        assert run(programs, server) == quiet
        assert server.pending_faults == ()
