"""The demo as a command: its arguments, and its outcome as an exit code."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tinker_sync.demo.course import run
from tinker_sync.demo.result import Steps


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and give its exit code: 0 if the model learnt what it should, 1 if not.

    Args:
        argv: arguments; None: those of the command line.

    >>> main(["--help"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    SystemExit: 0
    """
    usual = Steps()
    parser = argparse.ArgumentParser(
        prog="tinker-sync demo",
        description="Fine-tune the built-in model by examples and by reward, in under a minute.",
    )
    parser.add_argument("--base-url", help="another server than the embedded one, which is started for this")
    parser.add_argument("--model", help="what to fine-tune instead of the built-in model")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal curves")
    parser.add_argument("--png", metavar="FILE", help="also draw the curves into a file")
    parser.add_argument("--supervised", type=int, default=usual.supervised, metavar="STEPS")
    parser.add_argument("--reinforced", type=int, default=usual.reinforced, metavar="STEPS")
    asked = parser.parse_args(argv)
    steps = Steps(supervised=asked.supervised, reinforced=asked.reinforced)
    return run(asked.base_url, seed=asked.seed, png=asked.png, steps=steps, model=asked.model).exit_code
