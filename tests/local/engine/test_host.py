"""The computing threads: order, cancelling, failures and closing."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.raising import raising

from tinker_sync.local import tiny
from tinker_sync.local.engine.host import BaseModel, Host, HostClosed
from tinker_sync.local.engine.lora import LoraSettings
from tinker_sync.local.engine.sampling import Sampler, SampleSpec

MODEL = BaseModel(tiny.NAME, tiny.directory())


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host([MODEL])
    yield made
    made.close()


def spec(**changes: Any) -> SampleSpec:
    return SampleSpec(**{"prompt": np.array([1, 2, 3]), "seed": 1, "max_tokens": 4, **changes})


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
    while not host.train("a", lambda run: None).done():  # it would wait for the first one
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
