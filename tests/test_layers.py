"""Packages import only from packages above them. No module imports an event loop or the reference client.

The steps of the checks name tests that exist.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sources import statements

import tinker_sync

ROOT = Path(__file__).parents[1]
# The packages from top to bottom. A module may import from its own package and from packages above it.
ROOMS = (
    *("_version", "_base", "errors", "_embedded"),
    *("config", "types", "wire", "transport", "runtime", "auth"),
    *("losses", "data", "insight", "batch", "loop", "gateway"),
    *("clients", "ray", "local", "testing", "examples", "cli"),
    *("__main__", "lib", "as_tinker"),
)
# For each package, those above it that it must not import either. For example, types and codecs are pure, and
# the embedded server uses no client.
CLOSED = {
    "types": {"config"},
    "wire": {"config"},
    "data": {"config", "wire", "transport", "auth", "runtime"},
    "loop": {"config", "wire", "transport", "auth", "runtime"},
    "batch": {"config", "transport", "auth", "losses", "data"},
    "gateway": {"config", "transport", "auth", "runtime", "losses", "insight", "batch", "loop"},
    "losses": {"config", "transport", "auth"},
    "local": {"transport", "runtime", "losses", "clients"},
    "ray": {"wire", "transport", "auth"},
    "cli": {"runtime"},
    "lib": {"transport", "local", "testing", "cli"},
    "as_tinker": {*ROOMS} - {"_version"},
}
# Modules that may import from a lower package, on first use.
SEAMS = {"_embedded.py": {"local"}, "_base/displays.py": {"insight"}}
# Rooms that are built on the public names of the package and on the events of `_base`, and the rooms of the
# core, of which they use no other name.
OUTER = {"batch", "loop", "insight", "losses", "data", "ray", "testing", "cli", "examples", "gateway"}
CORE = {"config", "wire", "transport", "runtime", "clients"}
# What an outer room may use of the core besides: `testing` plays the server, so it reads requests and writes
# answers; `batch` keeps answers in files in the form in which they came; `gateway` parses requests of agents.
CODECS = {"testing": {"wire"}, "batch": {"wire"}, "gateway": {"wire"}}
FOREIGN = {"tinker"}
NOT_AT_IMPORT = {"asyncio"}
# The modules that run on an event loop: that of the embedded server, or that of a task that awaits a call.
ON_A_LOOP = (
    "runtime/awaiting.py",
    "local/server/",
    "testing/_middleware.py",
    "testing/tapes.py",
)


def imported(node: ast.AST) -> list[str]:
    """Return the full names that an import statement imports, such as `a.b.c` for `from a.b import c`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
    return []


def is_for_types(tree: ast.Module, node: ast.AST) -> bool:
    """Return True for an import under `if TYPE_CHECKING`."""
    blocks = [
        one for one in tree.body if isinstance(one, ast.If) and ast.unparse(one.test) == "TYPE_CHECKING"
    ]
    return any(node in block.body for block in blocks)


def violations(package: Path) -> Iterator[str]:
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        room = place.parts[0].removesuffix(".py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if room not in (*ROOMS, "__init__"):
            yield f"{place}: {room} is not a room"
            continue
        for node, later in statements(tree, (ast.FunctionDef,)):
            for name in imported(node):
                top, _, inside = name.partition(".")
                target = inside.partition(".")[0]
                if top in FOREIGN or not top:
                    yield f"{place}:{node.lineno}: imports {name}"
                on_a_loop = place.as_posix().startswith(ON_A_LOOP)
                if top in NOT_AT_IMPORT and not later and not on_a_loop:
                    yield f"{place}:{node.lineno}: imports {name} when it is loaded"
                # `__init__` lists all names and loads nothing. The examples import from it like users.
                whole = not target and room in ("examples", "as_tinker")
                if top != package.name or room in ("__init__", target) or whole:
                    continue
                if target in SEAMS.get(place.as_posix(), ()) and (later or is_for_types(tree, node)):
                    continue
                if target not in ROOMS[: ROOMS.index(room)] or target in CLOSED.get(room, ()):
                    yield f"{place}:{node.lineno}: {room} imports from {target or package.name}"


def threads_of_the_library(package: Path) -> list[str]:
    """Return the places that make a `threading.Thread`, whose start Ctrl-C may leave with a lock taken."""
    return [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("threading.Thread", "Thread")
    ]


def leaks(package: Path) -> Iterator[tuple[str, str]]:
    """Yield the modules of outer rooms that use a name of the core that is not public, with its room."""
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        if place.parts[0].removesuffix(".py") not in OUTER:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in imported(node):
                top, _, inside = name.partition(".")
                room, _, rest = inside.partition(".")
                if (
                    top == package.name
                    and room in CORE - CODECS.get(place.parts[0], set())
                    and rest.rpartition(".")[2] not in tinker_sync.__all__
                ):
                    yield place.as_posix(), room


def test_outer_rooms_use_public_names_of_the_core() -> None:
    assert list(leaks(Path(tinker_sync.__file__).parent)) == []


def test_a_leak_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "tinker_sync" / "batch" / "samples.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "from tinker_sync.runtime.futures import APIFuture\n"
        "if TYPE_CHECKING:\n    from tinker_sync.runtime.send_queue import SendQueue\n"
    )
    assert list(leaks(tmp_path / "tinker_sync")) == [("batch/samples.py", "runtime")]


