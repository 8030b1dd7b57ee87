"""The training loops of the cookbook end alike with either client, and train to the same losses.

Only what `import tinker` means differs: for this package, `tinker_sync.as_tinker` runs the loops.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tinker_sync.testing import LocalServer

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("cookbook_script.py")
LOOPS = (
    "supervised", "resumed", "rl_sync", "rl_async", "rl_streamed", "rl_stable", "rl_turns", "rl_reference",
    "preferences", "distillation", "weights",
    pytest.param(
        "merged",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("pyrage") is None, reason="the cookbook downloads with pyrage"
        ),
    ),
)  # fmt: skip


def outcomes(folder: Path, *options: str) -> dict[str, Any]:
    """Run the loops on a new server, by a Python with these options, and return their outcomes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    environment = {**kept, "PYTHONPATH": str(ROOT), "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    with LocalServer() as server:
        done = subprocess.run(
            [sys.executable, *options, str(SCRIPT), server.url, server.key, str(folder)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    return (
        outcomes(tmp_path_factory.mktemp("ours"), "-m", "tinker_sync.as_tinker"),
        outcomes(tmp_path_factory.mktemp("theirs")),
    )


def flat(tree: Any) -> list[Any]:
    return [leaf for each in tree for leaf in flat(each)] if isinstance(tree, list) else [tree]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_ends_alike_with_either_client(loop: str, found: Any) -> None:
    ours, theirs = found
    assert not isinstance(theirs[loop], str), theirs[loop]
    assert not isinstance(ours[loop], str), ours[loop]
    # The loss of preferences comes through torch, whose sums depend on the order of the data.
    for one, two in zip(flat(ours[loop]), flat(theirs[loop]), strict=True):
        assert one == (two if isinstance(two, str) else pytest.approx(two, rel=1e-4))
    assert len(ours[loop]) == len(theirs[loop])
