"""Adapters in the files of the hosted service: a configuration, and weights under the names of PEFT. Pure.

In the store an adapter's arrays are called `<module>.lora_A` and `<module>.lora_B`, as in the engine. In
files the head is `model.unembed_tokens`, because tools for the service's files expect this name: they merge
it into `lm_head`, or into the embeddings of a model that ties the two. PEFT knows no such module. The
configuration lists `lm_head` all the same, so that PEFT warns of missing weights instead of loading the rest
silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from tinker_sync.local.engine.lora import ALPHA
from tinker_sync.local.engine.safetensors import Array

ADAPTER_FILE: Final = "adapter_model.safetensors"
CONFIG_FILE: Final = "adapter_config.json"
_PREFIX: Final = "base_model.model."
_SUFFIX: Final = ".weight"
_PARTS: Final = (".lora_A", ".lora_B")
_HEAD: Final = "lm_head."
_HEAD_IN_FILES: Final = "model.unembed_tokens."


def is_adapter(name: str) -> bool:
    """Return True if an array of this name belongs to the adapter, and False for the optimizer's arrays.

    >>> is_adapter("lm_head.lora_A"), is_adapter("optimizer.first")
    (True, False)
    """
    return name.endswith(_PARTS)


def to_file(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays of an adapter under their names in files.

    >>> import numpy as np
    >>> list(to_file({"lm_head.lora_A": np.ones((1, 2))}))
    ['base_model.model.model.unembed_tokens.lora_A.weight']
    """
    return {
        f"{_PREFIX}{_renamed(name, _HEAD, _HEAD_IN_FILES)}{_SUFFIX}": array for name, array in arrays.items()
    }


def from_file(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays of a file under the names of the engine.

    A head called `lm_head`, as PEFT and earlier versions of this package write it, keeps its name.
    """
    return {
        _renamed(name.removeprefix(_PREFIX).removesuffix(_SUFFIX), _HEAD_IN_FILES, _HEAD): array
        for name, array in arrays.items()
    }


def _renamed(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


def config(arrays: Mapping[str, Array], base_model: str) -> bytes:
    """Return the content of `adapter_config.json` for an adapter.

    Raises:
        ValueError: the arrays are not one adapter: halves are missing, or the ranks differ.

    >>> import numpy as np
    >>> halves = {"x.q_proj.lora_A": np.zeros((4, 8)), "x.q_proj.lora_B": np.zeros((8, 4))}
    >>> made = json.loads(config(halves, "org/base"))
    >>> made["r"], made["lora_alpha"], made["target_modules"]
    (4, 32, ['q_proj'])
    """
    modules = sorted({name.rpartition(".")[0] for name in arrays})
    ranks = {array.shape[-2 if name.endswith(_PARTS[0]) else -1] for name, array in arrays.items()}
    if len(ranks) != 1 or any(f"{module}{part}" not in arrays for module in modules for part in _PARTS):
        raise ValueError(f"the arrays are not one adapter: {len(modules)} modules, ranks {sorted(ranks)}")
    tree = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": ranks.pop(),
        "lora_alpha": int(ALPHA),
        "lora_dropout": 0.0,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    }
    return json.dumps(tree, indent=2).encode() + b"\n"
