"""Clients with a journal: scripts that are started again, and programs that attach."""

from __future__ import annotations

import gc
import logging
import math
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.crowd import until
from support.engine_ledger import Ledger, datum_of, engine_ledger, step_of

import tinker_sync
from tinker_sync import types
from tinker_sync.errors import JournalError
from tinker_sync.journal.file import JournalFile, Sent
from tinker_sync.journal.record import TrainingRecord
from tinker_sync.runtime.training_calls import OrderedCall
from tinker_sync.testing import FaultPlan, LocalServer, faults

MODEL = "tinker-sync/random"
PATIENCE_S = 120.0


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with engine_ledger() as made:
        yield made


@pytest.fixture
def server(ledger: Ledger) -> Iterator[LocalServer]:
    with LocalServer(model=MODEL, fwdbwd_max_chunk_len=2) as made:
        yield made


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "run.journal"


def die(service: tinker_sync.ServiceClient) -> None:
    """Stop the client as if its process had died: it waits for no call and does not end its session."""
    service.holder.lifecycle.shut()


def open_training(service: tinker_sync.ServiceClient) -> tinker_sync.TrainingClient:
    return service.create_lora_training_client(MODEL, rank=4, seed=1)


def applied(ledger: Ledger) -> list[tuple[Any, ...]]:
    """Return the marks of each piece of the engine's work, in order for each run, one run after the other."""
    return [one.marks for run in ledger.with_marks(range(100)) for one in run]


