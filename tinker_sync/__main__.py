"""`python -m tinker_sync`: the command line."""

from __future__ import annotations

import sys

from tinker_sync.cli import main

if __name__ == "__main__":
    sys.exit(main())
