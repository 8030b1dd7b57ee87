"""Copy the notebook of this package, which trains, samples and shows results, to the working directory."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

NOTEBOOK = Path(__file__).with_name("fine_tuning.ipynb")


def main() -> None:
    """Copy the notebook to the file that the command line names, or to `fine_tuning.ipynb`."""
    to = shutil.copyfile(NOTEBOOK, sys.argv[1] if len(sys.argv) > 1 else NOTEBOOK.name)
    print(f"wrote {to}; open it with jupyter lab {to}")


if __name__ == "__main__":
    main()
