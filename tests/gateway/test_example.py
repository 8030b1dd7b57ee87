"""The example of an agent is trained through chats alone."""

from __future__ import annotations

import pytest
from support.isolation import hold_embedded_server

from tinker_sync.examples import agents


def test_an_agent_is_trained_through_chats(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "STEPS", 2)
    monkeypatch.setattr(agents, "GROUP", 4)
    let_go = hold_embedded_server()
    try:
        agents.main()
    finally:
        let_go()
    shown = capsys.readouterr().out
    assert shown.count("mean reward") == 2
