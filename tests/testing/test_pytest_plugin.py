"""The fixtures in a separate pytest run, registered in all three ways at once."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = "tinker_sync.testing.pytest_plugin"

TESTS = """
import pytest
from tinker_sync.testing import FaultPlan, faults

ADDRESSES = set()

@pytest.fixture(scope="session")
def tinker_server_options():
    return {"model": "tinker-sync/random", "key": "tml-of-our-own", "pace": 0.02}

@pytest.mark.parametrize("turn", [1, 2])
def test_each_has_its_own(turn, tinker_server, tinker_service):
    assert tinker_server.calls == [] and not tinker_server.plan.rules
    tinker_server.plan = FaultPlan().on("get_server_capabilities", faults.status(503), nth=1)
    [model] = tinker_service.get_server_capabilities().supported_models
    assert model.model_name == "tinker-sync/random"
    assert [call.status for call in tinker_server.calls_to("get_server_capabilities")] == [503, 200]
    assert (tinker_server.key, tinker_server.pace) == ("tml-of-our-own", 0.02)
    assert tinker_service.holder.settings.base_url == tinker_server.url
"""

LOADED = """
import sys

def test_nothing_heavy_is_loaded():
    heavy = {"numpy", "requests", "urllib3", "attrs", "attr", "cattrs", "tokenizers", "sqlite3"}
    ours = {
        module.__spec__.name for name, module in sys.modules.items()
        if name.startswith("tinker_sync") and module.__spec__ is not None  # other names of modules have none
    }
    assert ours <= {
        "tinker_sync", "tinker_sync._base", "tinker_sync._base.lazy", "tinker_sync._version",
        "tinker_sync.testing", "tinker_sync.testing._entry", "tinker_sync.testing.pytest_plugin",
    }, ours
    assert "tinker_sync.testing.pytest_plugin" in ours
    assert not heavy & BEFORE, heavy & BEFORE
"""

CONFTEST = """
import sys, builtins
builtins.BEFORE = set(sys.modules)
"""


_WITHOUT = [f"-pno:{name}" for name in ("hypothesispytest", "xdist", "xdist.looponfail")]


def run(folder: Path, *arguments: str, path: tuple[Path, ...] = ()) -> str:
    """Run pytest in a folder and return its output."""
    done = subprocess.run(
        # Other plugins take most of the start.
        [sys.executable, "-m", "pytest", "-q", "-W", "error", *_WITHOUT, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *path)))},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return a folder with the metadata of an installed package, including its entry points."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    site = tmp_path / "site"
    written = site / "tinker_sync-0.0.0.dist-info"
    written.mkdir(parents=True)
    (written / "METADATA").write_text("Metadata-Version: 2.1\nName: tinker-sync\nVersion: 0.0.0\n")
    entry = config["options.entry_points"]["pytest11"].strip()
    (written / "entry_points.txt").write_text(f"[pytest11]\n{entry}\n")
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tinker_sync").rglob("*.py")]
    (written / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    return site


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    made.mkdir()
    (made / "test_mine.py").write_text(TESTS, encoding="utf-8")
    return made


def test_each_test_has_its_own_server(folder: Path, installed: Path) -> None:
    (folder / "conftest.py").write_text(f"pytest_plugins = [{PLUGIN!r}]\n", encoding="utf-8")
    assert "2 passed" in run(folder, "-p", PLUGIN, path=(installed,))


def test_the_plugin_loads_nothing_heavy(tmp_path: Path, installed: Path) -> None:
    folder = tmp_path / "light"
    folder.mkdir()
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (folder / "test_light.py").write_text(LOADED, encoding="utf-8")
    assert "1 passed" in run(folder, path=(installed,))
