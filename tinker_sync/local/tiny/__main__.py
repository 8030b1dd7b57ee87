"""Prints the scores of the built-in model, or of one like it in a folder that is named."""

from __future__ import annotations

import sys
from pathlib import Path

from tinker_sync.local.tiny.scores import Model, measure


def main(argv: list[str]) -> int:
    """Measure and print."""
    model = Model(Path(argv[0]) if argv else None)
    print(f"{model.weights.count:,} parameters")  # noqa: T201  # what the command is for
    for name, value, chance in measure(model):
        print(f"{name:26} {value:8.3f}   chance {chance:8.3f}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