def test_imports_point_up() -> None:
    assert list(violations(Path(tinker_sync.__file__).parent)) == []


def test_the_package_is_what_was_read() -> None:
    package = Path(tinker_sync.__file__).parent
    assert {"types", "wire", "transport", "errors"} <= {path.stem for path in package.iterdir()}


@pytest.mark.parametrize(
    ("place", "line", "complaint"),
    [
        ("types/datum.py", "from tinker_sync.wire.json import encode", "types imports from wire"),
        ("types/datum.py", "import tinker_sync.wire.json", "types imports from wire"),
        ("types/datum.py", "def f():\n    from tinker_sync import wire", "types imports from wire"),
        ("types/datum.py", "if TYPE_CHECKING:\n    from tinker_sync import wire", "types imports from wire"),
        ("types/datum.py", "from tinker_sync import Datum", "types imports from Datum"),
        ("types/datum.py", "import tinker_sync", "types imports from tinker_sync"),
        ("errors.py", "from tinker_sync.types import Datum", "errors imports from types"),
        ("local/server.py", "from tinker_sync.clients import service", "local imports from clients"),
        ("wire/json.py", "from tinker_sync.config import Settings", "wire imports from config"),
        ("wire/json.py", "from . import proto", "imports ..proto"),
        ("wire/json.py", "try:\n    import asyncio\nfinally:\n    pass", "imports asyncio when it is loaded"),
        ("wire/json.py", "import asyncio", "imports asyncio when it is loaded"),
        ("cli/main.py", "def f():\n    import tinker.types", "imports tinker.types"),
        ("__init__.py", "from tinker import Datum", "imports tinker.Datum"),
        ("_embedded.py", "from tinker_sync.local import launch", "_embedded imports from local"),
        ("utils.py", "import os", "utils is not a room"),
    ],
)
def test_a_violation_is_seen(tmp_path: Path, place: str, line: str, complaint: str) -> None:
    path = tmp_path / "tinker_sync" / place
    path.parent.mkdir(parents=True)
    path.write_text(line, encoding="utf-8")
    found = list(violations(tmp_path / "tinker_sync"))
    assert len(found) == 1
    assert found[0].endswith(complaint)


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("wire/json.py", "from tinker_sync.types import Datum\nfrom tinker_sync.wire import endpoints"),
        ("transport/http.py", "from tinker_sync.errors import APIError\nimport requests"),
        ("__init__.py", "from tinker_sync.types import Datum"),
        ("local/server.py", "def run():\n    import asyncio"),
        ("_embedded.py", "def start():\n    from tinker_sync.local import launch"),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, place: str, line: str) -> None:
    path = tmp_path / "tinker_sync" / place
    path.parent.mkdir(parents=True)
    path.write_text(line, encoding="utf-8")
    assert list(violations(tmp_path / "tinker_sync")) == []


def test_threads_are_started_where_no_signal_comes(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import threading\nthreading.Thread(target=print).start()")
    assert threads_of_the_library(tmp_path) == ["a.py:2"]
    assert threads_of_the_library(Path(tinker_sync.__file__).parent) == []


def test_every_place_in_the_steps_of_the_checks_exists() -> None:
    """A step that names a place which has moved runs no test at all."""
    text = (ROOT / ".ci" / "run").read_text("utf-8")
    places = set(re.findall(r"(?<![\w/.'-])(?:tests|tinker_sync)/[\w./*]+", text))
    assert len(places) > 20
    assert [place for place in sorted(places) if not list(ROOT.glob(place))] == []
