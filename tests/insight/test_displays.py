"""Displays for notebooks are escaped and complete, do not wait, and load only when they are used."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
from datetime import datetime, timezone
from types import ModuleType
from typing import Any

import pytest
from support.tinker_stub import Answer, StubServer

import tinker_sync
from tinker_sync import types
from tinker_sync.insight import PriceTable, TokenCounts, Usage
from tinker_sync.insight.displays import frame_of, html_of, shade
from tinker_sync.local import tiny
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.testing import LocalServer

NOON = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
CHECKPOINT = types.Checkpoint(
    checkpoint_id="weights/<b>",
    checkpoint_type="training",
    time=NOON,
    tinker_path="tinker://run-1/weights/<b>",
    size_bytes=505_917,
    user_metadata={"step": "3"},
)
RUN = types.TrainingRun(
    training_run_id="run-1",
    base_model="org/base",
    model_owner="me",
    is_lora=True,
    lora_rank=8,
    last_request_time=NOON,
    last_checkpoint=CHECKPOINT,
)


def test_displays_load_with_the_first_one() -> None:
    code = (
        "import sys, tinker_sync; from tinker_sync import types; types.AdamParams(); "
        "assert 'tinker_sync.insight.displays' not in sys.modules; types.AdamParams()._repr_html_(); "
        "assert 'tinker_sync.insight.displays' in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


# ---------------------------------------------------------------------------------- samples
@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tinker_sync.get_tokenizer(str(tiny.directory()))


def test_tokens_are_shaded_by_their_log_probability(tokenizer: Any) -> None:
    tokens = tokenizer.encode("The <cat>.\nIt sat.")
    sequence = types.SampledSequence("stop", None, tokens, [0.0, -9.0, *[-1.0] * (len(tokens) - 2)])
    shown = shade(sequence, tokenizer)._repr_html_()
    assert "&lt;" in shown
    assert "<cat>" not in shown
    assert "↵\n" in shown
    assert shown.count("<span") == len(tokens)
    assert "rgba(239,68,68,0.00)" in shown
    assert "rgba(239,68,68,0.60)" in shown  # the darkest shade
    assert "stopped by itself" in shown


def test_a_sample_shows_ids_where_the_tokenizer_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_sync.data.tokenizer.find_only_tokenizer", lambda: None)
    response = types.SampleResponse([types.SampledSequence("length", None, [20, 21], None)])
    shown = response._repr_html_()
    assert shown is not None
    assert ">20</span> <span" in shown
    assert "stopped by max_tokens" in shown


def test_a_sample_names_the_tokenizer_that_it_is_shown_with(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_sync.data.tokenizer.find_only_tokenizer", lambda: tokenizer)
    sequence = types.SampledSequence("length", None, tokenizer.encode("cat"), None)
    for value in (sequence, types.SampleResponse([sequence])):
        assert f"text of the tokenizer of {tokenizer.name_or_path}" in html_of(value)
    assert "text of the tokenizer" not in shade(sequence, tokenizer)._repr_html_()
    foreign = types.SampledSequence("length", None, [20, len(tokenizer)], None)
    assert ">20</span> <span" in html_of(foreign)


# ---------------------------------------------------------------------------------- tables
def test_metrics_are_a_table() -> None:
    output = types.ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": 1234.5678, "<m>:mean": 2.0})
    shown = html_of(output)
    assert shown is not None
    assert "1,234.6" in shown
    assert "&lt;m&gt;" in shown
    assert "over 0 examples" in shown


def test_runs_and_checkpoints_are_tables() -> None:
    runs = types.TrainingRunsResponse(
        training_runs=[RUN], cursor=types.Cursor(offset=20, limit=20, total_count=21)
    )
    shown = html_of(runs)
    assert shown is not None
    assert "1 training run of 21, from number 20 on" in shown
    listed = html_of(types.CheckpointsListResponse(checkpoints=[CHECKPOINT]))
    assert listed is not None
    assert "494.1 KB" in listed  # as the command line says it
    assert "step=3" in listed
    assert "<b>" not in listed
    assert "2026-01-31 12:00" in str(html_of(CHECKPOINT))
    assert "org/base" in str(html_of(RUN))


def test_usage_is_a_table() -> None:
    usage = Usage.of({"org/base": TokenCounts(trained=1_000_000)}, PriceTable.of({}))
    assert "1,000,000" in str(usage._repr_html_())
    assert "unknown price" in str(usage._repr_html_())


class Pandas(ModuleType):
    """A double of pandas, in which a frame is the list of its rows."""

    DataFrame = staticmethod(list)


def test_lists_become_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", Pandas("pandas"))
    [run] = types.TrainingRunsResponse(
        training_runs=[RUN], cursor=types.Cursor(offset=0, limit=20, total_count=1)
    ).to_pandas()
    assert run["last_checkpoint"] == "tinker://run-1/weights/<b>"
    [saved] = types.CheckpointsListResponse(checkpoints=[CHECKPOINT]).to_pandas()
    assert saved["size_bytes"] == 505_917
    assert Usage.of({"org/base": TokenCounts(trained=7)}, PriceTable.of({})).to_pandas()[0]["trained"] == 7
    assert frame_of(iter(["session-1"])) == [{"id": "session-1"}]


def test_frames_without_pandas_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(tinker_sync.MissingExtraError, match=r"pip install pandas"):
        types.CheckpointsListResponse(checkpoints=[CHECKPOINT]).to_pandas()


# ---------------------------------------------------------------------------------- futures and clients
def test_a_future_shows_its_state_and_what_the_server_reported() -> None:
    paused = Answer(408, {"queue_state": "paused_capacity", "queue_state_reason": "all machines <are> busy"})
    go_on = threading.Event()
    lost = Answer(gate=go_on, body={"error": "there is no room", "category": "server"})
    with StubServer() as stub:
        stub.script("/retrieve_future", paused, lost)
        with tinker_sync.ServiceClient(base_url=stub.url, api_key="tml-displays") as service:
            sampling = service.create_sampling_client(base_model="stub/model").result()
            future = sampling.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1))
            stub.await_asked("/retrieve_future", 2)
            shown = str(future._repr_html_())
            assert "all machines &lt;are&gt; busy" in shown
            assert str(future.request_ids[0]) in shown
            assert "at the server" in shown
            go_on.set()
            assert future.exception(120)
            assert "failed: RequestFailedError" in str(future._repr_html_())


def test_a_future_that_is_done_shows_its_result() -> None:
    future: APIFuture[Any] = APIFuture()
    future.resolve(types.ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": 3.0}))
    assert ">loss<" in str(future._repr_html_())
    cancelled: APIFuture[Any] = APIFuture()
    cancelled.cancel()
    assert "cancelled" in str(cancelled._repr_html_())


def test_a_training_client_shows_its_curve() -> None:
    datum = types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
    with LocalServer(model="tinker-sync/random") as server, server.service() as service:
        training = service.create_lora_training_client("tinker-sync/random", rank=2)
        assert "no pass yet" in str(training._repr_html_())
        for _ in range(3):
            training.forward_backward([datum], "cross_entropy").result()
            training.optim_step(types.AdamParams(learning_rate=0.01)).result()
        training.forward([datum], "cross_entropy").result()
        shown = str(training._repr_html_())
        assert len(training.curve) == 3
    assert "<polyline" in shown
    assert "loss of 3 passes" in shown


def test_awaited_methods_show_the_real_signature() -> None:
    for client in (tinker_sync.SamplingClient, tinker_sync.TrainingClient, tinker_sync.RestClient):
        for name in (name for name in dir(client) if name.endswith("_async") and name != "result_async"):
            plain = inspect.signature(getattr(client, name.removesuffix("_async")))
            assert inspect.signature(getattr(client, name)).parameters == plain.parameters
    shown = inspect.signature(tinker_sync.SamplingClient.sample_async)
    assert shown.return_annotation == "SampleResponse"


# ---------------------------------------------------------------------------------- awaiting in a cell
class Woken(asyncio.SelectorEventLoop):
    """An event loop that counts its timers, and fires each at once."""

    def __init__(self) -> None:
        super().__init__()
        self.timers = 0

    def call_later(self, *args: Any, **kwargs: Any) -> Any:
        self.timers += 1
        return super().call_later(0, *args[1:], **kwargs)


@pytest.mark.parametrize("kernel", [True, False])
def test_a_notebook_wakes_while_futures_are_awaited(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel:
        monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    else:
        monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    loop = Woken()

    async def main() -> None:
        futures: list[APIFuture[int]] = [APIFuture() for _ in range(5)]
        tasks = [asyncio.ensure_future(future.result_async()) for future in futures]
        for _ in range(20):
            await asyncio.sleep(0)
        assert bool(loop.timers) is kernel
        tasks[0].cancel()
        for future in futures[1:]:
            future.resolve(1)
        assert await asyncio.gather(*tasks[1:]) == [1] * 4
        for _ in range(5):  # after the last future, no further timer is set
            await asyncio.sleep(0)
        beats = loop.timers
        for _ in range(5):
            await asyncio.sleep(0)
        assert loop.timers == beats

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


# ---------------------------------------------------------------------------------- numbers
