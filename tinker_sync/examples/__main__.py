"""Lists the examples: `python -m tinker_sync.examples`."""

from __future__ import annotations

import sys

import tinker_sync.examples

if __name__ == "__main__":
    sys.stdout.write(tinker_sync.examples.__doc__ or "")
