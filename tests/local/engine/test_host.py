"""The computing threads: order, cancelling, failures and closing."""

from __future__ import annotations

import gc
import json
import shutil
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.crowd import until
from support.raising import raising

from tinker_sync.local import tiny
from tinker_sync.local.engine import host as host_module
from tinker_sync.local.engine.host import BaseModel, Cancelled, Host, HostClosed, JobWorker, UnknownRun
from tinker_sync.local.engine.lora import LoraSettings
from tinker_sync.local.engine.losses import Example
from tinker_sync.local.engine.sampling import Sampler, SampleSpec

MODEL = BaseModel(tiny.NAME, tiny.directory())
DATA = [Example(np.array([5, 6, 7]), {"target_tokens": np.array([6, 7, 8])})]


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host([MODEL])
    yield made
    made.close()


def spec(**changes: Any) -> SampleSpec:
    return SampleSpec(**{"prompt": np.array([1, 2, 3]), "seed": 1, "max_tokens": 4, **changes})


def test_jobs_are_done_in_order_on_one_thread(host: Host) -> None:
    host.create("a", tiny.NAME, LoraSettings(rank=2)).result(120)
    names: list[tuple[int, str]] = []
    jobs = [
        host.train("a", lambda _, n=n: names.append((n, threading.current_thread().name)))  # type: ignore[misc]
        for n in range(20)
    ]
    wait(jobs, 10)
    assert names == [(n, "tinker-engine-train") for n in range(20)]


def test_runs_are_separate_and_failures_stay_with_their_job(host: Host) -> None:
    for run in ("a", "b"):
        host.create(run, tiny.NAME, LoraSettings(rank=2, seed=1)).result(120)
    before = host.train("b", lambda run: run.forward(DATA, "cross_entropy").metrics).result(120)
    with pytest.raises(ValueError, match="loss_fn"):
        host.train("a", lambda run: run.forward_backward(DATA, "none")).result(120)
    host.train("a", lambda run: run.params.flat.fill(0.3)).result(120)
    assert host.train("b", lambda run: run.forward(DATA, "cross_entropy").metrics).result(120) == before
    assert host.train("a", lambda run: run.forward(DATA, "cross_entropy").metrics).result(120) != before


def test_unknown_runs_are_refused(host: Host) -> None:
    with pytest.raises(UnknownRun, match="'missing' is not in memory"):
        host.train("missing", lambda run: None).result(120)
    host.create("a", tiny.NAME, LoraSettings(rank=2)).result(120)
    assert [host.unload("a").result(120) for _ in range(2)] == [True, False]
    with pytest.raises(UnknownRun):
        host.train("a", lambda run: None).result(120)


def test_an_unloaded_run_frees_its_memory(host: Host) -> None:
    host.create("a", tiny.NAME, LoraSettings(rank=2)).result(120)
    alive = weakref.ref(host._runs["a"])
    host.train("a", lambda run: run.forward(DATA, "cross_entropy")).result(120)
    host.unload("a").result(120)
    gc.collect()
    assert alive() is None


def test_a_finished_job_is_freed() -> None:
    class Data:
        """A double of a large request."""

    worker, data = JobWorker("tinker-engine-train"), Data()
    alive = weakref.ref(data)
    worker.submit(lambda data=data: str(data)).result(120)  # type: ignore[misc]
    del data
    until(lambda: alive() is None)
    worker.close()


def test_requests_sampled_together_equal_those_sampled_alone(host: Host) -> None:
    specs = [spec(prompt=np.array([n, n + 1]), seed=n, max_tokens=10) for n in range(1, 9)]
    together = [order.future for order in [host.sample(tiny.NAME, each) for each in specs]]
    alone = Sampler(MODEL.weights, decode=MODEL.decode)
    for each, future in zip(specs, together, strict=True):
        assert (
            future.result(120).samples[0].tokens.tolist() == alone.run([each])[0].samples[0].tokens.tolist()
        )


def test_a_bad_request_does_not_affect_others(host: Host) -> None:
    good = host.sample(tiny.NAME, spec(max_tokens=50))
    with pytest.raises(ValueError, match="max_tokens"):
        host.sample(tiny.NAME, spec(max_tokens=0)).future.result(120)
    assert len(good.future.result(120).samples) == 1


