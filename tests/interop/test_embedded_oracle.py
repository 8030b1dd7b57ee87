"""One script of all calls on the embedded server gives equal results with both clients.

Each package runs the script `computed` in a process of its own against a server of its own. The servers are
seeded alike, so that both clients must find the same numbers and the same ids to the last digit.

Intended differences: the reference client repeats a request for five minutes after a 409, so its script does
not publish twice. Answers in this package may have further fields.

There is no variant with a server of JSON only, because the reference client sends training passes as protobuf
to every server. `tests/local/server/test_acceptance.py` runs the script against such a server.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from interop.programs import Programs

from tinker_sync.testing import LocalServer

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("acceptance_script.py")
OURS_ALONE = {"private twice"}
# This package refuses this value before sending, so the error lacks the server's category.
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
    "losses on the server": {"custom_loss_server_side": True},  # without torch like the first variant
}


def findings(programs: Programs, package: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Run the script with a package against a new server, and return its results by name."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "TINKER_TELEMETRY": "0"}
    with LocalServer(**flags) as server:
        options = json.dumps({"key": server.key, "exchange": bool(flags.get("pjwt_auth_enabled"))})
        environment = {**kept, **paths, "COMPUTED": options}
        command = [package, server.url, "computed"]
        return dict(programs.results(package, SCRIPT, *command, environment=environment))


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_every_call_of_both_clients(programs: Programs, flags: dict[str, Any]) -> None:
    with ThreadPoolExecutor(2) as pool:
        flights = [pool.submit(findings, programs, package, flags) for package in ("tinker", "tinker_sync")]
        theirs, ours = (flight.result() for flight in flights)
    assert len(theirs) > 70
    assert set(ours) - set(theirs) == OURS_ALONE
    del theirs["sampler"]["class"]
    differing = {
        name: (shown, value)
        for name, value in theirs.items()
        if (shown := what_both_show(ours[name], value)) != value
    }
    assert set(differing) == REFUSED_HERE


def what_both_show(ours: Any, theirs: Any) -> Any:
    """Return `ours` without the fields that `theirs` lacks, at every depth."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return {name: what_both_show(each, theirs[name]) for name, each in ours.items() if name in theirs}
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [what_both_show(*each) for each in zip(ours, theirs, strict=True)]
    return ours
