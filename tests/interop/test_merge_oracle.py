"""What the server exports computes the same in transformers, merged by the cookbook or loaded by PEFT.

The base models are the built-in one in float32, so that merged weights are not rounded, and a copy whose head
has weights of its own. `train_unembed` trains the head alone, which a model that ties its head to its
embeddings cannot hold: merging changes both, unless the base model is untied first.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import tinker_sync as tinker
from tinker_sync.local.engine import safetensors
from tinker_sync.local.engine.model import read_safetensors
from tinker_sync.local.tiny import directory
from tinker_sync.testing import LocalServer

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("pyrage") is None:  # needed to download, not to merge
            patch.setitem(sys.modules, "pyrage", ModuleType("pyrage"))
        weights = pytest.importorskip("tinker_cookbook.weights")

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = list(range(40, 72))
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def copy_of_tiny(folder: Path, *, tied: bool, own_head: bool = False) -> Path:
    """Write the built-in model in float32; untied, its head is a copy of its embeddings, or different."""
    shutil.copytree(directory(), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"tie_word_embeddings": tied, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    arrays = read_safetensors(folder / "model.safetensors")
    if not tied:
        arrays[HEAD] = arrays[EMBEDDING][:, ::-1].copy() if own_head else arrays[EMBEDDING].copy()
    (folder / "model.safetensors").write_bytes(b"".join(safetensors.pieces(arrays, {"format": "pt"})))
    return folder


def train(base: Path, folder: Path, *, unembed: bool, export: Callable[..., None] | None = None) -> Any:
    """Train some steps, download the adapter to `folder`, and return the server's log-probabilities.

    `export` is called with the server and its clients, before the server ends.
    """
    text = tinker.ModelInput.from_ints(TOKENS)
    example = tinker.Datum(tinker.ModelInput.from_ints(TOKENS[:-1]), {"target_tokens": TOKENS[1:]})
    with LocalServer(model=base) as server, server.service() as service:
        training = service.create_lora_training_client(base.name, rank=4, train_unembed=unembed)
        before = service.create_sampling_client(base_model=base.name).compute_logprobs(text).result()
        for _ in range(4):
            training.forward_backward([example], "cross_entropy")
            training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        path = training.save_weights_for_sampler("trained").result().path
        service.create_rest_client().download_checkpoint(path, to=folder).result()
        after = service.create_sampling_client(path).compute_logprobs(text).result()
        if export is not None:
            export(server, service, training)
    assert np.abs(np.array(after[1:]) - np.array(before[1:])).max() > 1
    return np.array(after[1:])


def logprobs(model: Any) -> Any:
    with torch.no_grad():
        every = model.eval()(torch.tensor([TOKENS])).logits[0, :-1].log_softmax(-1)
    return every[torch.arange(len(TOKENS) - 1), TOKENS[1:]].numpy()


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)


def merge(base: Path, adapter: Path, output: Path, strategy: str = "auto") -> Any:
    weights.build_hf_model(
        base_model=str(base),
        adapter_path=str(adapter),
        output_path=str(output),
        merge_strategy=strategy,
        dtype="float32",
    )
    return load(output)


@pytest.mark.parametrize("strategy", ["shard", "full"])
@pytest.mark.parametrize(("tied", "unembed"), [(True, False), (False, False), (False, True)])
def test_a_merged_model_computes_what_the_server_did(
    tied: bool, unembed: bool, strategy: str, tmp_path: Path
) -> None:
    base = copy_of_tiny(tmp_path / "base", tied=tied, own_head=not tied)
    wanted = train(base, tmp_path / "adapter", unembed=unembed)
    merged = merge(base, tmp_path / "adapter", tmp_path / "merged", strategy)
    np.testing.assert_allclose(logprobs(merged), wanted, atol=1e-4)


def test_a_head_trained_on_tied_embeddings_merges_into_both_or_into_an_untied_copy(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    tied = copy_of_tiny(tmp_path / "tied", tied=True)
    wanted = train(tied, adapter, unembed=True)
    found = read_safetensors(adapter / "adapter_model.safetensors")
    name = "base_model.model.model.unembed_tokens.lora_{}.weight"
    scale = 32 / 4
    change = scale * found[name.format("B")] @ found[name.format("A")]

    both = merge(tied, adapter, tmp_path / "both")
    embedding = read_safetensors(tied / "model.safetensors")[EMBEDDING]
    assert both.lm_head.weight is both.model.embed_tokens.weight
    np.testing.assert_allclose(both.lm_head.weight.detach(), embedding + change, atol=1e-5)
    assert np.abs(logprobs(both) - wanted).max() > 1e-2

    untied = copy_of_tiny(tmp_path / "untied", tied=False)
    merged = merge(untied, adapter, tmp_path / "merged")
    np.testing.assert_allclose(logprobs(merged), wanted, atol=1e-4)


# ---------------------------------------------------------------------------------------------------- PEFT


@pytest.mark.parametrize("tied", [True, False])
def test_peft_loads_an_adapter_without_the_head(tied: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = copy_of_tiny(tmp_path / "base", tied=tied, own_head=not tied)
    wanted = train(base, tmp_path / "adapter", unembed=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        loaded = peft.PeftModel.from_pretrained(load(base), tmp_path / "adapter")
    np.testing.assert_allclose(logprobs(loaded), wanted, atol=1e-4)


def test_the_program_of_the_guide_makes_a_model_and_an_adapter_for_peft(tmp_path: Path) -> None:
    """The three commands of the cookbook, run with this package in place of `tinker`, on a live server."""
    pytest.importorskip("pyrage")
    guide = Path(tinker.__file__).with_name("docs").joinpath("weights.md").read_text()
    [program] = re.findall(r"^```python cookbook\n(.*?)^```$", guide, flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"weights\.(\w+)\(", program) == ["download", "build_hf_model", "build_lora_adapter"]
    base = copy_of_tiny(tmp_path / "base", tied=False, own_head=True)

    def run(server: LocalServer, service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tinker.ExperimentalWarning)
            path = training.save_weights_external("final").result().path
        script = tmp_path / "program.py"
        text = program.replace("Qwen/Qwen3-8B", str(base))
        script.write_text(text.replace("tinker://RUN/external_weights/final", path))
        done = subprocess.run(
            [sys.executable, "-m", "tinker_sync.as_tinker", str(script)],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(tinker.__file__).parents[1]),
                "TINKER_BASE_URL": service.get_console_url(),
                "TINKER_API_KEY": server.key,
                "HF_HUB_OFFLINE": "1",
            },
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]

    wanted = train(base, tmp_path / "final", unembed=True, export=run)
    np.testing.assert_allclose(logprobs(load(tmp_path / "merged")), wanted, atol=1e-4)
    peft = pytest.importorskip("peft")
    loaded = peft.PeftModel.from_pretrained(load(base), tmp_path / "for-peft")
    np.testing.assert_allclose(logprobs(loaded), wanted, atol=1e-4)
