"""`forward_backward_custom` with numpy losses: the whole client against a stub server."""

from __future__ import annotations

import threading
import traceback
from concurrent.futures import CancelledError
from concurrent.futures import wait as wait_for
from typing import Any, cast

import numpy as np
import pytest
from support.custom_losses import PATIENCE_S, arrived, data, squares, weights_sent, world
from support.raising import refuse_threads
from support.tinker_stub import Answer

import tinker_sync
from tinker_sync import Datum, ModelInput, errors, types
from tinker_sync.losses import DPO, CrossEntropy, dpo_pairs, numpy_loss, with_reference
from tinker_sync.losses.data import backward_data, forward_data
from tinker_sync.runtime.futures import APIFuture, FutureState, Status
from tinker_sync.testing import LocalServer
from tinker_sync.types.datum import count_trained


class Gate:
    """A loss that waits until the test sets `open`, and then returns or raises."""

    def __init__(self, failure: BaseException | None = None) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self.failure = failure
        self.thread = ""

    takes_numpy = True

    def __call__(self, data: Any, logprobs: Any) -> Any:
        self.thread = threading.current_thread().name
        self.entered.set()
        assert self.open.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure
        return squares(data, logprobs)

    def wait(self) -> None:
        assert self.entered.wait(PATIENCE_S)


def occupy_loss_workers(trainer: Any, gates: list[Gate]) -> list[APIFuture[Any]]:
    """Let each gate hold up a worker for losses, each for a client of its own. Return the futures."""
    others = [trainer.service.create_lora_training_client("stub/model").result() for _ in gates]
    customs = [
        other.forward_backward_custom(data(1), gate) for other, gate in zip(others, gates, strict=True)
    ]
    for gate in gates:
        gate.wait()
    return customs


class TestResult:
    def test_gradients_become_weights(self) -> None:
        with world() as (stub, trainer):
            output = trainer.forward_backward_custom(data(2), squares).result(PATIENCE_S)
            assert arrived(stub) == ["1 forward", "2 backward"]
            # The stub's log-probability of token n is -n / 100; the gradients are twice that.
            assert weights_sent(stub, 2) == [pytest.approx([0.02, 0.04]), pytest.approx([0.04, 0.06])]
            expected = sum((token / 100) ** 2 for token in (1, 2, 2, 3))
            assert output.metrics["loss:sum"] == pytest.approx(expected)
            assert output.metrics["squares:mean"] == pytest.approx(expected / 2)
            surrogate = sum(token / 100 * 2 * token / 100 for token in (1, 2, 2, 3))
            assert output.metrics["surrogate_loss:sum"] == pytest.approx(surrogate)
            assert output.loss_fn_outputs[1]["logprobs"].data == pytest.approx([-0.02, -0.03])

    def test_loss_gets_original_data_and_copied_arrays(self) -> None:
        seen: list[Any] = []

        @numpy_loss
        def look(data: Any, logprobs: Any) -> Any:
            seen.extend([data, [each.dtype for each in logprobs]])
            for each in logprobs:
                each[:] = 0  # the loss gets a copy, so this change has no effect
            return 0.0, {}, [np.zeros_like(each) for each in logprobs]

        given = [
            types.Datum(
                types.ModelInput.from_ints([1, 2]),
                {"target_tokens": [2, 3], "rewards": np.array([0.5]), "weights": [1.0, 0.0]},
            )
        ]
        with world() as (stub, trainer):
            output = trainer.forward_backward_custom(given, look).result(PATIENCE_S)
            assert seen == [given, [np.dtype("float64")]]
            assert "rewards" in seen[0][0].loss_fn_inputs
            assert weights_sent(stub, 1) == [[1.0, 0.0]]
            assert output.loss_fn_outputs[0]["logprobs"].data == pytest.approx([-0.02, -0.03])
            assert output.metrics["surrogate_loss:sum"] == 0

    def test_server_without_loss_sum(self) -> None:
        with world() as (stub, trainer):
            bare = {"loss_fn_output_type": "x", "loss_fn_outputs": [{}], "metrics": {"clock:unique": 1.0}}
            stub.script("/retrieve_future", Answer(usual=True), Answer(body=bare))
            output = trainer.forward_backward_custom(data(1), squares).result(PATIENCE_S)
            assert set(output.metrics) == {"clock:unique", "squares:mean", "loss:sum", "loss:mean"}

    def test_metric_cannot_replace_the_loss(self) -> None:
        @numpy_loss
        def shadow(data: Any, logprobs: Any) -> Any:
            return 3.0, {"loss:sum": 99.0, "surrogate_loss:sum": 98.0}, [0 * each for each in logprobs]

        with world() as (_, trainer):
            metrics = trainer.forward_backward_custom(data(1), shadow).result(PATIENCE_S).metrics
            assert (metrics["loss:sum"], metrics["surrogate_loss:sum"]) == (3.0, 0.0)

    def test_chunks(self) -> None:
        with world({"fwdbwd_max_chunk_len": 2}) as (stub, trainer):
            future = trainer.forward_backward_custom(data(5), squares)
            step = trainer.optim_step(types.AdamParams())
            output = future.result(PATIENCE_S)
            step.result(PATIENCE_S)
            assert sorted(arrived(stub)) == [
                *("1 forward", "2 forward", "3 forward"),
                *("4 backward", "5 backward", "6 backward", "7 step"),
            ]
            assert len(output.loss_fn_outputs) == 5
            expected = sum(((n + 1) / 100) ** 2 + ((n + 2) / 100) ** 2 for n in range(5))
            assert output.metrics["loss:sum"] == pytest.approx(expected)
            assert len(future.request_ids) == 6


