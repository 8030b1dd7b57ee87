"""Every table and the progress bar, at terminals of 80 and 160 columns, compared with stored screens.

`UPDATE_SCREENS=1 pytest tests/cli/test_screens.py` rewrites the files in `screens/`; review the difference.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len
from support.cli_runs import Run
from support.cli_world import EXPORT, KEY, NOW, OTHER_RUN, PATH, RUN, World
from support.terminal import at_terminal, frames, plain
from support.tinker_stub import StubServer

ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).with_name("screens")
SHOWER = str(Path(__file__).with_name("screens.py"))
HOURS = ("2026-03-01T09:00:00Z", "2026-03-01T10:00:00Z")
SCREENS = {
    "run-list": ["run", "list"],
    "run-list-all-columns": [
        *("run", "list", "-c", "id,model,owner,lora,updated,status,checkpoint,checkpoint_time")
    ],
    "run-list-cut": ["run", "list", "--limit", "1"],
    "run-info": ["run", "info", RUN],
    "checkpoint-list": ["checkpoint", "list"],
    "checkpoint-list-of-run": ["checkpoint", "list", "--run-id", OTHER_RUN],
    "checkpoint-info": ["checkpoint", "info", PATH],
    "checkpoint-delete-question": ["checkpoint", "delete", "--run-id", RUN],
    "model-list": ["model", "list"],
    "session-list": ["session", "list"],
    "auth-whoami": ["auth", "whoami"],
    "billing-usage": ["billing", "usage", *HOURS],
    "billing-checkpoint-storage": ["billing", "checkpoint-storage"],
    "not-found": ["run", "info", "run-9"],
    "probe": ["probe"],
    "help-of-delete": ["checkpoint", "delete", "--help"],
}


@pytest.fixture
def env() -> Iterator[dict[str, str]]:
    with StubServer(World()) as stub:
        url: str = stub.url  # type: ignore[attr-defined]
        yield {"TINKER_BASE_URL": url, "TINKER_API_KEY": KEY, "PYTHONPATH": str(ROOT)}


def normalize(text: str) -> str:
    """Return a text of the terminal without the port, which differs from run to run, and spaces at ends."""
    text = re.sub(r"127\.0\.0\.1:\d+ *", "127.0.0.1:PORT", text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def compare(name: str, shown: str) -> None:
    path = KEPT / f"{name}.txt"
    if os.environ.get("UPDATE_SCREENS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8"), name


@pytest.mark.parametrize("width", [80, 160])
def test_screens(env: dict[str, str], width: int) -> None:
    typed = "n\n"  # answers the question of delete
    code, text = at_terminal(
        [SHOWER, json.dumps(SCREENS), NOW], width=width, env=env, typed=typed, after="[y/N]"
    )
    assert code == 0, text
    assert "\x1b[1m" in text  # bold heads: it is a terminal
    parts = re.split(r"^=== (.+)\n", normalize(plain(text)), flags=re.MULTILINE)
    shown = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert list(shown) == list(SCREENS)
    for name, screen in shown.items():
        # Of the screen `probe`, compare only the first calls, because its list grows with the protocol.
        few = [re.sub("  +", "  ", line) for line in (*screen.splitlines()[:5], *screen.splitlines()[7:15])]
        kept = "\n".join([*few, ""]) if name == "probe" else screen
        compare(f"{name}-{width}", kept)
        # Only a line with a path may be wider than the terminal, so that a user can copy the path.
        wide = [line for line in screen.splitlines() if cell_len(line) > width and " tinker://" not in line]
        assert not wide


@pytest.mark.parametrize("width", [80, 160])
def test_the_bar(width: int) -> None:
    code, text = at_terminal([SHOWER, "bar"], width=width, env={"PYTHONPATH": str(ROOT)})
    assert code == 0, text
    pictures = [re.sub(r"\d+:\d\d:\d\d|-:--:--", "TIME", frame) for frame in frames(plain(text))]
    assert all(cell_len(frame) <= width for frame in pictures)
    wanted = ("1,375 of 2,500 checkpoints", "1,375 runs", "700.0 MB of 2.0 GB")
    last = [[frame for frame in pictures if words in frame][-1] for words in wanted]
    # The bar of an unknown total moves with time.
    last[1] = re.sub("[━╸]+", "…", last[1])
    compare(f"progress-{width}", "\n".join(last) + "\n")
    assert plain(text).endswith("\r\x1b[1A\x1b[2K")  # the bar is removed at the end


def test_no_colour_with_no_color_or_a_pipe(env: dict[str, str]) -> None:
    screens = json.dumps({"run-list": ["run", "list"]})
    _, text = at_terminal([SHOWER, screens, NOW], width=80, env={**env, "NO_COLOR": "1"})
    assert not re.search(r"\x1b\[[0-9;]*3\d", text)
    piped = subprocess.run(
        [sys.executable, SHOWER, screens, NOW],
        env={**os.environ, **env, "TERM": "xterm-256color"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    assert "\x1b" not in piped
    # Rows in a pipe are not fitted to a width.
    assert f"{RUN}  Qwen/Qwen3-30B-A3B-Instruct-2507  rank 32  3 minutes ago  ok" in piped


def test_a_question_and_a_hidden_key_at_a_terminal(env: dict[str, str]) -> None:
    line = ["-m", "tinker_sync", "checkpoint", "delete", EXPORT]
    code, text = at_terminal(line, width=80, env=env, typed="y\n", after="[y/N]")
    assert code == 0
    assert "Delete it? [y/N]" in text
    assert "1 checkpoint deleted" in text
    keyless = {name: value for name, value in env.items() if name != "TINKER_API_KEY"}
    login = ["-m", "tinker_sync", "auth", "login"]
    for typed, expected in (("\x03", 130), (f"{KEY}\r", 0)):
        code, text = at_terminal(login, width=80, env=keyless, typed=typed, after="not shown): ")
        assert code == expected, text
        assert KEY not in text
    code, text = at_terminal(["-m", "tinker_sync", "auth", "logout"], width=80, env=keyless)
    assert code == 0, text


def test_ctrl_c_at_a_question(env: dict[str, str]) -> None:
    """The question notices a Ctrl-C that interrupts no read, as one that comes just before the read does."""
    program = """
import signal, sys, threading
from tinker_sync.cli import main

def take_signals():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    threading.Event().wait()

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
threading.Thread(target=take_signals, daemon=True).start()
sys.exit(main())
"""
    line = ["-c", program, "checkpoint", "delete", EXPORT]
    code, text = at_terminal(line, width=80, env=env, typed="\x03", after="[y/N]")
    assert code == 130, text
    assert "Traceback" not in text


def test_control_characters_are_replaced(run: Run, world: World) -> None:
    world.runs[0]["user_metadata"] = {"note": "\x1b[31mred\nline\x07"}
    shown = run("run", "info", RUN).out
    assert "\x1b" not in shown
    assert "\x07" not in shown
