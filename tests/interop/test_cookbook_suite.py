"""The cookbook's own tests of what it does with the client end alike with either client, test by test.

Only its source archive has them; `COOKBOOK_SOURCE` names the folder of the unpacked archive. Of its files,
those run that call the client or build its types, and need neither the hub nor a key.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = os.environ.get("COOKBOOK_SOURCE")
PATIENCE_S = 600  # half a minute on a quiet machine

FILES = (
    "capture/instrument_test.py", "checkpoint_utils_test.py", "completers_test.py",
    "distillation/sdft_token_alignment_test.py", "eval/benchmarks/resume_metrics_test.py",
    "eval/custom_evaluators_test.py", "rl/async_drain_exports_test.py", "rl/async_training_test.py",
    "rl/constant_batch_cost_test.py", "rl/cost_metrics_test.py", "rl/data_processing_test.py",
    "rl/discarded_group_cost_test.py", "rl/kl_scoring_test.py", "rl/message_env_test.py",
    "rl/metric_util_test.py", "rl/min_viable_group_test.py", "rl/multiturn_weight_assignment_test.py",
    "rl/rollout_error_resilience_test.py", "rl/rollout_presets_test.py", "rl/rollout_runner_test.py",
    "rl/rollout_semantics_regression_test.py", "rl/stream_minibatch_shutdown_test.py",
    "rl/termination_reward_test.py", "rl/train_test.py", "supervised/common_test.py", "utils/trace_test.py",
    "weights/download_test.py",
)  # fmt: skip

# The test lists the methods of the training client, and fails for each that the cookbook does not trace. This
# package has `forward_custom` besides.
DIFFERENT = {"test_sdk_client_instrumentation_covers_unified_methods": ("passed", "failure")}

FEWEST = 500
"""Files that are missing or collect nothing must not make the comparison empty."""

pytestmark = pytest.mark.skipif(SOURCE is None, reason="COOKBOOK_SOURCE names no source of the cookbook")


def outcomes(results: Path, *options: str) -> dict[tuple[str, str], str]:
    """Run the files by a Python with these options, and return how each test ended."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TINKER_", "PYTEST_"))}
    done = subprocess.run(
        [
            sys.executable, *options, "-m", "pytest", "-q", "--tb=native", "-p", "no:cacheprovider",
            "-p", "no:tinker_sync", f"--junitxml={results}", *(f"tinker_cookbook/{name}" for name in FILES),
        ],
        cwd=SOURCE,
        env={**kept, "PYTHONPATH": str(ROOT), "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )  # fmt: skip
    # 0: all passed, 1: some failed; the others mean that not all ran.
    assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-3000:]
    found = {}
    for case in ET.parse(results).getroot().iter("testcase"):
        ended = [each.tag for each in case if each.tag in ("failure", "error", "skipped")]
        found[case.get("classname", ""), case.get("name", "")] = ended[0] if ended else "passed"
    return found


def test_each_test_of_the_cookbook_ends_alike_with_either_client(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        ours = pool.submit(outcomes, tmp_path / "ours.xml", "-m", "tinker_sync.as_tinker")
        theirs = pool.submit(outcomes, tmp_path / "theirs.xml").result()
    found = ours.result()
    ends = {test: (theirs.get(test), found.get(test)) for test in {*theirs, *found}}
    different = {test: two for test, two in ends.items() if two[0] != two[1]}
    assert {name: two for (_, name), two in different.items()} == DIFFERENT, different
    assert Counter(theirs.values())["passed"] >= FEWEST, Counter(theirs.values())
