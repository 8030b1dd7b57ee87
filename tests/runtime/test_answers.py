"""Results that are too short, or that belong to another call, are refused; fitting ones pass."""

from __future__ import annotations

import math
import threading
import weakref
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clock import PATIENCE_S, FakeClock
from support.crowd import together
from support.raising import raising

from tinker_sync import types
from tinker_sync.errors import UnsupportedByServerError, WireError
from tinker_sync.runtime.answers import ExpectedOutputs, check_model, merge_metrics, merge_outputs
from tinker_sync.runtime.futures import APIFuture, CombinedFuture, FutureState, Status
from tinker_sync.types import TensorData
from tinker_sync.types.training import ForwardBackwardOutput
from tinker_sync.wire.adapt import check_response, name_sequences


def datum(*tokens: int) -> types.Datum:
    return types.Datum(types.ModelInput.from_ints(list(tokens)), {"target_tokens": list(tokens)})


def scored(*sizes: int) -> types.ForwardBackwardOutput:
    return types.ForwardBackwardOutput(
        "", [{"logprobs": TensorData([-0.5] * size, "float32")} for size in sizes]
    )


class TestPasses:
    DATA = (datum(1, 2, 3), datum(4))

    def test_fitting_outputs_pass(self) -> None:
        expected = ExpectedOutputs.of(self.DATA, whole=True)
        for output in (scored(3, 1), types.ForwardBackwardOutput("", [{}, {}])):
            assert expected.check(output) is output

    @pytest.mark.parametrize("sizes", [(), (3,), (3, 1, 1), (2, 1), (1, 3), (3, 2)], ids=str)
    def test_others_are_refused(self, sizes: tuple[int, ...]) -> None:
        with pytest.raises(WireError, match="loss_fn_outputs"):
            ExpectedOutputs.of(self.DATA, whole=True).check(scored(*sizes))

    def test_older_servers_may_leave_out_targets_without_weight(self) -> None:
        lenient = ExpectedOutputs.of(self.DATA, whole=False)
        assert lenient.check(scored(2, 0))
        with pytest.raises(WireError, match=r"loss_fn_outputs\[1\].logprobs: expected 1 values"):
            lenient.check(scored(2, 2))

    def test_matrices_of_targets_may_come_flat(self) -> None:
        pairs = types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": np.array([[1, 2], [3, 4]])})
        expected = ExpectedOutputs.of([pairs], whole=True)
        flat, square = TensorData([-1.0] * 4, "float32"), TensorData([-1.0] * 4, "float32", [2, 2])
        for tensor in (flat, square):
            expected.check(types.ForwardBackwardOutput("", [{"logprobs": tensor}]))
        with pytest.raises(WireError):
            expected.check(scored(3))

    def test_one_score_for_each_row_of_a_matrix_is_passed_on_with_one_warning(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        many = types.Datum(
            types.ModelInput.from_ints([1, 2]), {"target_tokens": np.arange(34).reshape(2, 17)}
        )
        expected = ExpectedOutputs.of([many], whole=True)
        for _ in range(3):
            assert expected.check(scored(2)).loss_fn_outputs[0]["logprobs"].tolist() == [-0.5, -0.5]
        assert [record.getMessage() for record in caplog.records] == [
            "a datum has targets of shape ['n', 17], its logprobs have shape ['n']"
        ]
        for sizes in [(1,), (2, 2)]:
            with pytest.raises(WireError):
                expected.check(scored(*sizes))


def asked(tokens: int = 3, **options: Any) -> types.SampleRequest:
    prompt = types.ModelInput.from_ints(list(range(tokens)))
    return types.SampleRequest(prompt=prompt, sampling_params=types.SamplingParams(), **options)


def sampled(count: int = 1, length: int = 2, **options: Any) -> types.SampleResponse:
    tokens, logprobs = np.arange(length, dtype=np.int32), np.zeros(length, dtype=np.float32)
    sequence = types.SampledSequence("length", None, tokens, logprobs)
    return types.SampleResponse([sequence] * count, **options)


def topk(rows: int) -> types.TopkLogprobs:
    return types.TopkLogprobs(np.ones((rows, 2)), np.zeros((rows, 2)))


def floats(count: int) -> Any:
    return np.zeros(count, dtype=np.float32)


class TestSamples:
    @pytest.mark.parametrize("count", [0, 1, 2, 4])
    def test_the_number_of_sequences(self, count: int) -> None:
        with pytest.raises(WireError, match=f"sequences: expected 3, got {count}"):
            check_response(asked(num_samples=3), sampled(count))
        assert check_response(asked(num_samples=3), sampled(3)).sequences

    def test_a_sequence_has_as_many_scores_as_tokens(self) -> None:
        for logprobs in (None, floats(0), floats(2)):
            sequence = types.SampledSequence("stop", None, np.arange(2), logprobs)
            assert check_response(asked(), types.SampleResponse([sequence]))
        with pytest.raises(WireError, match=r"sequences\[0\].logprobs: expected 2 values, got 1"):
            check_response(
                asked(), types.SampleResponse([types.SampledSequence("stop", None, np.arange(2), floats(1))])
            )

    @pytest.mark.parametrize(
        ("request_", "response", "complaint"),
        [
            (asked(prompt_logprobs=True), sampled(prompt_logprobs_np=floats(1)), "prompt_logprobs"),
            (asked(prompt_logprobs=True), sampled(prompt_logprobs_np=floats(4)), "prompt_logprobs"),
            (
                asked(topk_prompt_logprobs=2),
                sampled(topk_prompt_logprobs_np=topk(1)),
                "topk_prompt_logprobs: expected 3 values, got 1",
            ),
            (
                asked(target_prompt_logprobs=TensorData([1, 2], "int64", [2, 1])),
                sampled(target_prompt_logprobs=TensorData([-1.0], "float32", [1, 1])),
                "target_prompt_logprobs: expected the shape",
            ),
            (
                asked(prompt_alt_tokens_k=2),
                sampled(
                    prompt_alt_tokens=types.PromptAltTokens(
                        TensorData([1, 2, 3, 4], "int64", [2, 2]), TensorData([0.0], "float32", [1, 1])
                    )
                ),
                "prompt_alt_tokens.logprobs: expected 4 values, got 1",
            ),
        ],
    )
    def test_scores_of_another_prompt(
        self, request_: types.SampleRequest, response: types.SampleResponse, complaint: str
    ) -> None:
        with pytest.raises(WireError, match=complaint):
            check_response(request_, response)

    @pytest.mark.parametrize(
        "options",
        [
            {"prompt_logprobs": True},
            {"topk_prompt_logprobs": 2},
            {"topk_sample_logprobs": 2},
            {"prompt_alt_tokens_k": 2},
            {"target_prompt_logprobs": TensorData([1, 2], "int64", [2, 1])},
        ],
        ids=lambda options: next(iter(options)),
    )
    def test_what_the_server_ignores(self, options: dict[str, Any]) -> None:
        with pytest.raises(UnsupportedByServerError, match=f"ignored {next(iter(options))}"):
            check_response(asked(**options), sampled())

    def test_the_first_token_may_be_left_out(self) -> None:
        response = check_response(asked(prompt_logprobs=True), sampled(prompt_logprobs_np=floats(2)))
        assert response.prompt_logprobs == [None, 0.0, 0.0]
        alone = check_response(asked(1, prompt_logprobs=True), sampled())
        assert alone.prompt_logprobs == [None]

    def test_pictures_have_as_many_tokens_as_the_server_makes_of_them(self) -> None:
        from tinker_sync.types import EncodedTextChunk, ImageChunk

        chunks = [EncodedTextChunk(tokens=[1]), ImageChunk(data=b"", format="png")]
        request = types.SampleRequest(
            prompt=types.ModelInput(chunks=chunks),
            sampling_params=types.SamplingParams(),
            prompt_logprobs=True,
        )
        assert check_response(request, sampled(prompt_logprobs_np=floats(77)))

    def test_ids_for_other_sequences(self) -> None:
        for none in (None, []):
            assert name_sequences(sampled(), none).sequences[0].sequence_id is None
        with pytest.raises(WireError, match="2 ids"):
            name_sequences(sampled(), ["a", "b"])


class TestOtherResults:
    def test_another_model(self) -> None:
        for model_id in (None, "", "m-1"):
            check_model("m-1", types.LoadWeightsResponse(model_id=model_id))
        with pytest.raises(WireError, match="another model"):
            check_model("m-1", types.LoadWeightsResponse(model_id="m-2"))


# -------------------------------------------------------------------------------------------- merge
NAN = math.nan


def output(count: int, metrics: dict[str, Any], kind: str = "ArrayRecord") -> ForwardBackwardOutput:
    return ForwardBackwardOutput(
        kind, [{"n": TensorData([index], "int64")} for index in range(count)], metrics
    )


REDUCTIONS = ["mean", "sum", "min", "max", "slack", "hash2", "unique", "other", ""]
KEYS = (
    st.sampled_from(["a", "a_1", "b:unique", "b:unique_1", "loss", "loss:sum"])
    | st.builds("{}:{}".format, st.sampled_from("ab"), st.sampled_from(REDUCTIONS))
    | st.text(alphabet="a:_1", max_size=4)
)
VALUES = st.floats() | st.integers(-(2**70), 2**70) | st.none() | st.text(max_size=2) | st.booleans()


class TestReductions:
    """Tests of the reductions with the values in the protocol's description, for chunks of 1 and 3 data."""

    @pytest.mark.parametrize(
        ("key", "first", "second", "expected"),
        [
            ("a:mean", 1, 2, 1.75),
            ("b:sum", 1.5, 2, 3.5),
            ("c:min", 1, 3, 1),
            ("d:max", 1, 3, 3),
            ("e:slack", 1, 3, 0.5),
            ("f:hash2", -1.7, 2.9, 1),
        ],
    )
    def test_check_values(self, key: str, first: float, second: float, expected: float) -> None:
        assert merge_metrics([{key: first}, {key: second}], [1, 3]) == {key: expected}

    def test_hash2_is_an_exact_int(self) -> None:
        merged = merge_metrics([{"a:hash2": 2**64 - 1}, {"a:hash2": 2**53 + 1.0}, {"a:hash2": 5}], [1, 1, 1])
        assert merged == {"a:hash2": 2**53 + 4}
        assert type(merged["a:hash2"]) is int

    def test_unique_keeps_every_value(self) -> None:
        chunks = [{"clock_cycle:unique": value} for value in (10, 11, 12, 13)]
        assert merge_metrics(chunks, [2, 2, 2, 1]) == {
            "clock_cycle:unique": 10,
            "clock_cycle:unique_1": 11,
            "clock_cycle:unique_2": 12,
            "clock_cycle:unique_3": 13,
        }

    def test_one_chunk_is_reduced_too(self) -> None:
        metrics = {"a:mean": 3.0, "b:slack": 3.0, "c:hash2": 3.9, "d:unique": 4, "e": 5}
        assert merge_metrics([metrics], [2]) == {
            "a:mean": 3.0,
            "b:slack": 0.0,
            "c:hash2": 3,
            "d:unique": 4,
            "e": 5,
        }


class TestNothingIsLostOrRaised:
    def test_a_key_without_reduction_costs_nothing(self) -> None:
        chunks = [{"loss": 1.0, "loss:sum": 5.0}, {"loss": 2.0, "loss:sum": 6.0}]
        assert merge_metrics(chunks, [1, 1]) == {"loss": 1.0, "loss_1": 2.0, "loss:sum": 11.0}

    @pytest.mark.parametrize("key", ["a", "a:b:sum", "a:", ":", "a:median", "a:sum:", ""])
    def test_what_no_reduction_is_known_for_is_kept_per_chunk(self, key: str) -> None:
        assert merge_metrics([{key: 1}, {key: 2}, {key: 3}], [1, 1, 1]) == {
            key: 1,
            f"{key}_1": 2,
            f"{key}_2": 3,
        }

    def test_no_outputs_give_the_plain_mean(self) -> None:
        chunks = [{"a:mean": 1.0, "b:slack": 1.0}, {"a:mean": 2.0, "b:slack": 2.0}]
        assert merge_metrics(chunks, [0, 0]) == {"a:mean": 1.5, "b:slack": 0.5}

    def test_keys_of_later_chunks_survive(self) -> None:
        chunks: list[dict[str, float]] = [
            {},
            {"a:mean": 2.0, "b:unique": 7},
            {"a:mean": 4.0, "b:unique": 8, "c:sum": 1.0},
        ]
        merged = merge_metrics(chunks, [5, 1, 3])
        assert merged == {"a:mean": 3.5, "b:unique": 7, "b:unique_1": 8, "c:sum": 1.0}
        assert list(merged) == ["a:mean", "b:unique", "b:unique_1", "c:sum"]

    def test_weights_are_those_of_the_chunks_that_have_the_key(self) -> None:
        assert merge_metrics([{"x": 0}, {"a:mean": 1.0}, {"a:mean": 4.0}], [100, 1, 2])["a:mean"] == 3.0

    @pytest.mark.parametrize("value", [math.inf, NAN, None, "text", [1], {}])
    def test_what_cannot_be_hashed_is_kept_per_chunk(self, value: Any) -> None:
        merged = merge_metrics([{"a:hash2": 1}, {"a:hash2": value}], [1, 1])
        assert list(merged) == ["a:hash2", "a:hash2_1"]
        assert merged["a:hash2"] == 1
        assert merged["a:hash2_1"] is value

    def test_not_a_number_is_not_hidden(self) -> None:
        for chunks in (
            [{"a:min": NAN, "b:max": NAN}, {"a:min": 1, "b:max": 1}],
            [{"a:min": 1, "b:max": 1}, {"a:min": NAN, "b:max": NAN}],
        ):
            assert all(math.isnan(value) for value in merge_metrics(chunks, [1, 1]).values())

    def test_huge_ints_are_summed_exactly(self) -> None:
        assert merge_metrics([{"a:sum": 2**70}, {"a:sum": 1}], [1, 1]) == {"a:sum": 2**70 + 1}

    def test_a_derived_name_does_not_replace_a_real_one(self) -> None:
        chunks = [{"a": 1, "a_1": 10}, {"a": 2, "a_1": 20}, {"a": 3}]
        assert merge_metrics(chunks, [1, 1, 1]) == {"a": 1, "a_2": 2, "a_3": 3, "a_1": 10, "a_1_1": 20}

    @given(
        st.lists(
            st.tuples(st.dictionaries(KEYS, VALUES, max_size=8), st.integers(0, 3)), min_size=1, max_size=5
        )
    )
    def test_nothing_raises_and_no_key_is_lost(self, chunks: list[tuple[dict[str, Any], int]]) -> None:
        metrics = [chunk for chunk, _ in chunks]
        merged = merge_metrics(metrics, [weight for _, weight in chunks])
        assert set().union(*metrics) <= set(merged)


class TestOutputs:
    def test_outputs_follow_each_other_in_chunk_order(self) -> None:
        merged = merge_outputs(
            [output(2, {"loss:sum": 1.0}, "First"), output(3, {"loss:sum": 2.0}, "Second")]
        )
        assert [record["n"].data for record in merged.loss_fn_outputs] == [[0], [1], [0], [1], [2]]
        assert merged.loss_fn_output_type == "First"
        assert merged.metrics == {"loss:sum": 3.0}

    def test_the_weights_are_the_numbers_of_outputs(self) -> None:
        merged = merge_outputs([output(1, {"a:mean": 1.0}), output(3, {"a:mean": 2.0})])
        assert merged.metrics == {"a:mean": 1.75}


# ------------------------------------------------------------------------------------------ combine
def parts_of(count: int, clock: FakeClock | None = None) -> list[APIFuture[Any]]:
    return [APIFuture(clock=clock or FakeClock()) for _ in range(count)]


def combined(parts: list[APIFuture[Any]], **more: Any) -> CombinedFuture[Any, list[Any]]:
    return CombinedFuture(parts, merge=list, **more)


def combined_of(count: int) -> tuple[CombinedFuture[Any, list[Any]], list[APIFuture[Any]]]:
    parts = parts_of(count)
    return combined(parts), parts


class TestResult:
    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
    def test_is_merged_in_the_order_of_the_parts(self, order: tuple[int, ...]) -> None:
        whole, parts = combined_of(3)
        for index in order:
            assert not whole.done()
            parts[index].resolve(index)
        assert whole.result(0) == [0, 1, 2]

    def test_the_last_part_merges_once(self) -> None:
        merges: list[threading.Thread] = []

        def merge(values: list[Any]) -> list[Any]:
            merges.append(threading.current_thread())
            return values

        def bring(part: APIFuture[Any]) -> threading.Thread:
            part.resolve(1)
            return threading.current_thread()

        for _ in range(50):
            parts = parts_of(8)
            whole = CombinedFuture(parts, merge=merge)
            threads = together(*[partial(bring, part) for part in parts])
            assert whole.result(PATIENCE_S) == [1] * 8
            assert merges.pop() in threads
            assert merges == []

    def test_what_the_merge_raises_is_the_failure(self) -> None:
        (part,) = parts_of(1)
        whole = CombinedFuture([part], merge=raising(ZeroDivisionError("no weights")))
        part.resolve(1)
        with pytest.raises(ZeroDivisionError, match="no weights"):
            whole.result(0)


class TestFailure:
    def test_the_first_in_time_wins_and_at_once(self) -> None:
        whole, parts = combined_of(3)
        first = KeyError("second part")
        parts[1].fail(first)
        assert whole.exception(0) is first
        parts[0].fail(KeyError("first part"))
        assert whole.exception(0) is first

    def test_the_others_go_on(self) -> None:
        whole, parts = combined_of(3)
        parts[1].fail(KeyError())
        assert [part.done() for part in parts] == [False, True, False]
        assert parts[0].resolve(1)
        assert parts[2].resolve(3)
        assert whole.status() == Status(FutureState.DONE, "failed: KeyError")


class TestCancel:
    def test_reaches_parts_that_come_later(self) -> None:
        whole: CombinedFuture[int, int] = CombinedFuture([], merge=sum)
        assert whole.cancel()
        part: APIFuture[int] = APIFuture()
        whole.follow([part])
        assert part.cancelled()

    def test_of_a_part_fails_the_whole(self) -> None:
        whole, parts = combined_of(2)
        whole.set_running_or_notify_cancel()
        parts[0].cancel()
        with pytest.raises(CancelledError):
            whole.result(0)

    def test_leaves_finished_parts_alone(self) -> None:
        whole, parts = combined_of(2)
        parts[0].resolve(1)
        whole.cancel()
        assert parts[0].result(0) == 1
        assert parts[1].cancelled()


def test_a_whole_is_being_sent_until_all_parts_are_accepted() -> None:
    whole, parts = combined_of(3)
    parts[1]._mark_waiting("no answer")
    assert whole.status() == Status(FutureState.SENDING)
    parts[0]._mark_accepted("req-1")
    parts[2].resolve(3)
    assert whole.status() == Status(FutureState.WAITING, "no answer")


def test_results_of_the_parts_go_with_the_parts() -> None:
    """The whole future keeps only the merged result. The results of the parts are freed."""

    class Large:
        pass

    parts = parts_of(2)
    whole = CombinedFuture(parts, merge=len)
    large = Large()
    gone = weakref.ref(large)
    for part in parts:
        part.resolve(large)
    assert whole.result(0) == 2
    del large, part, parts
    import gc

    gc.collect()
    assert gone() is None
