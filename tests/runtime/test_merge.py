from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinker_sync.runtime.answers import merge_metrics, merge_outputs
from tinker_sync.types.tensor_data import TensorData
from tinker_sync.types.training import ForwardBackwardOutput

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
