"""A server without torch refuses uploaded losses."""

from __future__ import annotations

import sys

import pytest

from tinker_sync.local.engine.custom_graph import compile_custom_loss
from tinker_sync.types import CustomLossGraph


def test_the_error_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match=r"need torch on this server: pip install torch"):
        compile_custom_loss([], CustomLossGraph(nodes=[]))
