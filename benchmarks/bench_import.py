"""What `import tinker_sync` costs, beside the reference client in the same run.

Starts `python -X importtime -c 'import ...'` again and again, ours and the reference's in turn. Time is the
sum of what the report shows after the interpreter's own start, memory the peak of the whole process; of both
the median counts.

    python benchmarks/bench_import.py --reference-python /path/to/venv/with/reference/bin/python

Floors: a quarter of the reference's time, half of its memory. Exits with 1 when one is missed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TIME_FLOOR = 0.25
MEMORY_FLOOR = 0.5

# Printed by the measured process. VmHWM rather than ru_maxrss where there is one: the latter may still show
# the process that started it.
_PEAK_KIB = """
import os
if os.path.exists("/proc/self/status"):
    with open("/proc/self/status") as status:
        print(next(line.split()[1] for line in status if line.startswith("VmHWM:")))
else:
    import resource, sys
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(peak // 1024 if sys.platform == "darwin" else peak)
"""


class Cost(NamedTuple):
    time_ms: float
    peak_mib: float


def measure(python: str, module: str | None) -> Cost:
    """One fresh interpreter that imports `module`, or nothing."""
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run(
            [python, "-X", "importtime", "-c", f"import {module}\n{_PEAK_KIB}" if module else _PEAK_KIB],
            cwd=elsewhere,
            env={"PYTHONPATH": str(ROOT), "HOME": elsewhere},
            capture_output=True,
            text=True,
            check=True,
        )
    return Cost(import_ms(done.stderr), int(done.stdout) / 1024)


def import_ms(report: str) -> float:
    """What was imported after the interpreter's own start, from a report of `-X importtime`.

    >>> import_ms('''import time: self [us] | cumulative | imported package
    ... import time:       700 |       1200 | site
    ... import time:       250 |        250 |   typing
    ... import time:      1000 |       1250 | tinker_sync''')
    1.25
    """
    rows = [line.removeprefix("import time:").split("|") for line in report.splitlines()]
    start = next(number for number, row in enumerate(rows) if row[-1].strip() == "site")
    return sum(int(row[0]) for row in rows[start + 1 :]) / 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter with the dependencies of tinker_sync"
    )
    parser.add_argument("--reference-python", required=True, help="interpreter with the reference client")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()

    subjects = {
        "bare interpreter": (arguments.python, None),
        "bare interpreter (reference's)": (arguments.reference_python, None),
        "import tinker_sync": (arguments.python, "tinker_sync"),
        "import tinker_sync.types.optim": (arguments.python, "tinker_sync.types.optim"),
        "import tinker_sync.types.datum": (arguments.python, "tinker_sync.types.datum"),
        "import tinker": (arguments.reference_python, "tinker"),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in subjects}
    for python, module in subjects.values():
        measure(python, module)  # compiles what is not compiled yet and warms the file cache
    for _ in range(arguments.rounds):
        for name, (python, module) in subjects.items():
            costs[name].append(measure(python, module))
    medians = {
        name: Cost(
            statistics.median(cost.time_ms for cost in taken),
            statistics.median(cost.peak_mib for cost in taken),
        )
        for name, taken in costs.items()
    }
    print(f"medians of {arguments.rounds} interpreters each")
    print(f"{'':34}{'time ms':>10}{'peak MiB':>10}")
    for name, cost in medians.items():
        print(f"{name:34}{cost.time_ms:10.1f}{cost.peak_mib:10.1f}")
    ours, theirs = medians["import tinker_sync"], medians["import tinker"]
    verdicts = [
        verdict("time", ours.time_ms / theirs.time_ms, TIME_FLOOR),
        verdict("memory", ours.peak_mib / theirs.peak_mib, MEMORY_FLOOR),
    ]
    return 0 if all(verdicts) else 1


def verdict(what: str, ratio: float, floor: float) -> bool:
    print(f"{what}: ratio {ratio:.3f}, floor {floor}: {'ok' if ratio < floor else 'MISSED'}")
    return ratio < floor


if __name__ == "__main__":
    raise SystemExit(main())
