"""The model of costs in README.md, compared with the figures of a run.

Each line has a prediction, which follows from other figures of the same run, and the measured figure.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

BENDS = 1.5
"""A curve bends upward if its last point costs this many times its lowest one; less is noise."""

Points = Sequence[tuple[int, float]]


def check_model(
    results: Mapping[str, Any],
    curves: Mapping[str, Mapping[str, Points]],
    subject: str,
    sizes: Mapping[str, int],
) -> Iterator[str]:
    """Yield a line for each part of the model, if the run has figures for it.

    Args:
        results: the figures of each run of a scenario, by scenario and subject.
        curves: the points of each curve, by curve and subject.
        subject: the client to check.
        sizes: the size of each scenario in this run.
    """
    if "crowd" in results:
        crowd = _medians(results["crowd"][subject])
        allowed, rate = 1e3 / crowd["cpu_ms"], 1e3 / crowd["wall_ms"]
        yield f"one core allows 1 / CPU a sample: {allowed:,.0f} samples a second, measured {rate:,.0f}"
    for name in ("many", "together"):
        if name in results:
            many = _medians(results[name][subject])
            least_s, each_kb = max(many["cpu_s"], 2.0), many["growth_mb"] * 1e3 / sizes[name]
            yield (
                f"{name}: wall is at least its CPU and the server's 2 s: {least_s:.1f} s, measured "
                f"{many['wall_s']:.1f} s; a waiting sample takes {each_kb:.1f} KB"
            )
    if "storm" in results:
        storm = _medians(results["storm"][subject])
        least_s = sizes["storm"] / 200 * 0.5
        yield f"storm: the server works on 200, 0.5 s each: {least_s:.1f} s, measured {storm['wall_s']:.1f} s"
    if "pass" in results:
        a_pass, copy = _medians(results["pass"][subject]), _medians(results["pass"]["memcpy"])
        yield (
            f"a byte of a pass costs some three copies: {3e3 * copy['cpu_s']:.0f} ms for 50 MB, measured "
            f"{a_pass['cpu_s'] * 1e3:.0f} ms, the answer of 8 MB included"
        )
    for name, found in curves.items():
        points = found[subject]
        (size, last), lowest = points[-1], min(cost for _, cost in points)
        bends = ", THE CURVE BENDS UPWARD" if last > BENDS * lowest else ""
        yield f"{name}: a piece at {size:,} costs {last / lowest:.2f} times the lowest{bends}"


def _medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}
