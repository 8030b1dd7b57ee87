"""What a server without torch says to a loss."""

from __future__ import annotations

import sys

import pytest

from tinker_sync.local.engine.custom_graph import custom_rule
from tinker_sync.types import CustomLossGraph


def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match=r"need torch on this server: pip install 'tinker-sync\[torch\]'"):
        custom_rule([], CustomLossGraph(nodes=[]))
