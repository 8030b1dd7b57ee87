"""The reference client finds a `LocalServer` by its environment, is recorded by it, and meets its faults.

That client runs in a process of its own, as the program of a user would. Its pauses are real, so the plan is
short.
"""

from __future__ import annotations

import os
from pathlib import Path

from interop.programs import Programs

from tinker_sync.testing import FaultPlan, LocalServer, faults

SCRIPT = Path(__file__).with_name("public_shapes.py")


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
