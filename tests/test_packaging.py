"""The metadata of the package fits its files."""

from __future__ import annotations

import ast
import configparser
import fnmatch
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sources import parsed, statements
from support.values import for_each

import tinker_sync
from tinker_sync.errors import EXTRAS as PACKAGES_OF_EXTRAS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tinker_sync"
MODULES = sorted(PACKAGE.rglob("*.py"))

TOP_LEVEL = {
    *("setup.cfg", "setup.py", "tinker_sync", "tests", "benchmarks"),
    *("CHANGELOG.md", "README.md", "LICENSE"),
}
# Files that a build or an interpreter leaves. They are not tracked.
LEFTOVERS = ("build", "dist", "*.egg-info", "__pycache__")


def config() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def requirements(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", requirement.strip())[0].lower()


CORE = requirements(config()["options"]["install_requires"])
OPTIONAL = ("speed", "cli", "local", "chat", "progress", "notebook", "docs", "ray", "torch", "otel", "http2")
EXTRAS = {extra: requirements(text) for extra, text in config()["options.extras_require"].items()}


def test_the_core_needs_six_packages() -> None:
    needed = {"requests", "urllib3", "attrs", "cattrs", "tokenizers", "numpy"}
    assert {name_of(line) for line in CORE} == needed


def test_errors_name_the_packages_of_each_extra() -> None:
    declared = {
        extra: tuple(
            line.partition(">=")[0]
            for line in EXTRAS[extra]
            if sys.version_info < (3, 14) or 'python_version < "3.14"' not in line
        )
        for extra in OPTIONAL
        if extra != "docs"  # no feature of the package needs it
    }
    assert {extra: names for extra, names in declared.items() if names} == PACKAGES_OF_EXTRAS


@pytest.mark.parametrize("extra", ["core", *OPTIONAL, "test"])
def test_every_requirement_has_a_lower_bound_and_no_upper(extra: str) -> None:
    for line in CORE if extra == "core" else EXTRAS[extra]:
        requirement, _, marker = line.partition("; ")
        assert re.fullmatch(r"[A-Za-z0-9_-]+(\[[a-z]+\])?>=[0-9.]+", requirement), line
        assert marker in ("", 'python_version < "3.14"'), line


def third_party(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield the top-level name of each third-party import of a module, with True if it runs at its import.

    Imports in functions and in `try` or `if` blocks have False.
    """
    for node, optional in statements(parsed(path), (ast.FunctionDef, ast.Try, ast.If)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        for name in names:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and top != "tinker_sync":
                yield top, not optional


@for_each("path", MODULES)
def test_what_a_module_imports_is_declared(path: Path) -> None:
    provided = {"attr": "attrs"}
    core = {name_of(line) for line in CORE}
    room = path.relative_to(PACKAGE).parts[0]
    # The command line and the embedded server may require their own extra.
    own = {name_of(line) for line in EXTRAS.get(room, [])}
    # Only pytest itself loads its plugin.
    own |= {"pytest"} if path.name == "pytest_plugin.py" else set()
    # The examples for other engines import these engines.
    own |= {"dask", "joblib"} if room == "examples" else set()
    offered = {name_of(line) for extra in OPTIONAL for line in EXTRAS[extra]}
    for name, needed in third_party(path):
        package = provided.get(name, name)
        if needed:
            assert package in core | own, f"{name} is needed by {path.name} and not required"
        else:
            # Only type checkers import typing_extensions, and they include it. requests depends on certifi.
            assert package in core | own | offered | {"typing_extensions", "certifi"}, (
                f"nothing offers {name}"
            )


@for_each("path", MODULES)
def test_every_module_has_a_docstring(path: Path) -> None:
    tree = parsed(path)
    assert len(ast.get_docstring(tree) or "") > 10
    if len(tree.body) > 1:
        assert ast.unparse(tree.body[1]) == "from __future__ import annotations"


def test_the_core_loads_without_any_extra() -> None:
    extras = [name_of(line) for extra in (*OPTIONAL, "test") for line in EXTRAS[extra]]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({extras!r}))\n"
        "import importlib, pkgutil, tinker_sync\n"
        "from tinker_sync import *\n"
        "from tinker_sync.types import *\n"
        "for room in ('wire', 'transport', 'runtime'):\n"
        "    package = importlib.import_module(f'tinker_sync.{room}')\n"
        "    for found in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(found.name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_version_is_written_once() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", tinker_sync.__version__)
    assert tinker_sync.__title__ == "tinker_sync"
    assert config()["metadata"]["version"] == "attr: tinker_sync._version.__version__"


def test_the_installed_version_is_this_one() -> None:
    try:
        installed = importlib.metadata.distribution("tinker-sync")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("runs from the tree, nothing is installed")
    if json.loads(installed.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable"):
        pytest.skip("an editable installation keeps the version of the day on which it was made")
    assert installed.version == tinker_sync.__version__


def test_the_python_range_is_declared() -> None:
    declared = config()
    assert declared["options"]["python_requires"] == ">=3.10"
    minors = re.findall(r"Python :: 3\.(\d+)", declared["metadata"]["classifiers"])
    assert minors == ["10", "11", "12", "13", "14", "15"]


def test_the_typing_marker_ships() -> None:
    assert (PACKAGE / "py.typed").read_text(encoding="utf-8") == ""
    assert "py.typed" in config()["options.package_data"]["tinker_sync"].split()


def test_the_top_level_is_tidy() -> None:
    shown = {
        name
        for name in os.listdir(ROOT)
        if not name.startswith(".") and not any(fnmatch.fnmatch(name, left) for left in LEFTOVERS)
    }
    assert shown == TOP_LEVEL


def test_the_changelog_begins_with_this_version_or_what_comes_after_it() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    assert next(each for each in headings if each != "Unreleased") == tinker_sync.__version__
    assert headings.index(tinker_sync.__version__) <= 1
    assert "(tinker_sync/docs/upgrade.md)" in text.partition(f"## {tinker_sync.__version__}\n")[2]


def test_one_command_runs_all_checks() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text(encoding="utf-8").startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=120)
