"""Programs that say `import tinker`, run with `tinker_sync.as_tinker`.

Each runs in processes of its own, with no other `tinker`, and beside another package of that name, as where
the reference client is installed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tinker_sync

ROOT = Path(tinker_sync.__file__).parents[1]
REFERENCE = "from another package"

WHAT = """
    import importlib.metadata, sys
    import tinker, tinker_sync
    import tinker.types.datum
    import tinker.types.sample_response as one
    from tinker.lib.public_interfaces.api_future import APIFuture
    from tinker.types import Datum
    same = (tinker is tinker_sync and one.SampleResponse is tinker_sync.SampleResponse
            and APIFuture is tinker_sync.APIFuture and Datum is tinker_sync.types.datum.Datum
            and tinker_sync.types.datum.__name__ == "tinker_sync.types.datum")
    print("ours" if same else tinker.ORIGIN, importlib.metadata.version("tinker"), *sys.argv[1:])
"""
OURS = "ours 0.38.0"


@pytest.fixture(params=["alone", "beside another"])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Return the environment of a process that finds this tree and, in one case, another package `tinker`."""
    path = [str(ROOT)]
    if request.param == "beside another":
        other = tmp_path / "site"
        (other / "tinker" / "types").mkdir(parents=True)
        (other / "tinker" / "__init__.py").write_text(f"ORIGIN = {REFERENCE!r}\n")
        (other / "tinker" / "types" / "__init__.py").write_text("")
        (other / "tinker-0.36.0.dist-info").mkdir()
        (other / "tinker-0.36.0.dist-info" / "METADATA").write_text("Name: tinker\nVersion: 0.36.0\n")
        path.insert(0, str(other))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    place = tmp_path / "program.py"
    place.write_text(textwrap.dedent(WHAT))
    return place


def run(environment: dict[str, str], *arguments: object, code: int = 0, cwd: Path | None = None) -> str:
    """Return what Python with these arguments prints; what it writes to stderr, if it must fail."""
    ended = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return (ended.stderr if code else ended.stdout).strip()


def as_tinker(environment: dict[str, str], *arguments: object, code: int = 0, cwd: Path | None = None) -> str:
    return run(environment, "-m", "tinker_sync.as_tinker", *arguments, code=code, cwd=cwd)


@pytest.mark.parametrize("options", [["-mtinker_sync.as_tinker"], ["-bm", "tinker_sync.as_tinker"]])
def test_the_option_m_in_one_word_with_others(
    environment: dict[str, str], script: Path, options: list[str]
) -> None:
    script.write_text(f"{textwrap.dedent(WHAT)}print(sys.flags.bytes_warning)")
    warns = int(options[0] == "-bm")
    assert run(environment, *options, script, "-m") == f"{OURS} -m\n{warns}"


def test_a_script_with_its_arguments(environment: dict[str, str], script: Path) -> None:
    assert as_tinker(environment, script, "--steps", "3") == f"{OURS} --steps 3"


def test_a_module(environment: dict[str, str], script: Path, tmp_path: Path) -> None:
    assert as_tinker(environment, "-m", "program", "x", cwd=tmp_path) == f"{OURS} x"


def test_the_command_line_under_the_other_name(environment: dict[str, str]) -> None:
    assert "tinker-sync" in as_tinker(environment, "-m", "tinker", "--help")


def test_options_of_the_interpreter_are_kept(environment: dict[str, str]) -> None:
    code = "import sys; print(sys.flags.dev_mode, sys.warnoptions)"
    shown = run(environment, "-X", "dev", "-W", "error", "-m", "tinker_sync.as_tinker", "-c", code)
    assert shown == run(environment, "-X", "dev", "-W", "error", "-c", code)


def test_a_tree_that_is_found_only_in_the_present_folder(script: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    package = tmp_path / "tree" / "tinker_sync"
    package.parent.mkdir()
    package.symlink_to(ROOT / "tinker_sync")  # an installed package is another one
    script.write_text(f"{textwrap.dedent(WHAT)}print(tinker_sync.__file__)")
    assert as_tinker(environment, script, cwd=package.parent) == f"{OURS}\n{package / '__init__.py'}"


@pytest.mark.parametrize("way", ["command", "import"])
def test_processes_that_a_program_starts(
    environment: dict[str, str], script: Path, tmp_path: Path, way: str
) -> None:
    starter = tmp_path / "starter.py"
    # The import leaves `os.environ` alone, so it reaches only the workers of multiprocessing.
    others = "subprocess.run([sys.executable, sys.argv[1]], check=True)" if way == "command" else "pass"
    first = "import tinker_sync.as_tinker" if way == "import" else ""
    starter.write_text(
        textwrap.dedent(f"""
            import multiprocessing, runpy, subprocess, sys
            {first}

            def work(path):
                runpy.run_path(path)
                sys.stdout.flush()

            if __name__ == "__main__":
                {others}
                for how in ("spawn", "fork", "forkserver"):
                    with multiprocessing.get_context(how).Pool(1) as pool:
                        pool.apply(work, (sys.argv[1],))
        """)
    )
    shown = as_tinker(environment, starter, script) if way == "command" else run(environment, starter, script)
    assert [line.split()[0] for line in shown.splitlines()] == ["ours"] * (4 if way == "command" else 3)


def test_pytest_with_workers(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "test_program.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(4))\n"
        "def test(n):\n    import tinker, tinker_sync\n    assert tinker is tinker_sync\n"
    )
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # others only cost time
    pytest_on = ("-m", "pytest", "-p", "xdist", "-p", "no:cacheprovider", "-q", tmp_path, "-n", 2)
    assert "4 passed" in as_tinker(environment, *pytest_on)
    (tmp_path / "conftest.py").write_text("import tinker_sync.as_tinker\n")
    assert "4 passed" in run(environment, *pytest_on)


def test_a_first_line_that_imports(environment: dict[str, str], script: Path) -> None:
    script.write_text("import tinker_sync.as_tinker\n" + script.read_text())
    assert run(environment, script) == OURS


def test_an_import_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tinker.py").write_text("")
    code = "import tinker\nimport tinker_sync.as_tinker"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    refusal = run(environment, "-c", code, code=1)
    assert "already imported" in refusal
    assert str(tmp_path) in refusal


def test_modules_that_do_not_exist(environment: dict[str, str]) -> None:
    code = (
        "from importlib.util import find_spec\n"
        "assert find_spec('tinker.nothing') is None and find_spec('tinker.types') is not None\n"
        "import tinker.nothing"
    )
    assert "No module named 'tinker.nothing'" in as_tinker(environment, "-c", code, code=1)


@pytest.mark.parametrize(("arguments", "code"), [((), 1), (("--help",), 0)])
def test_how_it_is_used(arguments: tuple[str, ...], code: int) -> None:
    assert "usage" in as_tinker({**os.environ, "PYTHONPATH": str(ROOT)}, *arguments, code=code)


def test_an_interpreter_that_ignores_the_environment_is_refused(script: Path) -> None:
    shown = run({**os.environ}, "-E", "-m", "tinker_sync.as_tinker", script, code=1, cwd=ROOT)
    assert "PYTHONPATH" in shown


@pytest.mark.skipif(importlib.util.find_spec("ipykernel") is None, reason="no kernel of Jupyter is installed")
@pytest.mark.filterwarnings("default")
def test_a_notebook(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    cells = ["import tinker_sync.as_tinker", textwrap.dedent(WHAT).replace("*sys.argv[1:]", "sep=' '")]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    nbclient.NotebookClient(notebook, timeout=300).execute()
    assert notebook.cells[1].outputs[0].text.strip() == OURS
