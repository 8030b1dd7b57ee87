"""Replaces itself with `tinker_sync`; see `tinker_sync.as_tinker`."""

from __future__ import annotations

import tinker_sync.as_tinker  # noqa: F401  # it replaces this module in `sys.modules`