def test_cancelled_requests_make_room(host: Host) -> None:
    slow = host.sample(tiny.NAME, spec(max_tokens=4000, num_samples=64))
    quick = host.sample(tiny.NAME, spec())
    host.cancel(slow)
    with pytest.raises(Cancelled):
        slow.future.result(120)
    assert quick.future.result(120)
    host.cancel(slow)
    host.cancel(quick)  # both are done
    assert host.sample(tiny.NAME, spec()).future.result(120)


def test_a_waiting_request_can_be_cancelled(host: Host) -> None:
    order = host.sample(tiny.NAME, spec())
    if order.future.cancel():  # otherwise the worker has begun already
        with pytest.raises(CancelledError):
            order.future.result(120)
    assert host.sample(tiny.NAME, spec()).future.result(120)


def test_a_broken_sampler_is_replaced(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "step", raising(RuntimeError("a bug")))
        with pytest.raises(RuntimeError, match="a bug"):
            host.sample(tiny.NAME, spec()).future.result(120)
    assert "a bug" in caplog.text
    assert host.sample(tiny.NAME, spec()).future.result(120)


def test_waiting_work_fails_at_the_end() -> None:
    host = Host([MODEL])
    host.create("a", tiny.NAME, LoraSettings(rank=2)).result(120)
    started, gate = threading.Event(), threading.Event()

    def held(_: object) -> None:
        started.set()
        gate.wait(120)

    busy = host.train("a", held)
    started.wait(120)
    waiting = host.train("a", lambda run: None)
    sample = host.sample(tiny.NAME, spec(max_tokens=4000, num_samples=64))
    closing = threading.Thread(target=host.close)
    closing.start()
    while not host._trainer._closed:
        threading.Event().wait(0.002)
    gate.set()
    closing.join(120)
    assert busy.result(120) is None
    for future in (
        waiting,
        sample.future,
        host.train("a", lambda run: None),
        host.sample(tiny.NAME, spec()).future,
    ):
        with pytest.raises(HostClosed):
            future.result(120)
    host.close()


def test_an_unused_host_closes() -> None:
    Host([MODEL]).close()
    JobWorker("tinker-never").close()


def test_blas_has_one_thread_while_small_models_compute() -> None:
    before = host_module.count_threads()  # 0 if the library of numpy is not OpenBLAS
    one, two = Host([MODEL]), Host([MODEL])
    assert host_module.count_threads() == before  # no computation yet
    one.create("a", tiny.NAME, LoraSettings(rank=2)).result(120)
    two.sample(tiny.NAME, spec()).future.result(120)
    assert host_module.count_threads() == min(before, 1)
    one.close()
    one.close()
    assert host_module.count_threads() == min(before, 1)
    two.close()
    assert host_module.count_threads() == before


# ------------------------------------------------------------------------------------------ base models
def test_weights_are_read_once_on_first_use(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny.directory(), tmp_path / "model")
    model = BaseModel("mine", folder)
    (folder / "model.safetensors").rename(folder / "away")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        _ = model.weights
    (folder / "away").rename(folder / "model.safetensors")
    assert model.weights is model.weights
    assert model.tokenizer_id == str(folder)
    assert model.decode([1, 2, 3]) == MODEL.decode([1, 2, 3])
    (folder / "tokenizer.json").unlink()
    assert (model.has_tokenizer, model.tokenizer_id) == (False, "mine")


@pytest.mark.parametrize(("ids", "ends"), [(7, {7}), ([7, 9], {7, 9}), (None, set())])
def test_end_tokens_come_from_the_first_file_with_them(tmp_path: Path, ids: Any, ends: set[int]) -> None:
    folder = shutil.copytree(tiny.directory(), tmp_path / "model")
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": ids}))
    assert BaseModel("mine", folder).end_tokens == ends
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert BaseModel("mine", folder).end_tokens == {3}
    (folder / "generation_config.json").write_text("[3]")
    with pytest.raises(ValueError, match=r"generation_config\.json: must hold an object"):
        BaseModel("mine", folder)


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"config\.json"):
        BaseModel("mine", tmp_path)
