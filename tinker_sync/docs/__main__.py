"""Writes the reference page: `python -m tinker_sync.docs [FILE]`, by default `tinker-sync.html`."""

from __future__ import annotations

import sys
from pathlib import Path

from tinker_sync.docs.page import make_page


def main(arguments: list[str]) -> Path:
    """Write the page to the file that the first argument names, and return the path of the file."""
    place = Path(arguments[0] if arguments else "tinker-sync.html")
    place.write_text(make_page(), encoding="utf-8")
    sys.stdout.write(f"wrote {place} ({place.stat().st_size / 1e6:.1f} MB)\n")
    return place


if __name__ == "__main__":
    main(sys.argv[1:])
