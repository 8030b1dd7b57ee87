"""Comparison with the reference client; runs only where that client is installed.

`pip install -e '.[interop,test]' && pytest tests/interop` runs it. Without the reference client nothing here
is imported, so the default suite does not need it; but for the engine and the
tokenizers, which are compared with torch and transformers and skip where those are missing.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

_WITHOUT_IT = {"conftest.py", "test_engine_oracle.py", "test_text_oracle.py", "test_pictures_oracle.py"}

_everything = {path.name for path in Path(__file__).parent.glob("*.py")}
collect_ignore = [] if importlib.util.find_spec("tinker") else sorted(_everything - _WITHOUT_IT)
