"""`LoopCheckpoints`: saved and deleted checkpoints, and the resume of a loop in a new process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.clock import FakeClock

import tinker_sync
from tinker_sync import Datum, InvalidInputError, ModelInput
from tinker_sync._base.clock import SYSTEM_CLOCK
from tinker_sync.loop.checkpoints import LoopCheckpoints
from tinker_sync.testing import FaultPlan, LocalServer, faults

DATA = [Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})]
STEP = tinker_sync.AdamParams(learning_rate=1e-2)


def step(training: Any) -> float:
    passed = training.forward_backward(DATA, "cross_entropy")
    training.optim_step(STEP).result()
    return float(passed.result().metrics["loss:sum"])


def on_server(service: Any) -> set[str]:
    found = service.create_rest_client().list_user_checkpoints().result().checkpoints
    return {each.tinker_path for each in found}


def test_a_loop_keeps_the_last_and_the_best_and_goes_on_where_it_was(tmp_path: Path) -> None:
    with LocalServer(model="tinker-sync/random") as server, server.service() as service:
        saves = service.checkpoints(tmp_path / "runs" / "x", every=2, keep_last=2)
        assert saves.resume() is None
        training = service.create_lora_training_client("tinker-sync/random", rank=4, seed=1)
        for number, score in enumerate([9.0, 1.0, 8.0, 8.0, 7.0, 7.0, 6.0, 6.0]):
            step(training)
            saved = saves.after_step(training, number, score=score)
            assert (saved is not None) is (number % 2 == 1)
        assert [each.step for each in saves.kept] == [1, 5, 7]
        assert saves.best.step == 1
        assert on_server(service) == {each.path for each in saves.kept}
        expected = [step(training), step(training)]

        again = service.checkpoints(tmp_path / "runs" / "x", every=2, keep_last=2)
        assert again.kept == saves.kept
        resumed = again.resume()
        assert resumed is not None
        client, number = resumed
        assert number == 8
        assert [step(client), step(client)] == expected
        latest = saves.latest
        run = service.create_rest_client().get_training_run(client.model_id).result()
        assert run.user_metadata == {"parent": latest.path, "step": "7"}
        assert again.save(client, number).parent == latest.path


FOREIGN = (
    "[1]", "7", '"x"', "null", "[" * 100_000, '{"saved": 3}', '{"saved": {"step": 1}}',
    '{"saved": {"step": "x", "path": "p"}}', '{"deleted": ["x"]}', '{"step": 1}', "{'saved': ...", "\xff",
)  # fmt: skip


def test_foreign_lines_are_left_out_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    newer = '{"saved": {"step": 4, "path": "q", "of a newer version": 1}}'
    (tmp_path / "checkpoints.jsonl").write_bytes("\n".join([*FOREIGN, newer]).encode("latin-1"))
    with LocalServer(model="tinker-sync/random") as server, server.service() as service:
        saves = service.checkpoints(tmp_path)
        assert [(each.step, each.path) for each in saves.kept] == [(4, "q")]
    assert [text for text in caplog.messages if "line 6 of" in text and "checkpoints.jsonl" in text]


@pytest.mark.parametrize("best", ["min", "max"])
def test_a_score_that_is_nan_is_never_the_best(tmp_path: Path, best: Any) -> None:
    with LocalServer(model="tinker-sync/random") as server, server.service() as service:
        training = service.create_lora_training_client("tinker-sync/random", rank=4)
        saves = service.checkpoints(tmp_path, every=np.int64(1), keep_last=np.int64(1), best=best)
        saves.save(training, 0, score=float("nan"))
        assert saves.best is None
        for number, score in enumerate([0.5, 0.1, float("nan"), 0.9, 0.5], 1):
            saves.save(training, number, score=score)
        again = service.checkpoints(tmp_path, keep_last=1, best=best)
    expected = {"min": 2, "max": 4}[best]
    assert [each.step for each in saves.kept] == [expected, 5]
    assert saves.best == again.best == saves.kept[0]


@pytest.mark.parametrize(("number", "score"), [(0, "low"), ("0", 0.5)])
def test_a_checkpoint_that_cannot_be_listed_is_not_saved(tmp_path: Path, number: Any, score: Any) -> None:
    with LocalServer(model="tinker-sync/random") as server, server.service() as service:
        training = service.create_lora_training_client("tinker-sync/random", rank=4)
        saves = service.checkpoints(tmp_path)
        with pytest.raises(InvalidInputError, match=r"expected a whole number .* got step="):
            saves.save(training, number, score=score)
        with pytest.raises(InvalidInputError, match=r"expected a whole number .* got step="):
            saves.after_step(training, number, score=score)  # long before the hundredth step, which it saves
        assert on_server(service) == set()
        saves.save(training, np.int64(3), score=np.float32(0.5))
        assert service.checkpoints(tmp_path).kept == saves.kept


def test_a_failed_delete_keeps_it_unless_it_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LocalServer(model="tinker-sync/random") as server, server.service(max_retries=0) as service:
        saves = service.checkpoints(tmp_path, every=1, keep_last=1)
        training = service.create_lora_training_client("tinker-sync/random", rank=4)
        saves.save(training, 0)
        server.plan = FaultPlan().on("delete_checkpoint", faults.status(403), nth=1)
        saves.save(training, 1)
        assert [each.step for each in saves.kept] == [0, 1]
        assert "stays, because it cannot be deleted" in caplog.text
        first = saves.kept[0]
        service.create_rest_client().delete_checkpoint_from_tinker_path(first.path).result()
        saves.save(training, 2)
        assert [each.step for each in saves.kept] == [2]


def test_a_rule_says_which_checkpoints_are_kept(tmp_path: Path) -> None:
    with LocalServer(model="tinker-sync/random") as server, server.service() as service:
        training = service.create_lora_training_client("tinker-sync/random", rank=4)
        saves = service.checkpoints(tmp_path, every=1, keep="best 2, last 2, every 4", best="max")
        for number, score in enumerate([5.0, 9.0, 1.0, 0.0, 8.0, None, 2.0, 3.0, 1.0, 1.0]):
            saves.after_step(training, number, score=score)
        # Steps 3 and 7 are the fourth and the eighth.
        assert [each.step for each in saves.kept] == [1, 3, 4, 7, 8, 9]
        assert saves.best is not None
        assert saves.best.step == 1
        assert on_server(service) == {each.path for each in saves.kept}
        only = service.checkpoints(tmp_path / "only", every=2, keep="every 4")
        for number in range(6):
            only.after_step(training, number)
        assert [each.step for each in only.kept] == [3, 5]  # the latest is kept, too


def test_a_resume_takes_the_latest_that_the_server_still_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LocalServer(model="tinker-sync/random") as server, server.service() as service:
        saves = service.checkpoints(tmp_path, every=1)
        training = service.create_lora_training_client("tinker-sync/random", rank=4)
        for number in range(3):
            saves.save(training, number)
        rest = service.create_rest_client()
        rest.delete_checkpoint_from_tinker_path(saves.kept[2].path).result()
        again = service.checkpoints(tmp_path, every=1)
        resumed = again.resume()
        assert resumed is not None
        assert resumed[1] == 2
        assert [each.step for each in service.checkpoints(tmp_path).kept] == [0, 1]
        assert "step-2 cannot be resumed from" in caplog.text
        for each in again.kept:
            rest.delete_checkpoint_from_tinker_path(each.path).result()
        with pytest.raises(tinker_sync.NotFoundError):
            service.checkpoints(tmp_path).resume()
        # The server may be the wrong one, so the list stays.
        assert [each.step for each in service.checkpoints(tmp_path).kept] == [0, 1]


DAY_S = 86_400


class TestExpiry:
    def test_a_checkpoint_that_expires_soon_is_named_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with LocalServer(model="tinker-sync/random") as server, server.service() as service:
            training = service.create_lora_training_client("tinker-sync/random", rank=4)
            clock = FakeClock(time_s=SYSTEM_CLOCK.time())
            saves: Any = LoopCheckpoints(service, tmp_path, every=1, clock=clock)
            first = saves.save(training, 0)
            saves.extend(3 * DAY_S)
            assert saves.expiring() == []
            assert [each.tinker_path for each in saves.expiring(4 * DAY_S)] == [first.path]
            clock.advance(2.5 * DAY_S)
            for number in (1, 2):
                saves.save(training, number)
                clock.advance(3600)
            (text,) = [text for text in caplog.messages if "expires in" in text]
            # The server's clock counts from the save, which came some moments after the look at ours.
            assert text.startswith(f"{first.path} expires in 12:00:")
            assert text.endswith("; extend() keeps it, ttl_seconds= renews what is kept")
            saves.extend(None)
            assert saves.expiring(1000 * DAY_S) == []

    def test_kept_ones_are_renewed_while_the_loop_runs(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with LocalServer(model="tinker-sync/random") as server, server.service() as service:
            training = service.create_lora_training_client("tinker-sync/random", rank=4)
            clock = FakeClock(time_s=SYSTEM_CLOCK.time())
            saves: Any = LoopCheckpoints(
                service, tmp_path, every=1, keep="best 1, last 1", ttl_seconds=2 * DAY_S, clock=clock
            )
            saves.save(training, 0, score=0.0)

            def renewals() -> int:
                return len(server.calls_to("set_checkpoint_ttl"))

            asked = len(server.calls_to("list_checkpoints"))
            saves.save(training, 1, score=1.0)
            assert (renewals(), len(server.calls_to("list_checkpoints"))) == (0, asked)  # not at each save
            clock.advance(0.9 * DAY_S)
            saves.save(training, 2, score=1.0)
            assert renewals() == 0
            clock.advance(0.2 * DAY_S)
            saves.save(training, 3, score=1.0)
            # The server's clock has not advanced, so each of the two that are kept has less than a day.
            assert renewals() == 2
            assert "expires" not in caplog.text

    def test_a_server_that_lists_nothing_does_not_stop_the_loop(self, tmp_path: Path) -> None:
        plan = (
            FaultPlan().on("list_checkpoints", faults.status(403)).on("get_training_run", faults.status(403))
        )
        with LocalServer(plan, model="tinker-sync/random") as server, server.service() as service:
            training = service.create_lora_training_client("tinker-sync/random", rank=4)
            saves = service.checkpoints(tmp_path, every=1, ttl_seconds=DAY_S)
            assert saves.save(training, 0).path in on_server(service)
            assert service.checkpoints(tmp_path).resume() is not None


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"every": 0}, "every: expected 1 or more, got 0"),
        ({"keep_last": -1}, "keep_last: expected 1 or more, got -1"),
        ({"ttl_seconds": 0}, "ttl_seconds: expected 1 or more, got 0"),
        ({"keep": "best 3, last"}, "keep: expected parts such as 'best 3, last 2, every 100', got 'last'"),
        ({"keep": ""}, "keep: expected parts"),
        ({"keep": "last 1, last 2"}, "keep: expected parts such as .* got 'last 2'"),
        ({"keep": "best 0"}, "keep: expected parts"),
        ({"keep": "every 150"}, "'every 150' is no multiple of 100"),
        ({"keep": "last 2", "keep_last": 2}, "give keep or keep_last"),
        ({"best": "least"}, "best: expected 'min' or 'max', got 'least'"),
    ],
)
def test_arguments_out_of_their_range_are_refused(tmp_path: Path, options: Any, complaint: str) -> None:
    with (
        tinker_sync.ServiceClient(base_url="local") as service,
        pytest.raises(InvalidInputError, match=complaint),
    ):
        service.checkpoints(tmp_path, **options)
