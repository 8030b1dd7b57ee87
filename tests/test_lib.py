"""Modules under the paths from which scripts of the reference client import: the same objects."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import tinker_sync
import tinker_sync.lib
import tinker_sync.types

ROOT = Path(tinker_sync.__file__).parent
MODULES = [
    ".".join(["tinker_sync", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
    for path in sorted((ROOT / "lib").rglob("*.py"))
]
OF_TYPES = [
    *("dmel_chunk", "encoded_text_chunk", "forward_backward_output", "image_chunk", "loss_fn_type"),
    *("model_input_chunk", "sample_response", "sampled_sequence", "sampling_params", "stop_reason"),
]


@pytest.mark.parametrize("name", MODULES[1:])
def test_names_are_those_of_the_front_door(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__all__
    for each in module.__all__:
        expected = getattr(tinker_sync, "APIFuture" if each == "AwaitableConcurrentFuture" else each)
        assert getattr(module, each) is expected
    with pytest.raises(AttributeError):
        module.Nothing  # noqa: B018


@pytest.mark.parametrize("name", OF_TYPES)
def test_types_are_where_scripts_look_for_them(name: str) -> None:
    module = importlib.import_module(f"tinker_sync.types.{name}")
    own = "".join(part.capitalize() for part in name.split("_"))
    assert getattr(module, own) is getattr(tinker_sync.types, own)


def test_there_are_modules() -> None:
    assert {"tinker_sync.lib", "tinker_sync.lib.public_interfaces", "tinker_sync.lib.retry_handler"} <= set(
        MODULES
    )


def test_they_load_nothing_before_it_is_used() -> None:
    code = "import sys, tinker_sync.lib.public_interfaces; print({'numpy', 'requests'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "set()\n"
