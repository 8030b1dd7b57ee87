"""`attempts`: a loop goes on after a loss at the server, within bounds, and catches no other error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.embedded import BASE, KEY, running
from support.hasty import quick_service

import tinker_sync
from tinker_sync import Datum, InvalidInputError, ModelInput
from tinker_sync.loop import CorruptedRunError, attempts
from tinker_sync.testing import FaultPlan, LocalServer, faults

MODEL = "tinker-sync/random"
STEPS = 6
Meddle = Callable[[int], None]


def train(
    connect: Callable[[], tinker_sync.ServiceClient],
    directory: Path,
    meddle: Meddle = lambda step: None,
    *,
    model: str = MODEL,
    **options: Any,
) -> tuple[list[int], list[float]]:
    """Run a loop; return the first step of each attempt, and the losses by step.

    `meddle` is called with the number of a step before that step.
    """
    begun: list[int] = []
    losses = [0.0] * STEPS
    for attempt in attempts(connect, directory, every=2, **options):
        with attempt as (service, saves):
            training, first = saves.resume() or (
                service.create_lora_training_client(model, rank=4, seed=1),
                0,
            )
            begun.append(first)
            for step in range(first, STEPS):
                meddle(step)
                datum = Datum(ModelInput.from_ints([step + 1, 2]), {"target_tokens": [2, 3]})
                passed = training.forward_backward([datum], "cross_entropy")
                training.optim_step(tinker_sync.AdamParams(learning_rate=1e-2)).result()
                losses[step] = passed.result().metrics["loss:sum"]
                saves.after_step(training, step, score=losses[step])
    return begun, losses


class Meddler:
    """Calls a function before chosen steps, each time once."""

    def __init__(self, meddle: Callable[[], None], *steps: int) -> None:
        self._meddle, self._steps = meddle, list(steps)

    def __call__(self, step: int) -> None:
        if step in self._steps:
            self._steps.remove(step)
            self._meddle()


def connect_to(server: LocalServer) -> Callable[[], tinker_sync.ServiceClient]:
    def connect() -> tinker_sync.ServiceClient:
        return quick_service(base_url=server.service().get_console_url(), api_key=server.key)

    return connect


def expire(server: LocalServer) -> Callable[[], None]:
    def plan() -> None:
        server.plan = FaultPlan().on("optim_step", faults.session_expired(), nth=1)

    return plan


def fail(server: LocalServer, count: int) -> Callable[[], None]:
    def plan() -> None:
        failed = faults.promise_failed("the machine is gone")
        server.plan = FaultPlan().on("retrieve_future", failed, nth=range(1, count + 1))

    return plan


@pytest.mark.parametrize("loss", ["session", "model"])
def test_a_loop_ends_as_if_nothing_had_happened(
    loss: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LocalServer(model=MODEL, seed=3) as server:
        begun, expected = train(connect_to(server), tmp_path / "undisturbed")
        assert begun == [0]
        meddle = server.restart if loss == "model" else expire(server)
        begun, losses = train(connect_to(server), tmp_path / "disturbed", Meddler(meddle, 1, 5))
        assert begun == [0, 0, 4]
        assert losses == expected
        assert caplog.text.count("the loop starts again (1 of 3)") == 2
        assert "from its beginning" in caplog.text


def test_the_number_of_restarts_without_a_save_is_bounded(tmp_path: Path) -> None:
    made: list[int] = []
    with LocalServer(model=MODEL) as server:
        connect = connect_to(server)

        def count() -> tinker_sync.ServiceClient:
            made.append(1)
            return connect()

        server.plan = FaultPlan().on("create_model", faults.status(410))
        with pytest.raises(tinker_sync.APIStatusError, match="410"):
            train(count, tmp_path, restarts=2)
        assert len(made) == 3
        with pytest.raises(tinker_sync.APIStatusError, match="410"):
            train(count, tmp_path, restarts=0)
        assert len(made) == 4


def test_a_save_renews_the_bound(tmp_path: Path) -> None:
    with LocalServer(model=MODEL) as server:
        begun, _ = train(connect_to(server), tmp_path, Meddler(expire(server), 1, 3, 5), restarts=1)
        assert begun == [0, 0, 2, 4]
        with pytest.raises(tinker_sync.TinkerError):
            train(connect_to(server), tmp_path / "b", Meddler(expire(server), 1, 1), restarts=1)


def test_a_failure_of_the_server_is_mended_and_one_of_the_user_is_not(tmp_path: Path) -> None:
    with LocalServer(model=MODEL) as server:
        begun, _ = train(connect_to(server), tmp_path / "a", Meddler(fail(server, 1), 3))
        assert begun == [0, 2]
        user = faults.promise_failed("no such loss", category="user")

        def plan() -> None:
            server.plan = FaultPlan().on("retrieve_future", user, nth=1)

        with pytest.raises(tinker_sync.RequestFailedError, match="no such loss"):
            train(connect_to(server), tmp_path / "b", Meddler(plan, 3))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, InvalidInputError])
def test_other_errors_leave_the_loop_at_once(tmp_path: Path, error: type[BaseException]) -> None:
    def meddle() -> None:
        raise error("mine")

    with LocalServer(model=MODEL) as server:
        with pytest.raises(error, match="mine"):
            train(connect_to(server), tmp_path, Meddler(meddle, 1, 1))
        assert len(server.calls_to("create_session")) == 1
        assert len(server.calls_to("finish_session")) == 1


def test_a_corrupted_run_is_left_for_the_last_good_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(tmp_path / "server", seed=3) as server:

        def connect() -> tinker_sync.ServiceClient:
            return quick_service(base_url=server.url, api_key=KEY)

        def damage() -> None:
            with connect() as service:
                runs = list(service.create_rest_client().iter_training_runs())
            latest = max(runs, key=lambda run: run.last_request_time)
            server.store.set_run_corrupted(latest.training_run_id)

        _, expected = train(connect, tmp_path / "undisturbed", model=BASE)
        begun, losses = train(connect, tmp_path / "disturbed", Meddler(damage, 3), model=BASE)
        assert begun == [0, 2]
        assert losses == expected
        assert "CorruptedRunError" in caplog.text
        with connect() as service:
            saves = service.checkpoints(tmp_path / "third", every=1)
            training = service.create_lora_training_client(BASE, rank=4)
            saves.save(training, 0)
            server.store.set_run_corrupted(training.model_id)
            with pytest.raises(CorruptedRunError, match=f"{training.model_id} is corrupted; .*step-0"):
                saves.save(training, 1)
            assert [each.step for each in saves.kept] == [0]
            listed = service.create_rest_client().list_checkpoints(training.model_id).result().checkpoints
            assert [each.checkpoint_id for each in listed] == ["weights/step-0"]


def test_a_path_that_does_not_exist_is_no_loss(tmp_path: Path) -> None:
    with LocalServer(model=MODEL) as server:

        def ask() -> None:
            with connect_to(server)() as service:
                service.create_rest_client().get_training_run("no-such-run").result()

        with pytest.raises(tinker_sync.NotFoundError):
            train(connect_to(server), tmp_path, Meddler(ask, 3, 3))


def test_wrong_uses_are_refused(tmp_path: Path) -> None:
    for restarts in (-1, 1.5, "3"):
        with pytest.raises(InvalidInputError, match="restarts: expected 0 or more"):
            attempts(tinker_sync.ServiceClient, tmp_path, restarts=restarts)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="with attempt as"):
        for _ in attempts(tinker_sync.ServiceClient, tmp_path):
            pass
