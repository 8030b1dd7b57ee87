"""The number of a request that may have reached the server stays its own; bytes go back in any case."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.crowd import until
from support.custom_losses import arrived, world
from support.engine_ledger import Ledger, engine_ledger, step_of
from support.raising import raising
from support.tinker_stub import Answer

from tinker_sync import types
from tinker_sync.errors import ClientClosedError, ConfigurationError, InvalidInputError, TinkerError
from tinker_sync.runtime import flows
from tinker_sync.runtime.samples import estimate_prompt_bytes
from tinker_sync.runtime.training import TrainingRequest, estimate_bytes, split_data
from tinker_sync.testing import Fault, FaultPlan, LocalServer, faults
from tinker_sync.transport.http import Http
from tinker_sync.types.datum import Datum
from tinker_sync.types.model_input import (
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
)
from tinker_sync.types.tensor_data import TensorData

PATIENCE_S = 120.0
SHORT_S = 2.0  # long enough for the first try, also on a busy machine


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with engine_ledger() as made:
        yield made


def marks(ledger: Ledger) -> list[int]:
    return [mark for run in ledger.with_marks(range(1, 9)) for applied in run for mark in applied.marks]


@pytest.mark.parametrize(
    "fault", [faults.lost_answer(), faults.reset(), faults.status(502, after_work=True), faults.status(503)]
)
def test_a_request_without_an_answer_keeps_its_number(ledger: Ledger, fault: Fault) -> None:
    plan = FaultPlan().on("optim_step", fault)
    with LocalServer(plan, model="tinker-sync/random") as server, server.service() as service:
        training = service.create_lora_training_client("tinker-sync/random", rank=4, seed=1).result()
        first = training.optim_step(step_of(1), deadline=SHORT_S)
        with pytest.raises(TinkerError):
            first.result(PATIENCE_S)
        server.plan = FaultPlan()
        training.optim_step(step_of(2)).result(PATIENCE_S)
    assert marks(ledger) == [1, 2]


def test_a_request_that_was_refused_leaves_its_number(ledger: Ledger) -> None:
    plan = FaultPlan().on("optim_step", faults.status(422))
    with LocalServer(plan, model="tinker-sync/random") as server, server.service() as service:
        training = service.create_lora_training_client("tinker-sync/random", rank=4, seed=1).result()
        with pytest.raises(TinkerError):
            training.optim_step(step_of(1), deadline=SHORT_S).result(PATIENCE_S)
        server.plan = FaultPlan()
        training.optim_step(step_of(2)).result(PATIENCE_S)
    assert marks(ledger) == [2]


# --------------------------------------------------------------------------------- the limit of bytes
DATUM = types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (TrainingRequest, "bytes_for", MemoryError("no memory")),  # while the body is made
        (Http, "open", ConfigurationError("a certificate cannot be used")),
    ],
)
def test_a_request_that_could_not_be_made_fails_alone_and_as_it_is(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, error: Exception
) -> None:
    with world() as (stub, trainer):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, raising(error))
            failed = trainer.optim_step(types.AdamParams())
            assert failed.exception(PATIENCE_S) is error
        trainer.optim_step(types.AdamParams()).result(PATIENCE_S)
        assert arrived(stub) == ["1 step"]


# --------------------------------------------------------------------------------- the end of the client


@pytest.mark.parametrize(
    ("path", "count"), [("/forward_backward", 0), ("/forward_backward", 2), ("/optim_step", 0)]
    + [("/retrieve_future", count) for count in range(4)]
)  # fmt: skip
def test_a_client_that_is_closed_at_any_request_leaves_no_call_and_no_bytes(path: str, count: int) -> None:
    """The client is closed while the server holds a request of a pass in three chunks, or of a step."""
    with world({"fwdbwd_max_chunk_len": 1}) as (stub, trainer):
        service = trainer.service  # type: ignore[attr-defined]
        made = service.holder.server.machinery.value
        budgets = made.train_bytes, made.sending_bytes
        free = [budget.free for budget in budgets]
        release = threading.Event()
        stub.script(path, *[Answer(usual=True)] * count, Answer(gate=release, usual=True))
        passed = trainer.forward_backward([DATUM] * 3, "cross_entropy")
        stepped = trainer.optim_step(types.AdamParams())
        stub.await_asked(path, count + 1)
        service.close(pending=0.0).result(PATIENCE_S)
        for future in (passed, stepped):
            assert isinstance(future.exception(PATIENCE_S), (ClientClosedError, type(None)))
        until(lambda: [budget.free for budget in budgets] == free)
        until(lambda: service.holder.server.flows not in {task._flows for task in list(flows._under_way)})
        release.set()


# --------------------------------------------------------------------------------------- byte sizes
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
    return [[estimate_bytes(datum) for datum in chunk.data] for chunk in split_data(data, **limits)]


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
        chunks = split_data(data, max_bytes=4 * max_quarters, max_count=max_count)
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
        with pytest.raises(InvalidInputError, match="at least one datum"):
            split_data([], max_bytes=100, max_count=10)
