"""The embedded server against the reference client: one script of every call, two packages, equal findings.

Each package runs `support/acceptance.py` in a process of its own against a server of its own. The servers are
seeded alike, so that both clients must find the same numbers and the same ids to the last digit.

Different on purpose: the reference client repeats what is answered with 409 for five minutes, so it is not
asked to publish twice. Answers here may have fields that the reference client does not look for.

A server that speaks JSON alone is no variant: the reference client sends training passes as protobuf to every
server. `tests/local/server/test_acceptance.py` runs the script there with the client of this package.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.embedded import KEY, running

ROOT = Path(__file__).parents[2]
PATIENCE_S = 240.0
OURS_ALONE = {"public twice", "private twice"}
# This package refuses it before anything is sent, so the error has no category of the server.
REFUSED_HERE = {"negative rate"}

VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "tokens": {"pjwt_auth_enabled": True},
    "one poll for all samples, sizes first": {
        "sample_use_retrieve_futures": True,
        "metadata_over_bytes": 200,
        "pjwt_auth_enabled": True,
    },
    "chunks side by side, compressed": {"fwdbwd_max_chunk_len": 3, "proto_compress_fwdbwd": True},
    "chunks one after another": {"parallel_fwdbwd_chunks": False, "fwdbwd_max_chunk_bytes_count": 100},
    "models out of checkpoints": {
        "create_model_via_load_weights": True,
        "sample_join_sampling_session": False,
    },
    "losses on the server": {"custom_loss_server_side": True},  # is different only where there is torch
}


def findings(package: str, directory: Path, flags: dict[str, Any]) -> dict[str, Any]:
    """Return the findings of a package, by name."""
    options = [] if flags.get("pjwt_auth_enabled") else ["--no-exchange"]
    # forward_backward_custom of both packages, and the tracing of losses, need torch.
    options += ["--torch"] if importlib.util.find_spec("torch") else []
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "TINKER_TELEMETRY": "0"}
    with running(directory, seed=1, **flags) as server:
        command = [sys.executable, "-m", "support.acceptance", package, server.url, KEY, *options]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, env={**kept, **paths}, check=False
        )
    assert done.returncode == 0, f"{package} failed:\n{done.stderr[-4000:]}"
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_every_call_of_both_clients(flags: dict[str, Any], tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        flights = [
            pool.submit(findings, package, tmp_path / package, flags) for package in ("tinker", "tinker_sync")
        ]
        theirs, ours = (flight.result() for flight in flights)
    assert len(theirs) > 85
    assert set(ours) - set(theirs) == OURS_ALONE
    del theirs["sampler"]["class"]
    differing = {
        name: (shown, value)
        for name, value in theirs.items()
        if (shown := what_both_show(ours[name], value)) != value
    }
    assert set(differing) == REFUSED_HERE


def what_both_show(ours: Any, theirs: Any) -> Any:
    """Ours without fields that only we show."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return {name: what_both_show(each, theirs[name]) for name, each in ours.items() if name in theirs}
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [what_both_show(*each) for each in zip(ours, theirs, strict=True)]
    return ours
