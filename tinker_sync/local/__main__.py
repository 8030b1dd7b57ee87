"""The entry point of `python -m tinker_sync.local`."""

from __future__ import annotations

import sys

from tinker_sync.local.running import main

if __name__ == "__main__":
    sys.exit(main())