def test_a_script_that_is_started_again_goes_on(
    server: LocalServer, journal: Path, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    def script(service: tinker_sync.ServiceClient, until: int) -> list[Any]:
        training = open_training(service)
        ended = []
        for mark in range(1, until):
            passed = training.forward_backward([datum_of(10 * mark + n) for n in range(3)], "cross_entropy")
            ended += [passed.result(PATIENCE_S), training.optim_step(step_of(mark)).result(PATIENCE_S)]
        return ended

    first = server.service(journal=journal)
    before = script(first, 3)
    die(first)
    server.forget()
    with server.service(journal=journal) as service:
        after = script(service, 4)
    assert [str(one) for one in after[:4]] == [str(one) for one in before]
    assert applied(ledger) == [(10, 11), (12,), (1,), (20, 21), (22,), (2,), (30, 31), (32,), (3,)]
    assert len(server.calls_to("optim_step")) == 1
    assert "training goes on in session" in caplog.text
    assert server.calls_to("create_session") == server.calls_to("create_model") == []


def test_a_journal_holds_no_secret_and_no_data(server: LocalServer, journal: Path) -> None:
    with server.service(journal=journal) as service:
        training = open_training(service)
        training.forward_backward([datum_of(77)], "cross_entropy").result(PATIENCE_S)
        training.save_state("named").result(PATIENCE_S)
    text = journal.read_text()
    assert server.key not in text
    assert "tokens" not in text
    assert re.findall(r'"path":"([^"]+)"', text) == [f"tinker://{training.model_id}/weights/named"]


def test_another_call_than_before_is_refused_and_not_sent(server: LocalServer, journal: Path) -> None:
    first = server.service(journal=journal)
    open_training(first).optim_step(step_of(1)).result(PATIENCE_S)
    die(first)
    server.forget()
    with server.service(journal=journal) as service:
        with pytest.raises(JournalError, match=r"optim_step \(number 1\) is not the optim_step"):
            open_training(service).optim_step(step_of(2)).result(PATIENCE_S)
        with pytest.raises(JournalError, match="made with other arguments"):
            service_of_another_rank(server, journal, service)
    assert server.calls_to("optim_step") == []


def service_of_another_rank(
    server: LocalServer, journal: Path, running: tinker_sync.ServiceClient
) -> tinker_sync.TrainingClient:
    die(running)
    with server.service(journal=journal) as service:
        return service.create_lora_training_client(MODEL, rank=2, seed=1).result(PATIENCE_S)


def test_a_run_that_ended_well_is_over(server: LocalServer, journal: Path) -> None:
    for _ in range(2):
        with server.service(journal=journal) as service:
            open_training(service).optim_step(step_of(1)).result(PATIENCE_S)
    assert len(server.calls_to("create_session")) == len(server.calls_to("optim_step")) == 2
    with pytest.raises(JournalError, match="no session to go on with"):
        tinker_sync.ServiceClient.attach(journal)


def test_a_run_that_raises_leaves_its_session_open(server: LocalServer, journal: Path) -> None:
    def script() -> None:
        with server.service(journal=journal) as service:
            open_training(service).optim_step(step_of(1)).result(PATIENCE_S)
            raise KeyError("of the user")

    with pytest.raises(KeyError):
        script()
    assert server.calls_to("finish_session") == []
    with server.service(journal=journal) as service:
        open_training(service).optim_step(step_of(1)).result(PATIENCE_S)
    assert len(server.calls_to("create_session")) == len(server.calls_to("optim_step")) == 1
    assert len(server.calls_to("finish_session")) == 1


def test_a_run_that_raises_leaves_its_model_on_a_server_that_finishes_no_session(
    server: LocalServer, journal: Path
) -> None:
    def script(*, until: int, error: Exception | None = None) -> list[int]:
        with server.service(journal=journal, dialect="json") as service:
            training = open_training(service)
            steps = list(counted(training, until=until))
            if error is not None:
                raise error
        return steps

    with pytest.raises(KeyError):
        script(until=2, error=KeyError("of the user"))
    assert server.calls_to("unload_model") == []
    assert script(until=4) == [1, 2, 3]
    assert len(server.calls_to("unload_model")) == 1


def test_the_passes_of_a_custom_loss_are_done_once_in_spite_of_two_deaths(
    server: LocalServer, journal: Path, ledger: Ledger
) -> None:
    """One run dies between the passes of a step, the next one between the second pass and the step."""
    computing, dead = threading.Event(), threading.Event()

    def loss(_data: Any, logprobs: Any) -> tuple[float, dict[str, float], Any]:
        return 0.0, {}, [np.ones_like(each) for each in logprobs]

    def stuck(_data: Any, _logprobs: Any) -> Any:
        computing.set()
        dead.wait(PATIENCE_S)
        raise KeyError

    loss.takes_numpy = stuck.takes_numpy = True  # type: ignore[attr-defined]

    def script(service: tinker_sync.ServiceClient, *, life: int) -> None:
        training = open_training(service)
        for step in training.steps(3):
            if step == life == 1:
                training.forward_backward_custom([datum_of(10 + step)], stuck)
                assert computing.wait(PATIENCE_S)
                return die(service)
            training.forward_backward_custom([datum_of(10 + step)], loss).result(PATIENCE_S)
            if life == 2:
                return die(service)
            training.optim_step(step_of(step)).result(PATIENCE_S)
        return service.close().result(PATIENCE_S)

    for life in (1, 2, 3):
        script(server.service(journal=journal), life=life)
        dead.set()
    # Each pass forward is followed by the one backward.
    assert applied(ledger) == [(10,), (10,), (0,), (11,), (11,), (1,), (12,), (12,), (2,)]


def test_a_loop_that_samples_in_each_step_goes_on(server: LocalServer, journal: Path, ledger: Ledger) -> None:
    """The repeated save keeps its sampler, and the new samples get new numbers."""

    def script(service: tinker_sync.ServiceClient, *, until: int, token: int) -> list[tuple[int, str]]:
        base = service.create_sampling_client(base_model=MODEL)
        training, samplers = open_training(service), []
        for step in training.steps(until):
            sampling = training.save_weights_and_get_sampling_client()
            for each, last in ((base, 1), (sampling, 2)):
                prompt = types.ModelInput.from_ints([token, step, last])
                sampled = each.sample(prompt, 1, types.SamplingParams(max_tokens=2)).result(PATIENCE_S)
                assert len(sampled.sequences[0].tokens) == 2
            training.optim_step(step_of(step)).result(PATIENCE_S)
            samplers.append((step, sampling.sampling_session_id))
        return samplers

    first = server.service(journal=journal)
    before = script(first, until=3, token=1)
    die(first)
    with server.service(journal=journal) as service:
        after = script(service, until=5, token=2)
    assert [step for step, _ in after] == [2, 3, 4]
    assert after[0] == before[-1]
    assert len({sampler for _, sampler in before + after}) == 5
    assert applied(ledger) == [(step,) for step in range(5)]


def test_a_lost_session_is_restored_from_its_last_checkpoint(
    server: LocalServer, journal: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def script(service: tinker_sync.ServiceClient, *, until: int) -> list[int]:
        training, made = open_training(service), []
        for step in training.steps(until):
            training.forward_backward([datum_of(step)], "cross_entropy")
            training.optim_step(step_of(step)).result(PATIENCE_S)
            if step == 1:
                training.save_state("one").result(PATIENCE_S)
            made.append(step)
        return made

    first = server.service(journal=journal)
    assert script(first, until=4) == [0, 1, 2, 3]
    die(first)
    server.restart()
    second = server.service(journal=journal)
    assert script(second, until=4) == [2, 3]
    assert "weights/one; steps 2 to 3 are repeated" in caplog.text
    die(second)
    server.restart()  # the recovered client has saved no checkpoint yet
    with server.service(journal=journal) as service:
        assert script(service, until=5) == [2, 3, 4]


def test_a_restored_model_keeps_its_metadata(server: LocalServer, journal: Path) -> None:
    def metadata_of(service: tinker_sync.ServiceClient, *, until: int) -> Any:
        notes = {"mine": "yes"}
        training = service.create_lora_training_client(MODEL, rank=4, seed=1, user_metadata=notes)
        assert list(counted(training, until=until, save_in=(0,)))
        run = service.create_rest_client().get_training_run(training.model_id)
        return run.result(PATIENCE_S).user_metadata

    first = server.service(journal=journal)
    assert metadata_of(first, until=1) == {"mine": "yes"}
    die(first)
    server.restart()
    with server.service(journal=journal) as service:
        assert metadata_of(service, until=2) == {"mine": "yes"}


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("restored", [0, 1])
def test_a_restore_that_fails_is_tried_again_by_the_next_run(
    server: LocalServer, journal: Path, caplog: pytest.LogCaptureFixture, restored: int, attached: bool
) -> None:
    """The run ends when `restored` of its two models are restored. The next one restores the others."""
    first = server.service(journal=journal)
    for _ in range(2):
        assert list(counted(open_training(first), until=4, save_in=(1,))) == [0, 1, 2, 3]
    die(first)
    server.restart()
    server.plan = FaultPlan().on("load_weights", faults.status(409), nth=range(restored + 1, 1000))
    second = server.service(journal=journal)
    for _ in range(restored):
        open_training(second).optim_step(step_of(9)).result(PATIENCE_S)
    with pytest.raises(tinker_sync.ConflictError):
        open_training(second).result(PATIENCE_S)
    die(second)
    server.plan = FaultPlan()
    caplog.clear()
    if attached:
        with tinker_sync.ServiceClient.attach(journal, api_key=server.key, pace=server.pace) as service:
            infos = [again.result(PATIENCE_S)._line.record for again in service.trainings]
            assert [record.checkpoint[1] for record in infos if record and record.checkpoint] == [2, 2]
        return
    with server.service(journal=journal) as service:
        for _ in range(restored):
            open_training(service).optim_step(step_of(9)).result(PATIENCE_S)
        for _ in range(2 - restored):
            assert list(counted(open_training(service), until=5)) == [2, 3, 4]
    assert caplog.text.count("weights/at-1; steps 2 to 3 are repeated") == 2 - restored


@pytest.mark.parametrize("named", [True, False])
def test_a_checkpoint_that_may_hold_later_steps_is_not_restored(
    server: LocalServer, journal: Path, named: bool
) -> None:
    """The result of a save that replaces a checkpoint had not arrived when the process died."""
    first = server.service(journal=journal)
    training = open_training(first)
    for step in counted(training, until=4, save_in=(0,) if named else ()):
        if step == 1:
            training.save_state("last", overwrite=True).result(PATIENCE_S)
    server.plan = FaultPlan().on("retrieve_future", faults.status(503))
    saved = training.save_state("last", overwrite=True)
    until(lambda: saved.request_id)
    die(first)
    server.plan = FaultPlan()
    server.restart()
    for _ in range(2):
        service = server.service(journal=journal)
        training = open_training(service)
        if named:
            assert list(counted(training, until=4)) == [1, 2, 3]
        else:
            with pytest.raises(JournalError, match=r"replaces tinker://\S+/weights/last had no answer"):
                list(training.steps(4))
        die(service)
        server.restart()


def test_the_journal_of_another_server_is_refused(server: LocalServer, journal: Path) -> None:
    die_with = server.service(journal=journal)
    open_training(die_with).result(PATIENCE_S)
    die(die_with)
    with pytest.raises(JournalError, match="name another file"):
        tinker_sync.ServiceClient(base_url="http://127.0.0.1:9", api_key="tml-x", journal=journal)


def test_a_refused_call_is_refused_again_and_the_others_go_on(
    server: LocalServer, journal: Path, ledger: Ledger
) -> None:
    def script(service: tinker_sync.ServiceClient, until: int) -> None:
        training = open_training(service)
        with pytest.raises(tinker_sync.UnprocessableEntityError):
            training.optim_step(step_of(50)).result(PATIENCE_S)
        for mark in range(1, until):
            training.optim_step(step_of(mark)).result(PATIENCE_S)

    server.plan = FaultPlan().on("optim_step", faults.status(422), nth=1)
    first = server.service(journal=journal)
    script(first, 3)
    die(first)
    with server.service(journal=journal) as service:
        script(service, 4)
    assert applied(ledger) == [(1,), (2,), (3,)]


@pytest.mark.parametrize("attached", [False, True])
def test_a_refused_call_that_ended_its_run_is_sent_again(
    server: LocalServer, journal: Path, ledger: Ledger, attached: bool
) -> None:
    """A key runs out; its owner renews it and goes on."""
    server.plan = FaultPlan().on("optim_step", faults.status(401), nth=range(2, 1000))
    first = server.service(journal=journal)
    training = open_training(first)
    training.optim_step(step_of(1)).result(PATIENCE_S)
    with pytest.raises(tinker_sync.AuthenticationError):
        training.optim_step(step_of(2)).result(PATIENCE_S)
    die(first)
    server.plan = FaultPlan()
    if attached:
        with tinker_sync.ServiceClient.attach(journal, api_key=server.key, pace=server.pace) as service:
            service.trainings[0].optim_step(step_of(2)).result(PATIENCE_S)
    else:
        with server.service(journal=journal) as service:
            training = open_training(service)
            for mark in (1, 2):
                training.optim_step(step_of(mark)).result(PATIENCE_S)
    assert applied(ledger) == [(1,), (2,)]


@pytest.mark.parametrize("refused", [(1,), (2,), (1, 2), (3,)])
def test_a_call_that_was_refused_in_part_is_repeated_in_part(
    server: LocalServer, journal: Path, ledger: Ledger, refused: tuple[int, ...]
) -> None:
    """Its requests have three numbers, and the first one is sent when the server has accepted the others."""

    def script(service: tinker_sync.ServiceClient, until: int) -> None:
        training = open_training(service)
        passed = training.forward_backward([datum_of(n) for n in range(10, 15)], "cross_entropy")
        with pytest.raises(tinker_sync.UnprocessableEntityError):
            passed.result(PATIENCE_S)
        for mark in range(1, until):
            training.optim_step(step_of(mark)).result(PATIENCE_S)

    server.plan = FaultPlan().on("forward_backward", faults.status(422), nth=refused)
    first = server.service(journal=journal)
    script(first, 3)
    die(first)
    server.plan = FaultPlan()
    server.forget()
    with server.service(journal=journal) as service:
        script(service, 4)
    assert server.calls_to("forward_backward") == []
    assert [marks for marks in applied(ledger) if marks[0] < 10] == [(1,), (2,), (3,)]


def test_a_result_that_is_gone_is_reported(server: LocalServer, journal: Path) -> None:
    first = server.service(journal=journal)
    training = open_training(first)
    for mark in (1, 2):
        training.optim_step(step_of(mark)).result(PATIENCE_S)
    die(first)
    server.plan = FaultPlan().on(
        "retrieve_future", faults.status(410), nth=2
    )  # the first poll is that of the check that the model still exists
    with server.service(journal=journal) as service:
        training = open_training(service)
        with pytest.raises(JournalError, match=r"delivered before.*the call itself is done"):
            training.optim_step(step_of(1)).result(PATIENCE_S)
        training.optim_step(step_of(2)).result(PATIENCE_S)


def test_a_client_that_was_not_used_lets_its_journal_go(server: LocalServer, journal: Path) -> None:
    for _ in range(2):
        server.service(journal=journal).close().result(PATIENCE_S)
    service = server.service(journal=journal)
    with pytest.raises(JournalError, match="another process uses"):
        server.service(journal=journal)
    del service
    gc.collect()
    until(lambda: opens(journal))


def opens(journal: Path) -> bool:
    try:
        JournalFile(journal).close()
    except JournalError:
        return False
    return True


def test_a_forked_copy_of_a_client_with_a_journal_is_not_taken_over(
    server: LocalServer, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.service(journal=journal) as service:
        training = open_training(service).result(PATIENCE_S)
        training.take_over()
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: 1)
            with pytest.raises(JournalError, match="forked process cannot write"):
                training.take_over()


def test_steps_without_a_journal_are_a_range(server: LocalServer) -> None:
    with server.service() as service:
        training = open_training(service)
        assert list(training.steps(3)) == [0, 1, 2]
        assert training._line.record is None
        assert service.trainings == ()


@pytest.mark.parametrize("recovered", [False, True])
def test_a_script_that_exits_within_its_loop_goes_on(
    server: LocalServer, journal: Path, recovered: bool
) -> None:
    """`sys.exit` in a handler of SIGTERM, in a script without a `with` block."""

    def exit_after(service: tinker_sync.ServiceClient, last: int) -> list[int]:
        """Train until a step, and end as `exits.finish_all` does after `sys.exit`."""
        training, steps = open_training(service), []
        for step in counted(training, until=5, save_in=(0,)):
            steps.append(step)
            if step == last:
                break
        if recovered and last == 2:
            assert list(counted(training.recover(), until=3)) == [1, 2]
        ended = service.holder.lifecycle.finish("success", None, PATIENCE_S)
        assert ended is not None
        assert ended.wait(PATIENCE_S)
        die(service)
        return steps

    assert exit_after(server.service(journal=journal), 2) == [0, 1, 2]
    if recovered:  # the loop of the replacement was complete
        assert exit_after(server.service(journal=journal), 9) == [0, 1, 2, 3, 4]
        return
    assert exit_after(server.service(journal=journal), 9) == [2, 3, 4]
    assert exit_after(server.service(journal=journal), 9) == [0, 1, 2, 3, 4]


def test_a_run_that_ends_without_its_last_answers_goes_on(
    server: LocalServer, journal: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def script(service: tinker_sync.ServiceClient) -> tuple[list[int], Any]:
        training = open_training(service)
        return list(counted(training, until=3, save_in=(0,))), training.save_state("final")

    server.plan = FaultPlan().on("save_weights", faults.status(503), nth=range(2, 1000))
    first = server.service(journal=journal)
    assert script(first)[0] == [0, 1, 2]
    first.close(pending=0).result(PATIENCE_S)
    assert "may be lost: save_state" in caplog.text
    server.plan = FaultPlan()
    second = server.service(journal=journal)
    steps, saved = script(second)
    assert steps == [2]
    assert saved.result(PATIENCE_S).path.endswith("weights/final")
    second.close().result(PATIENCE_S)
    with server.service(journal=journal) as service:
        assert script(service)[0] == [0, 1, 2]


def test_a_second_loop_goes_on_behind_the_first(server: LocalServer, journal: Path) -> None:
    def script(service: tinker_sync.ServiceClient, end: int = 4) -> list[int]:
        training = open_training(service)
        return [*counted(training, until=2), *counted(training, until=end)]

    first = server.service(journal=journal)
    assert script(first, 3) == [0, 1, 2]
    die(first)
    with server.service(journal=journal) as service:
        assert script(service) == [2, 3]
    refused = pytest.raises(tinker_sync.InvalidInputError, match="steps 0 to 1 are done")
    with server.service(journal=journal) as service, refused:
        script(service, 2)


@pytest.mark.parametrize("lost", [False, True])
def test_calls_between_loops_are_not_sent_again(
    server: LocalServer, journal: Path, ledger: Ledger, lost: bool
) -> None:
    def script(service: tinker_sync.ServiceClient) -> list[int]:
        training, steps = open_training(service), []
        training.save_state("before").result(PATIENCE_S)
        for stop in (2, 3, 5):
            steps += list(counted(training, until=stop, save_in=(2,)))
            between = training.forward_backward([datum_of(n) for n in range(50, 53)], "cross_entropy")
            between.result(PATIENCE_S)
        return steps

    first = server.service(journal=journal)
    assert script(first) == [0, 1, 2, 3, 4]
    die(first)
    if lost:
        server.restart()
        second = server.service(journal=journal)
        assert script(second) == [3, 4]
        die(second)
    between = 6 if lost else 3
    with server.service(journal=journal) as service:
        assert script(service) == [4]
    assert [marks for marks in applied(ledger) if 50 in marks] == [(50, 51)] * between


# ---------------------------------------------------------------------------------------- without the script


@pytest.mark.parametrize("arrived", [True, False])
def test_attach_goes_on_without_the_script(
    server: LocalServer, journal: Path, ledger: Ledger, caplog: pytest.LogCaptureFixture, arrived: bool
) -> None:
    caplog.set_level(logging.WARNING, "tinker_sync.journal")
    first = server.service(journal=journal)
    training = open_training(first)
    training.forward_backward([datum_of(n) for n in range(10, 13)], "cross_entropy").result(PATIENCE_S)
    server.plan = (
        FaultPlan()
        .on("retrieve_future", faults.status(503))
        .on("optim_step", faults.lost_answer() if arrived else faults.reset(), nth=range(2, 1000))
    )
    accepted = training.optim_step(step_of(1))
    training.optim_step(step_of(2))
    server.wait_for_calls("optim_step", 3)
    assert accepted.request_id is not None
    die(first)
    server.forget()
    options = {"api_key": server.key, "pace": server.pace}
    with tinker_sync.ServiceClient.attach(journal, **options) as service:
        (again,) = service.trainings
        assert again.model_id == training.model_id
        fate = "had reached the server; its result is lost" if arrived else "had not reached the server"
        assert again.settled == (f"optim_step (number 4) {fate}",)
        (unread,) = again.unread
        assert unread.result(PATIENCE_S).metrics["learning_rate"] == step_of(1).learning_rate
        until(lambda: again.unread == ())  # noted a moment after the result is there
        again.optim_step(step_of(3)).result(PATIENCE_S)
    middle = [(2,)] if arrived else []
    assert applied(ledger) == [(10, 11), (12,), (1,), *middle, (3,)]


def test_attach_has_the_unread_results_of_every_kind_of_call(server: LocalServer, journal: Path) -> None:
    first = server.service(journal=journal)
    training = open_training(first).result(PATIENCE_S)
    path = training.save_state("a").result(PATIENCE_S).path
    server.plan = FaultPlan().on("retrieve_future", faults.status(503))
    with pytest.warns(FutureWarning, match="load_state"):
        loaded = training.load_state(path)
    calls = [
        loaded,
        training.forward([datum_of(1)], "cross_entropy"),
        training.forward_backward([datum_of(1)], "cross_entropy"),
        training.optim_step(step_of(1)),
        training.save_weights_for_sampler("a"),
        training.save_weights_external("a"),
        training.save_state("b"),
        training.unload(),
    ]
    until(lambda: all(call.request_id for call in calls))
    die(first)
    server.plan = FaultPlan()
    with tinker_sync.ServiceClient.attach(journal, api_key=server.key, pace=server.pace) as service:
        (again,) = service.trainings
        results = [future.result(PATIENCE_S) for future in again.unread]
    assert [type(result).__name__ for result in results] == [
        *("LoadWeightsResponse", "ForwardBackwardOutput", "ForwardBackwardOutput", "OptimStepResponse"),
        *("SaveWeightsForSamplerResponseInternal", "SaveWeightsExternalResponse", "SaveWeightsResponse"),
        "UnloadModelResponse",
    ]


def test_attach_restores_a_lost_session(server: LocalServer, journal: Path) -> None:
    first = server.service(journal=journal)
    training = open_training(first)
    for step in training.steps(1):
        training.optim_step(step_of(step)).result(PATIENCE_S)
        training.save_state("one").result(PATIENCE_S)
    die(first)
    server.restart()
    with tinker_sync.ServiceClient.attach(journal, api_key=server.key, pace=server.pace) as service:
        (again,) = service.trainings
        assert again.model_id != training.model_id
        assert (again.unread, again.settled) == ((), ())
        again.optim_step(step_of(1)).result(PATIENCE_S)


def counted(
    training: tinker_sync.TrainingClient, *, until: int, save_in: tuple[int, ...] = ()
) -> Iterator[int]:
    """Train up to step `until`, and yield the number of each step when it is done.

    After the steps in `save_in`, save the state under the name `at-STEP`.
    """
    for step in training.steps(until):
        training.forward_backward([datum_of(step)], "cross_entropy")
        training.optim_step(step_of(step)).result(PATIENCE_S)
        if step in save_in:
            training.save_state(f"at-{step}").result(PATIENCE_S)
        yield step


def undisturbed(server: LocalServer, ledger: Ledger, until: int) -> str:
    """Train `until` steps without a journal, and return the digest of the final checkpoint."""
    with server.service() as service:
        training = open_training(service)
        assert list(counted(training, until=until)) == list(range(until))
        return ledger.saved[training.save_state("final").result(PATIENCE_S).path]


@pytest.mark.parametrize(
    ("call", "fault"),
    [("save_weights", faults.status(422)), ("retrieve_future", faults.promise_failed("no space"))],
)
def test_a_state_that_a_save_may_have_replaced_is_not_recovered(
    server: LocalServer, journal: Path, call: str, fault: Any
) -> None:
    """The steps of the new client would do those again that the new state contains already."""
    with server.service(journal=journal) as service:
        training = open_training(service)
        for step in counted(training, until=3):
            if step == 1:
                training.save_state("last", overwrite=True).result(PATIENCE_S)
        server.plan = FaultPlan().on(call, fault, nth=1)
        failed = training.save_state("last", overwrite=True)
        assert failed.exception(PATIENCE_S) is not None
        training.recover().result(PATIENCE_S)  # a failed save has replaced nothing
        server.plan = FaultPlan().on("retrieve_future", faults.status(503))
        saved = training.save_state("last", overwrite=True)
        until(lambda: saved.request_id)
        with pytest.raises(JournalError, match=r"replaces tinker://\S+/weights/last has no answer"):
            training.recover()
        server.plan = FaultPlan()
        saved.result(PATIENCE_S)
        assert list(counted(training.recover(), until=4)) == [3]


@pytest.mark.parametrize("lost", [False, True])
def test_a_recovered_client_goes_on_in_its_journal(
    server: LocalServer, journal: Path, ledger: Ledger, caplog: pytest.LogCaptureFixture, lost: bool
) -> None:
    first = server.service(journal=journal)
    training = open_training(first)
    training.save_state("before").result(PATIENCE_S)  # belongs to no step
    assert list(counted(training, until=4, save_in=(1,))) == [0, 1, 2, 3]
    again = training.recover()
    second = open_training(first)  # the number of a second model does not depend on the recovery
    assert list(counted(again, until=6, save_in=(4,))) == [2, 3, 4, 5]
    second.optim_step(step_of(50)).result(PATIENCE_S)
    die(first)
    if lost:
        server.restart()
    with server.service(journal=journal) as service:
        training = open_training(service)
        training.save_state("before").result(PATIENCE_S)
        assert list(counted(training, until=8)) == [5, 6, 7]
        assert "weights/at-4; steps 5 to 5 are repeated" in caplog.text
        open_training(service).optim_step(step_of(50)).result(PATIENCE_S)
        saved = ledger.saved[training.save_state("final").result(PATIENCE_S).path]
    assert saved == undisturbed(server, ledger, until=8)


def test_a_saved_state_is_known_before_its_result_is_there(server: LocalServer) -> None:
    """A script may call `recover` right after the result."""
    path = "tinker://run/weights/a"
    with server.service() as service:
        line = open_training(service).result(PATIENCE_S)._line
        request = types.SaveWeightsRequest(model_id=line.model_id, path="a")
        call = OrderedCall(line, "save_weights", request, types.SaveWeightsResponse, math.inf)
        (operation,) = call.prepare()
        (part,) = operation.parts
        part.decode(None, {"path": path})
        assert not part.future.done()
        assert line.last_state == types.LoadWeightsRequest(path=path, optimizer=True)
        part.future.cancel()


def test_the_step_of_a_saved_state_is_known_before_its_result_is_there(
    server: LocalServer, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may call `recover` right after the result, before the callbacks of the future have run."""
    recovered = threading.Event()
    note_result = TrainingRecord._note_result

    def note_late(record: TrainingRecord, sent: Sent, future: Any) -> None:
        if sent.call == "save_weights":
            assert recovered.wait(PATIENCE_S)
        note_result(record, sent, future)

    monkeypatch.setattr(TrainingRecord, "_note_result", note_late)
    with server.service(journal=journal) as service:
        training = open_training(service)
        assert list(zip(range(2), counted(training, until=4), strict=False)) == [(0, 0), (1, 1)]
        training.save_state("a").result(PATIENCE_S)
        again = training.recover()
        recovered.set()
        assert list(counted(again, until=4)) == [2, 3]


def test_a_recovered_client_can_recover_again(server: LocalServer, journal: Path, ledger: Ledger) -> None:
    first = server.service(journal=journal)
    training = open_training(first)
    assert list(counted(training, until=2, save_in=(0,))) == [0, 1]
    assert list(counted(training.recover(), until=4, save_in=(2,))) == [1, 2, 3]
    die(first)
    second = server.service(journal=journal)
    third = open_training(second).result(PATIENCE_S).recover()  # to the state with which `second` began
    assert list(counted(third, until=5, save_in=(3,))) == [3, 4]
    assert list(counted(third.recover(), until=5)) == [4]
    die(second)
    with server.service(journal=journal) as service:
        training = open_training(service)
        assert list(counted(training, until=5)) == [4]
        saved = ledger.saved[training.save_state("final").result(PATIENCE_S).path]
    assert saved == undisturbed(server, ledger, until=5)


def test_a_restarted_client_recovers_from_the_checkpoints_of_its_journal(
    server: LocalServer, journal: Path
) -> None:
    first = server.service(journal=journal)
    assert list(counted(open_training(first), until=3, save_in=(1,))) == [0, 1, 2]
    die(first)
    with server.service(journal=journal) as service:
        training = open_training(service).result(PATIENCE_S)
        assert list(counted(training.recover(), until=4)) == [2, 3]


def test_a_script_without_a_step_count_repeats_no_call(
    server: LocalServer, journal: Path, ledger: Ledger
) -> None:
    """The second run repeats calls of the first and gets their results. The engine does each step once."""
    first = server.service(journal=journal)
    training = open_training(first)
    training.optim_step(step_of(1)).result(PATIENCE_S)
    training.save_state("one").result(PATIENCE_S)
    training.recover().optim_step(step_of(2)).result(PATIENCE_S)
    die(first)
    with server.service(journal=journal) as service:
        training = open_training(service)
        training.optim_step(step_of(1)).result(PATIENCE_S)
        training.save_state("one").result(PATIENCE_S)
        training.optim_step(step_of(3)).result(PATIENCE_S)
    marks = [mark for mark in applied(ledger) if mark in ((1,), (2,), (3,))]
    assert sorted(marks) == [(1,), (2,), (3,)]


@pytest.mark.parametrize("lost", [False, True])
def test_attach_goes_on_with_a_recovered_client(server: LocalServer, journal: Path, lost: bool) -> None:
    first = server.service(journal=journal)
    training = open_training(first)
    assert list(counted(training, until=2, save_in=(0,))) == [0, 1]
    recovered = training.recover()
    assert list(counted(recovered, until=3, save_in=(1,))) == [1, 2]
    die(first)
    if lost:
        server.restart()
    service = tinker_sync.ServiceClient.attach(journal, api_key=server.key, pace=server.pace)
    (again,) = service.trainings
    assert (again.model_id == recovered.model_id) is not lost
    if not lost:
        again.optim_step(step_of(3)).result(PATIENCE_S)
    die(service)
    with server.service(journal=journal) as service:  # the script, once more
        steps = list(counted(open_training(service), until=4))
    assert steps == [2, 3]


def test_a_script_does_no_step_twice_after_a_program_that_attached(
    server: LocalServer, journal: Path, ledger: Ledger
) -> None:
    first = server.service(journal=journal)
    assert list(counted(open_training(first), until=2)) == [0, 1]
    die(first)
    attached = tinker_sync.ServiceClient.attach(journal, api_key=server.key, pace=server.pace)
    attached.trainings[0].save_state("between").result(PATIENCE_S)
    die(attached)
    with server.service(journal=journal) as service:
        steps = counted(open_training(service), until=3)
        assert next(steps) == 1
        with pytest.raises(
            tinker_sync.TinkerError, match=r"\(number 5\) is not the save_weights that was sent"
        ):
            next(steps)
    assert applied(ledger) == [(0,), (0,), (1,), (1,), ("between",)]


def test_attach_needs_a_journal(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="there is no journal"):
        tinker_sync.ServiceClient.attach(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_call_in_doubt_is_sent_again_under_its_line_in_the_journal(
    server: LocalServer, journal: Path, ledger: Ledger
) -> None:
    """The first run dies after it has had an unanswered step sent again; the second one repeats nothing."""

    def script(service: tinker_sync.ServiceClient) -> list[BaseException | None]:
        training = open_training(service)
        first = training.optim_step(step_of(1), deadline=2.0)
        failure = first.exception(PATIENCE_S)
        server.plan = FaultPlan()
        return [failure, training.optim_step(step_of(2)).exception(PATIENCE_S)]

    server.plan = FaultPlan().on("optim_step", faults.status(503, after_work=True))
    running = server.service(journal=journal)
    failure, second = script(running)
    assert isinstance(failure, tinker_sync.errors.InternalServerError)
    assert second is None
    die(running)
    with server.service(journal=journal) as service:
        assert script(service) == [None, None]  # the result of the first step is there now
    assert applied(ledger) == [(1,), (2,)]


def test_a_run_that_dies_with_a_call_in_doubt_repeats_it(
    server: LocalServer, journal: Path, ledger: Ledger
) -> None:
    server.plan = FaultPlan().on("optim_step", faults.status(503, after_work=True))
    running = server.service(journal=journal)
    failed = open_training(running).optim_step(step_of(1), deadline=2.0)
    assert failed.exception(PATIENCE_S) is not None
    die(running)
    server.plan = FaultPlan()
    with server.service(journal=journal) as service:
        training = open_training(service)
        training.optim_step(step_of(1), deadline=PATIENCE_S).result(PATIENCE_S)
        training.optim_step(step_of(2)).result(PATIENCE_S)
    assert applied(ledger) == [(1,), (2,)]


def test_a_pass_in_doubt_keeps_the_numbers_of_the_journal(
    server: LocalServer, journal: Path, ledger: Ledger
) -> None:
    """The rest of the pass is sent with the next call, under numbers that follow those of the first run."""
    first = server.service(journal=journal)
    open_training(first).optim_step(step_of(1)).result(PATIENCE_S)
    die(first)
    with tinker_sync.ServiceClient.attach(journal, api_key=server.key, pace=server.pace) as service:
        (training,) = service.trainings
        server.plan = FaultPlan().on("forward_backward", faults.status(503, after_work=True))
        passed = training.forward_backward([datum_of(n) for n in range(2, 7)], "cross_entropy", deadline=2.0)
        assert passed.exception(PATIENCE_S) is not None
        server.plan = FaultPlan()
        training.optim_step(step_of(7)).result(PATIENCE_S)
    assert applied(ledger) == [(1,), (2, 3), (4, 5), (6,), (7,)]
