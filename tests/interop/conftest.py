"""Comparison with the reference client; runs only where that client is installed.

`pip install -e '.[interop,test]' && pytest tests/interop` runs it. Without the reference client nothing here
is imported, so the default suite does not need it.
"""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("tinker") else ["*"]
