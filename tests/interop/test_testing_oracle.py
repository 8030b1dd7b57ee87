"""The reference client finds a `LocalServer` by its environment, is recorded by it, and meets its faults.

That client runs in a process of its own, as the program of a user would. Its pauses are real, so the plan is
short.
"""

from __future__ import annotations

import os

import pytest
from interop.programs import Programs

from tinker_sync.testing import FaultPlan, LocalServer, faults

MODEL = "tinker-sync/random"

PROGRAM = """
import json
import os
import tinker
from tinker import types

def train():
    service = tinker.ServiceClient()
    training = service.create_lora_training_client("tinker-sync/random", rank=4, seed=1)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=[2, 3, 4], dtype="int64", shape=[3]),
            "weights": types.TensorData(data=[1.0, 1.0, 0.5], dtype="float32", shape=[3]),
        },
    )
    losses = []
    for _ in range(3):
        passed = training.forward_backward([datum], "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    sampling = training.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=4, seed=1)
    sample = sampling.sample(types.ModelInput.from_ints([1, 2]), 1, params).result()
    service.close("success")
    return [losses, sample.sequences[0].tokens]

print(json.dumps(train()), flush=True)
os._exit(0)  # its threads may take the process down on its way out
"""


def run(programs: Programs, server: LocalServer) -> object:
    made: object = programs.results("tinker", PROGRAM, environment=os.environ | server.environment())
    return made


@pytest.fixture(scope="module")
def quiet(programs: Programs) -> object:
    with LocalServer(model=MODEL) as server:
        outcome = run(programs, server)
        assert len(server.calls_to("optim_step")) == 3
        assert {call.headers["x-api-key"] for call in server.calls} == {"***"}
        assert (
            server.calls_to("forward_backward")[0].request.forward_backward_input.loss_fn == "cross_entropy"
        )
        return outcome


def test_its_training_among_faults_is_its_training_without(programs: Programs, quiet: object) -> None:
    plan = (
        FaultPlan()
        .on("create_model", faults.too_many_requests(0.1), nth=1)
        .on("forward_backward", faults.lost_answer(), nth=2)
        .on("optim_step", faults.status(503, retry_after=0.1), nth=1)
        .on("asample", faults.too_many_requests(), nth=1)
        .on("retrieve_future", faults.queue_paused(reason="busy"), nth=2)
        .on("retrieve_future", faults.status(500), nth=3)
    )
    with LocalServer(plan, model=MODEL) as server:
        assert run(programs, server) == quiet
        assert server.pending_faults == ()


def test_our_client_computes_the_same(quiet: object) -> None:
    import tinker_sync

    with LocalServer(model=MODEL) as server, server.service() as service:
        training = service.create_lora_training_client(MODEL, rank=4, seed=1)
        datum = tinker_sync.Datum(
            tinker_sync.ModelInput.from_ints([1, 2, 3]),
            {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 0.5]},
        )
        losses = []
        for _ in range(3):
            losses.append(training.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"])
            training.optim_step(tinker_sync.AdamParams(learning_rate=1e-2)).result()
        sampling = training.save_weights_and_get_sampling_client()
        params = tinker_sync.SamplingParams(max_tokens=4, seed=1)
        sample = sampling.sample(tinker_sync.ModelInput.from_ints([1, 2]), 1, params).result()
        assert [losses, sample.sequences[0].tokens] == quiet
