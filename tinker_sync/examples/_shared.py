"""Helpers of the examples: their options, a client, and output."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import tinker_sync as tinker
from tinker_sync.demo.screen import Screen

TINY = "tinker-sync/tiny"


class Options(argparse.Namespace):
    """The options of the examples."""

    base_url: str
    model: str
    steps: int
    seed: int

    def rate(self, tiny: float, large: float) -> float:
        """Return `tiny`, the learning rate for the tiny model, or `large` for any other model."""
        return tiny if self.model == TINY else large


def parse(argv: Sequence[str] | None, description: str | None, *, steps: int) -> Options:
    """Read the options of an example. The first line of `description` is its help text."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--base-url", default="local", help="the server; the embedded one by default")
    parser.add_argument("--model", default=TINY, help="the base model")
    parser.add_argument("--steps", type=int, default=steps, help="how long to go on")
    parser.add_argument("--seed", type=int, default=1, help="equal seeds repeat a run")
    return parser.parse_args(argv, namespace=Options())


def connect(options: Options) -> tinker.ServiceClient:
    """Return a client for the server that the options name."""
    return tinker.ServiceClient(base_url=options.base_url)


def write(text: str) -> None:
    """Write a line of the example's output."""
    Screen(sys.stdout).write(text)


def draw(title: str, values: Sequence[float]) -> None:
    """Draw values as a curve in the terminal."""
    Screen(sys.stdout).curve(title, values)
