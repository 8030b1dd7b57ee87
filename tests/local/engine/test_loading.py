"""The engine imports numpy and attrs but no network, and the client does not import the engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def loaded_after(code: str) -> set[str]:
    """Run code in a fresh interpreter, and return the loaded modules."""
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    return set(done.stdout.split())


def test_the_client_does_not_load_the_engine() -> None:
    loaded = loaded_after("import tinker_sync; tinker_sync.ServiceClient, tinker_sync.types.Datum")
    assert "tinker_sync.clients.service" in loaded
    assert not [name for name in loaded if name.startswith("tinker_sync.local")]


def test_the_engine_loads_no_network() -> None:
    loaded = loaded_after("from tinker_sync.local.engine import model, sampling, training")
    assert "numpy" in loaded
    assert not loaded & {"requests", "urllib3", "tokenizers", "safetensors", "asyncio", "torch"}
    ours = {name.split(".")[1] for name in loaded if name.startswith("tinker_sync.")}
    assert not ours & {"clients", "config", "errors", "runtime", "transport", "types", "wire"}
