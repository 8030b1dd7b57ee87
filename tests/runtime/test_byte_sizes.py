from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinker_sync.errors import InvalidInputError
from tinker_sync.runtime.byte_sizes import estimate_bytes, estimate_prompt_bytes, split
from tinker_sync.types.datum import Datum
from tinker_sync.types.model_input import (
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
)
from tinker_sync.types.tensor_data import TensorData


def datum_of(size_bytes: int) -> Datum:
    """Return a datum with exactly this estimated size, a multiple of 4."""
    assert size_bytes % 4 == 0
    return Datum(ModelInput.from_ints(range(size_bytes // 4)))


MIXED = ModelInput(
    chunks=[
        EncodedTextChunk(tokens=np.arange(7)),
        ImageChunk(data=b"x" * 100, format="png", expected_tokens=64),
        DmelChunk(dmel=bytes([0, 1, 12])),
        ImageAssetPointerChunk(format="jpeg", location="asset://cat"),
    ]
)


class TestEstimate:
    def test_every_kind_of_chunk_counts(self) -> None:
        assert estimate_bytes(Datum(MIXED)) == 4 * 7 + 100 + 3 + 11

    def test_tokens_weigh_more_in_a_prompt(self) -> None:
        assert estimate_prompt_bytes(MIXED) == 10 * 7 + 100 + 3 + 11

    def test_tensors_count_as_they_are_stored(self) -> None:
        datum = Datum(
            ModelInput.empty(),
            {
                "target_tokens": [1, 2, 3],
                "weights": [0.5, 1.0, 1.0],
                "mask": np.zeros((2, 5), dtype=np.float64),
            },
        )
        assert estimate_bytes(datum) == 3 * 8 + 3 * 4 + 10 * 4

    def test_a_sparse_tensor_counts_its_values_and_indices(self) -> None:
        sparse = TensorData([7.0, 8.0], "float32", [3, 50], [0, 0, 1, 2], [4, 49])
        assert estimate_bytes(Datum(ModelInput.empty(), {"weights": sparse})) == 2 * 4 + 8 * (4 + 2)


def sizes(data: list[Datum], **limits: int) -> list[list[int]]:
    return [[estimate_bytes(datum) for datum in chunk.data] for chunk in split(data, **limits)]


class TestSplit:
    @pytest.mark.parametrize(
        ("given_sizes", "limits", "expected"),
        [
            ([4, 4, 4], (100, 10), [[4, 4, 4]]),
            ([4] * 7, (100, 2), [[4, 4], [4, 4], [4, 4], [4]]),
            ([40, 60, 4], (100, 10), [[40, 60], [4]]),
            ([40, 60], (99, 10), [[40], [60]]),
            ([400], (100, 10), [[400]]),
            ([4, 400, 4], (100, 10), [[4], [400], [4]]),
            ([400, 400], (100, 10), [[400], [400]]),
            ([0, 0, 400, 0], (100, 10), [[0, 0], [400], [0]]),
            ([4, 4], (100, 0), [[4], [4]]),
        ],
    )
    def test_limits(self, given_sizes: list[int], limits: tuple[int, int], expected: list[list[int]]) -> None:
        data = [datum_of(size) for size in given_sizes]
        assert sizes(data, max_bytes=limits[0], max_count=limits[1]) == expected

    @given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(1, 40), st.integers(1, 9))
    def test_chunks_are_full_in_order(self, quarters: list[int], max_quarters: int, max_count: int) -> None:
        data = [datum_of(4 * size) for size in quarters]
        chunks = split(data, max_bytes=4 * max_quarters, max_count=max_count)
        assert [id(datum) for chunk in chunks for datum in chunk.data] == [id(datum) for datum in data]
        for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
            assert 1 <= len(chunk.data) <= max_count
            assert chunk.size_bytes == sum(map(estimate_bytes, chunk.data))
            assert chunk.size_bytes <= 4 * max_quarters or len(chunk.data) == 1
            if following is not None:  # the next datum would not have fitted into this chunk
                grown = chunk.size_bytes + estimate_bytes(following.data[0])
                assert len(chunk.data) == max_count or grown > 4 * max_quarters
        assert len(chunks) >= math.ceil(len(data) / max_count)

    def test_no_data_is_refused(self) -> None:
        with pytest.raises(InvalidInputError, match="data: expected at least one datum"):
            split([], max_bytes=100, max_count=10)
