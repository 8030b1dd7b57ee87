"""Memory that loading has used and freed goes back to the system."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tinker_sync
from tinker_sync.text import memory

RESIDENT = """
import sys
from tinker_sync.text import loading, memory
def resident():
    with open("/proc/self/status") as status:
        return int(next(line.split()[1] for line in status if line.startswith("VmRSS:")))
if sys.argv[2] == "kept":
    memory.give_back = lambda: False
before = resident()
tokenizer = loading.get_tokenizer(sys.argv[1])
print(resident() - before, len(tokenizer))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc gives memory back")
def test_a_large_vocabulary_leaves_little_behind(tmp_path: Path) -> None:
    letters = [chr(point) for point in range(0x4E00, 0x4E00 + 245)]
    pairs = [(one, other) for one in letters for other in letters][: 60_000 - len(letters)]
    tokens = [*letters, *map("".join, pairs)]
    model = {
        "type": "BPE",
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": [" ".join(pair) for pair in pairs],
    }
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "normalizer": None, "model": model})
    )
    grown = {}
    for how in ("kept", "given back"):
        done = subprocess.run(
            [sys.executable, "-c", RESIDENT, str(tmp_path), how],
            env=os.environ | {"PYTHONPATH": str(Path(tinker_sync.__file__).parents[1])},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        grown[how], size = map(int, done.stdout.split())
        assert size == 60_000
    assert grown["given back"] < 0.9 * grown["kept"]


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory.give_back() is False
