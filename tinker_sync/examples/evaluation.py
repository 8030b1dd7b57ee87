"""An evaluation of 2,000 prompts that survives a crash: a second run goes on where the first broke off."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tinker_sync as tinker
from tinker_sync.examples._shared import connect, draw, parse, write

WINDOW = 100


def main(argv: Sequence[str] | None = None, file: Path | None = None) -> list[float]:
    """Sample answers to sums in two runs, the first of which stops early.

    Return the share of right answers in each group of `WINDOW` prompts. The answers are saved in `file`, or
    without it in a new temporary directory.
    """
    options = parse(argv, __doc__, steps=2000)
    rng = random.Random(options.seed)
    sums = [(rng.randint(1, 49), rng.randint(1, 49)) for _ in range(options.steps)]
    prompts = [f"Q: {one}+{two}=" for one, two in sums]
    params = tinker.SamplingParams(max_tokens=6, temperature=0.0, stop=["\n"])
    place = file or Path(tempfile.mkdtemp(prefix="evaluation-"), "answers.jsonl")
    right: list[bool] = []
    for attempt in ("the first run", "the second run"):
        fresh = 0
        right.clear()
        with connect(options) as service:
            sampling = service.create_sampling_client(base_model=options.model)
            for item in sampling.map(prompts, params, save_to=place):
                one, two = sums[item.index]
                right.append(item.ok and item.texts[0].strip() == str(one + two))
                fresh += not item.saved
                if attempt == "the first run" and len(right) == options.steps // 3:
                    break  # simulates a crash
        write(f"{attempt}: {fresh} samples asked for, {len(right) - fresh} read from {place}")
    write(f"{sum(right) / len(right):.1%} of {len(right)} answers are right")
    shares = [
        sum(right[at : at + WINDOW]) / len(right[at : at + WINDOW]) for at in range(0, len(right), WINDOW)
    ]
    draw(f"share of right answers in each {WINDOW}", shares)
    return shares


if __name__ == "__main__":
    main()