class TestOrder:
    """Tests that a training client sends no other operation between the two passes of a custom loss."""

    def test_later_calls_follow_the_backward_pass(self) -> None:
        gate = Gate()
        with world() as (stub, trainer):
            before = trainer.forward_backward(data(1), "cross_entropy")
            custom = trainer.forward_backward_custom(data(1), gate)
            gate.wait()
            step = trainer.optim_step(types.AdamParams())
            after = trainer.forward_backward(data(1), "cross_entropy")
            before.result(PATIENCE_S)
            assert arrived(stub) == ["1 backward", "2 forward"]
            assert (step.status().state, after.status().state) == (FutureState.QUEUED,) * 2
            gate.open.set()
            for future in (custom, step, after):
                future.result(PATIENCE_S)
            assert arrived(stub) == ["1 backward", "2 forward", "3 backward", "4 step", "5 backward"]

    def test_other_training_clients_do_not_wait(self) -> None:
        gate = Gate()
        with world() as (_, trainer):
            other = trainer.service.create_lora_training_client("stub/model").result()  # type: ignore[attr-defined]
            custom = trainer.forward_backward_custom(data(1), gate)
            gate.wait()
            other.optim_step(types.AdamParams()).result(PATIENCE_S)
            gate.open.set()
            custom.result(PATIENCE_S)

    def test_loss_must_not_call_its_own_client(self) -> None:
        with world() as (stub, trainer):

            @numpy_loss
            def nested(data: Any, logprobs: Any) -> Any:
                trainer.forward(data, "cross_entropy").result()

            for call in (trainer.forward_backward_custom, trainer.optim_step):

                @numpy_loss
                def other(data_: Any, logprobs: Any, call: Any = call) -> Any:
                    call(
                        *(
                            [data(1), squares]
                            if call == trainer.forward_backward_custom
                            else [types.AdamParams()]
                        )
                    )

                with pytest.raises(errors.TinkerError, match="its own training client"):
                    trainer.forward_backward_custom(data(1), other).result(PATIENCE_S)
            with pytest.raises(errors.TinkerError, match="its own training client"):
                trainer.forward_backward_custom(data(1), nested).result(PATIENCE_S)
            trainer.optim_step(types.AdamParams()).result(PATIENCE_S)
            assert arrived(stub) == ["1 forward", "2 forward", "3 forward", "4 step"]


class TestEndings:
    def test_error_of_the_loss_keeps_its_traceback(self) -> None:
        @numpy_loss
        def broken(data: Any, logprobs: Any) -> Any:
            raise KeyError("rewards")

        with world() as (stub, trainer):
            custom = trainer.forward_backward_custom(data(1), broken)
            step = trainer.optim_step(types.AdamParams())
            with pytest.raises(KeyError, match="rewards") as caught:
                custom.result(PATIENCE_S)
            assert 'raise KeyError("rewards")' in "".join(traceback.format_tb(caught.value.__traceback__))
            assert step.result(PATIENCE_S).metrics == {"step:max": 2.0}
            assert arrived(stub) == ["1 forward", "2 step"]
            assert custom.request_ids == ("req-1",)

    @pytest.mark.parametrize(
        ("before", "requests"),
        [([], ["1 forward", "2 step"]), ([Answer(usual=True)], ["1 forward", "2 backward", "3 step"])],
        ids=["forward", "backward"],
    )
    def test_failed_pass(self, before: list[Answer], requests: list[str]) -> None:
        with world() as (stub, trainer):
            failure = Answer(body={"error": "no room", "category": "server"})
            stub.script("/retrieve_future", *before, failure)
            with pytest.raises(errors.RequestFailedError, match="no room"):
                trainer.forward_backward_custom(data(1), squares).result(PATIENCE_S)
            trainer.optim_step(types.AdamParams()).result(PATIENCE_S)
            assert arrived(stub) == requests

    def test_no_thread_for_the_loss(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with world() as (stub, trainer):
            with monkeypatch.context() as patch:
                refuse_threads(patch, "tinker-loss")
                custom = trainer.forward_backward_custom(data(1), squares)
                with pytest.raises(errors.TinkerError, match="no thread for this call: can't start"):
                    custom.result(PATIENCE_S)
            trainer.optim_step(types.AdamParams()).result(PATIENCE_S)
            trainer.forward_backward_custom(data(1), squares).result(PATIENCE_S)
            assert arrived(stub) == ["1 forward", "2 step", "3 forward", "4 backward"]

    @pytest.mark.parametrize("before", [[], [Answer(usual=True)]], ids=["forward", "backward"])
    def test_unsent_pass(self, before: list[Answer]) -> None:
        with world() as (stub, trainer):
            stub.script("/forward_backward", *before, Answer(422, {"detail": "no"}))
            custom = trainer.forward_backward_custom(data(1), squares)
            step = trainer.optim_step(types.AdamParams())
            with pytest.raises(errors.TinkerError, match="422"):
                custom.result(PATIENCE_S)
            assert step.result(PATIENCE_S).metrics == {"step:max": 1.0 + len(before)}

    def test_answer_without_logprobs(self) -> None:
        short = [{"logprobs": {"data": [0.5], "dtype": "float32", "shape": [1]}}]
        with world(proto_results=False) as (stub, trainer):
            for outputs, asked, words in (
                ([{}], 1, "no logprobs"),
                ([], 2, "one for each datum, got 0"),  # a wrong form is asked for again
                (short, 2, "one for each target, got 1"),
            ):
                answer = {"loss_fn_output_type": "x", "loss_fn_outputs": outputs, "metrics": {}}
                stub.script("/retrieve_future", *[Answer(body=answer)] * asked)
                with pytest.raises(errors.APIResponseValidationError, match=words):
                    trainer.forward_backward_custom(data(1), squares).result(PATIENCE_S)
            trainer.optim_step(types.AdamParams()).result(PATIENCE_S)


class TestCancelling:
    def test_before_the_forward_pass_is_sent(self, caplog: pytest.LogCaptureFixture) -> None:
        gate = Gate()
        with world() as (stub, trainer):
            first = trainer.forward_backward_custom(data(1), gate)
            gate.wait()
            second = trainer.forward_backward_custom(data(1), squares)
            assert second.cancel()
            step = trainer.optim_step(types.AdamParams())
            gate.open.set()
            first.result(PATIENCE_S)
            step.result(PATIENCE_S)
            with pytest.raises(CancelledError):
                second.result(PATIENCE_S)
            assert arrived(stub) == ["1 forward", "2 backward", "3 step"]
        assert [record.getMessage() for record in caplog.records if record.levelname != "DEBUG"] == []

    def test_during_the_loss(self, caplog: pytest.LogCaptureFixture) -> None:
        gate = Gate()
        with world() as (stub, trainer):
            custom = trainer.forward_backward_custom(data(1), gate)
            step = trainer.optim_step(types.AdamParams())
            gate.wait()
            assert (custom.running(), custom.cancel()) == (False, True)
            assert step.result(PATIENCE_S).metrics == {"step:max": 2.0}
            gate.open.set()
            trainer.forward_backward_custom(data(1), squares).result(PATIENCE_S)
            assert arrived(stub) == ["1 forward", "2 step", "3 forward", "4 backward"]
        assert [record.getMessage() for record in caplog.records if record.levelname != "DEBUG"] == []

    def test_not_after_the_backward_pass_is_sent(self) -> None:
        answer = threading.Event()
        with world() as (stub, trainer):
            stub.script("/forward_backward", Answer(usual=True), Answer(usual=True, gate=answer))
            custom = trainer.forward_backward_custom(data(1), squares)
            stub.await_asked("/forward_backward", 2)
            assert not custom.cancel()
            answer.set()
            custom.result(PATIENCE_S)

    def test_closing_the_client_fails_it_at_once(self) -> None:
        gate = Gate()
        with world() as (_, trainer):
            custom = trainer.forward_backward_custom(data(1), gate)
            gate.wait()
            step = trainer.optim_step(types.AdamParams())
            trainer.service.close("success", pending=0.0)  # type: ignore[attr-defined]
            with pytest.raises(errors.ClientClosedError):
                custom.result(PATIENCE_S)
            with pytest.raises(errors.ClientClosedError):
                step.result(PATIENCE_S)
            gate.open.set()


@pytest.mark.parametrize("deadline", [60.0, 1000.0])
def test_late_loss_loses_its_backward_pass_only(deadline: float) -> None:
    with world() as (stub, trainer):

        @numpy_loss
        def slow(data: Any, logprobs: Any) -> Any:
            trainer.clock.advance(100.0)  # type: ignore[attr-defined]
            return squares(data, logprobs)

        custom = trainer.forward_backward_custom(data(1), slow, deadline=deadline)
        trainer.optim_step(types.AdamParams()).result(PATIENCE_S)
        if deadline > 100:
            custom.result(PATIENCE_S)
            assert arrived(stub) == ["1 forward", "2 backward", "3 step"]
        else:
            with pytest.raises(errors.DeadlineError, match="took too long"):
                custom.result(PATIENCE_S)
            assert arrived(stub) == ["1 forward", "2 step"]


class TestThreads:
    def test_blocked_loss_does_not_block_results(self) -> None:
        gates = [Gate() for _ in range(4)]
        with world() as (_, trainer):
            customs = occupy_loss_workers(trainer, gates)
            called = threading.Event()
            step = trainer.optim_step(types.AdamParams())
            step.add_done_callback(lambda _: called.set())
            step.result(PATIENCE_S)
            assert called.wait(PATIENCE_S)
            for gate in gates:
                gate.open.set()
            assert not wait_for(customs, PATIENCE_S).not_done


def test_status_ids_and_timeline_follow_the_passes() -> None:
    gate = Gate()
    with world() as (_, trainer):
        custom = trainer.forward_backward_custom(data(1), gate)
        gate.wait()
        assert custom.status() == Status(FutureState.WAITING, "the loss is being computed")
        assert custom.request_ids == ("req-1",)
        assert custom.timeline.sending is not None
        assert custom.timeline.accepted is None  # the call is accepted with its backward pass
        gate.open.set()
        custom.result(PATIENCE_S)
        assert custom.request_ids == ("req-1", "req-2")
        assert custom.status().state is FutureState.DONE
        assert custom.timeline.accepted >= custom.timeline.sending


class TestArguments:
    def test_unsuitable_data_are_refused_before_sending(self) -> None:
        bare = types.Datum(types.ModelInput.from_ints([1]), {})
        short = types.Datum(types.ModelInput.from_ints([1]), {"target_tokens": [1, 2]})
        late = types.Datum(types.ModelInput.from_ints([1]), {"target_tokens": [2]})
        late.loss_fn_inputs["advantages"] = cast("Any", [0.5])
        with world() as (stub, trainer):
            with pytest.raises(
                errors.InvalidInputError,
                match=r"data\[1\].loss_fn_inputs\['advantages'\]: expected TensorData",
            ):
                trainer.forward_backward_custom([*data(1), late], squares)
            with pytest.raises(
                errors.InvalidInputError, match=r"data\[1\].loss_fn_inputs\['target_tokens'\]: is missing"
            ):
                trainer.forward_backward_custom([*data(1), bare], squares)
            with pytest.raises(errors.InvalidInputError, match=r"data\[0\].*has length 2"):
                trainer.forward_backward_custom([short], squares)
            with pytest.raises(errors.InvalidInputError, match="is empty"):
                trainer.forward_backward_custom([], squares)
            with pytest.raises(
                TypeError, match="expected a function or a LossHandle, got str; forward_backward and forward"
            ):
                trainer.forward_backward_custom(data(1), "cross_entropy")
            with pytest.raises(ValueError, match="logprobs"):
                trainer.forward_backward_custom(data(1), squares, loss_type_input="logits")
            assert arrived(stub) == []


def test_gradients_are_sparse_when_smaller() -> None:
    wide = types.Datum(types.ModelInput.from_ints([1, 2, 3]), {"target_tokens": np.ones((3, 8), dtype=int)})
    gradient = np.zeros((3, 8), dtype=np.float32)
    gradient[1, 5] = 2.0
    weights = backward_data([wide], [gradient])[0].loss_fn_inputs["weights"]
    assert (weights.sparse_col_indices, weights.data, weights.shape) == ([5], [-2.0], [3, 8])
    assert not backward_data([wide], [gradient + 1])[0].loss_fn_inputs["weights"].is_sparse


def test_default_weights_have_the_layout_of_the_targets() -> None:
    dense = np.zeros((6, 6), dtype=int)
    dense[2, 3], dense[4, 1] = 7, 9
    targets = types.TensorData.from_numpy_sparse(dense)
    assert targets.is_sparse
    given = types.Datum(types.ModelInput.from_ints([1] * 6), {"target_tokens": targets})
    weights = forward_data([given])[0].loss_fn_inputs["weights"]
    assert weights.sparse_col_indices == targets.sparse_col_indices
    assert weights.sparse_crow_indices == targets.sparse_crow_indices
    assert (weights.dtype, weights.shape, set(weights.data)) == ("float32", targets.shape, {0.0})


# ----- `forward_custom`, the mean of the loss, and inputs that only custom losses read


def datum(first: int, **inputs: Any) -> Datum:
    return Datum(ModelInput.from_ints([first, 2, 3]), {"target_tokens": [2, 3, 4], **inputs})


@pytest.fixture
def training() -> Any:
    with (
        LocalServer(model="tinker-sync/random", fwdbwd_max_chunk_len=2) as server,
        server.service() as service,
    ):
        yield service.create_lora_training_client("tinker-sync/random", rank=4, seed=1)


def test_a_custom_loss_is_evaluated_and_nothing_is_trained(training: Any) -> None:
    data = [datum(1, weights=[0, 1, 1]), datum(5)]
    theirs = training.forward(data, "cross_entropy").result(PATIENCE_S)
    ours = training.forward_custom(data, CrossEntropy()).result(PATIENCE_S)
    assert ours.metrics["loss:sum"] == pytest.approx(theirs.metrics["loss:sum"], rel=1e-5)
    assert ours.metrics["loss:mean"] == pytest.approx(ours.metrics["loss:sum"] / 5)
    assert "surrogate_loss:sum" not in ours.metrics
    for one, other in zip(ours.loss_fn_outputs, theirs.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(one["logprobs"].to_numpy(), other["logprobs"].to_numpy(), rtol=1e-6)
    # A backward pass would have left gradients for this step.
    training.optim_step(tinker_sync.AdamParams(learning_rate=1.0)).result(PATIENCE_S)
    again = training.forward(data, "cross_entropy").result(PATIENCE_S)
    assert again.metrics["loss:sum"] == theirs.metrics["loss:sum"]


def test_what_the_loss_raises_belongs_to_the_future(training: Any) -> None:
    @numpy_loss
    def broken(data: Any, logprobs: Any) -> Any:
        raise ZeroDivisionError("mine")

    future = training.forward_custom([datum(1)], broken)
    with pytest.raises(ZeroDivisionError, match="mine"):
        future.result(PATIENCE_S)
    assert training.forward([datum(1)], "cross_entropy").result(PATIENCE_S).metrics["loss:sum"] > 0


def test_the_mean_counts_tokens_over_all_chunks(training: Any) -> None:
    data = [datum(1, weights=[0, 0, 1]), datum(5, weights=[0, 0.5, 1]), datum(7)]  # two requests
    metrics = training.forward(data, "cross_entropy").result(PATIENCE_S).metrics
    assert metrics["loss:mean"] == metrics["loss:sum"] / 6
    one = training.forward_backward(data[:1], "cross_entropy").result(PATIENCE_S).metrics
    assert one["loss:mean"] == one["loss:sum"]
    sampled = datum(1, logprobs=[0, -1, -1], advantages=[0, 0.5, -1])
    metrics = training.forward_backward([sampled], "importance_sampling").result(PATIENCE_S).metrics
    assert metrics["loss:mean"] == metrics["loss:sum"] / 2
    metrics = training.forward_backward_custom(data[:1], CrossEntropy()).result(PATIENCE_S).metrics
    assert metrics["loss:mean"] == metrics["loss:sum"]


@pytest.mark.parametrize(
    ("inputs", "count"),
    [
        ({"target_tokens": [2, 3, 4]}, 3),
        ({"target_tokens": [[2, 3], [3, 4], [4, 5]], "weights": [[0, 0], [1, 0], [1, 1]]}, 2),
        ({"target_tokens": [[2], [3], [4]], "weights": [[0], [1], [1]]}, 2),
        ({"target_tokens": [2, 3, 4], "weights": [0, 0, 0]}, 0),
        ({}, 0),
    ],
)
def test_tokens_that_count(inputs: Any, count: int) -> None:
    assert count_trained([Datum(ModelInput.from_ints([1, 2, 3]), inputs)]) == count


def test_the_reference_of_a_custom_loss_is_not_sent(training: Any) -> None:
    pairs = dpo_pairs([datum(1, weights=[0, 1, 1])], [datum(1, weights=[0, 1, 1])])
    referred = with_reference(pairs, training.forward(pairs, "cross_entropy").result(PATIENCE_S))
    loss = training.forward(referred, "cross_entropy").result(PATIENCE_S).metrics["loss:sum"]
    assert training.forward_backward(referred, "cross_entropy").result(PATIENCE_S).metrics["loss:sum"] == loss
    assert training.forward_custom(referred, DPO()).result(PATIENCE_S).metrics["loss:sum"] > 0
    assert "reference_logprobs" in referred[0].loss_fn_inputs
