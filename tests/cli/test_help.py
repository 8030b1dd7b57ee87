"""Every command has help, an example and a line in the guide; mistyped lines and warnings are explained."""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from support.cli_runs import Run
from support.cli_world import World
from support.tinker_stub import Answer
from support.values import for_each

import tinker_sync
from tinker_sync.cli.failures import BROKEN_PIPE, EXIT_CODES
from tinker_sync.cli.framework import Command, Group
from tinker_sync.cli.main import root
from tinker_sync.config.address import DEFAULT_BASE_URL

ROOT = Path(tinker_sync.__file__).parents[1]
GUIDE = (ROOT / "tinker_sync" / "docs" / "command-line.md").read_text(encoding="utf-8")


def commands(group: Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Command, str]]:
    """Yield the path, such as `("run", "list")`, the object and the short help of each command of a group."""
    for name in group.list_commands(click.Context(group)):
        found = group.get_command(click.Context(group), name)
        if isinstance(found, Group):
            yield from commands(found, (*path, name))
        else:
            assert isinstance(found, Command)
            yield (*path, name), found, group.table[name][1]


COMMANDS = list(commands(root()))


def fresh(*arguments: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, done.stderr


@for_each(("path", "found", "short"), COMMANDS)
def test_help_ends_with_an_example(run: Run, path: tuple[str, ...], found: Command, short: str) -> None:
    done = run(*path, "-h")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"Usage: tinker-sync {' '.join(path)} ")
    assert len(found.help or "") > 10
    assert short.endswith((".", "?"))
    example = done.out.partition("Example:\n")[2]
    assert f"tinker-sync {' '.join(path)}" in example
    for option in found.params:
        assert isinstance(option, click.Argument) or getattr(option, "help", None) or option.show_default
    assert max(len(line) for line in done.out.splitlines()) <= 110


@for_each(("path", "found", "short"), COMMANDS)
def test_the_example_parses(path: tuple[str, ...], found: Command, short: str) -> None:
    line = next(line for line in found.example.splitlines() if line.startswith(("tinker-sync", "eval")))
    words = shlex.split(line.replace('eval "$(', "").replace(')"', ""))
    assert words[1 : 1 + len(path)] == list(path)
    context = found.make_context("tinker-sync", words[1 + len(path) :])
    context.close()


@for_each(("path", "found", "short"), COMMANDS)
def test_the_guide_lists_the_command(path: tuple[str, ...], found: Command, short: str) -> None:
    assert f"`{' '.join(path)}`" in GUIDE


def test_the_guide_lists_the_exit_codes() -> None:
    table = dict(re.findall(r"^\| (\d+) \| (.+) \|$", GUIDE, flags=re.MULTILINE))
    assert {int(code): words for code, words in table.items()} == EXIT_CODES


def test_help_of_groups_loads_no_command_and_no_client() -> None:
    code = (
        "import sys; from tinker_sync.cli import main\n"
        "main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    )
    for line in (["--help"], ["checkpoint", "--help"]):
        out, err = fresh("-c", code, *line)
        assert "Commands:" in out
        heavy = {
            "numpy", "requests", "rich", "tokenizers", "cattrs", "tinker_sync.errors",
            "tinker_sync.clients",
        }  # fmt: skip
        assert heavy & set(err.split()) == set()


def test_without_the_extra_it_prints_how_to_install_it() -> None:
    code = (
        "import sys; sys.modules.update(click=None, rich=None)\n"
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name in ('click', 'rich') else real(name, *more)\n"
        "from tinker_sync.cli import main; print(main(['--help']))"
    )
    out, err = fresh("-c", code)
    assert out == "1\n"
    assert "pip install click rich" in err


def test_the_version_as_an_option(run: Run) -> None:
    for line in (["--version"], ["--version", "run", "list"]):
        done = run(*line)
        assert (done.code, done.out, done.err) == (0, f"tinker-sync {tinker_sync.__version__}\n", "")


@pytest.mark.parametrize("line", [("frob",), ("run", "frob"), ("run", "list", "--frob"), ("run", "info")])
def test_unknown_commands_and_options(run: Run, line: tuple[str, ...]) -> None:
    done = run(*line)
    assert (done.code, done.out) == (2, "")
    assert "Usage: " in done.err


def test_completion_knows_commands_and_options(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_TINKER_SYNC_COMPLETE", "bash_complete")
    for words, place, wanted in (
        ("tinker-sync che", 1, "plain,checkpoint"),
        ("tinker-sync checkpoint li", 2, "plain,list"),
        ("tinker-sync run list --fo", 3, "plain,--format"),
        ("tinker-sync run list --format js", 4, "plain,json"),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(place))
        with pytest.raises(SystemExit):
            run()
        assert wanted in capsys.readouterr().out.splitlines()


@for_each(
    "line", ["version", "version --format json", "--help", "run list --help", "completion bash", "run --help"]
)
def test_the_exit_code_is_141_when_the_reader_of_the_output_went_away(line: str) -> None:
    hear, tell = os.pipe()
    os.close(hear)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tinker_sync", *line.split()],
            stdout=tell,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=120,
            check=False,
        )
    finally:
        os.close(tell)
    assert (done.returncode, done.stderr) == (BROKEN_PIPE, b"")


@pytest.mark.skipif(sys.platform == "win32", reason="needs sh")
@for_each(
    ("line", "code", "out"),
    [
        ("version >&-", 0, b""),
        ("version --format json >&-", 0, b""),
        ("version >&- 2>&-", 0, b""),
        ("version --format json 2>&-", 0, b"{"),
        ("plot /no/such/run 2>&-", 1, b""),
    ],
)
def test_a_command_runs_without_standard_output_or_error(line: str, code: int, out: bytes) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m tinker_sync {line}', sys.executable],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout[:1], done.stderr) == (code, out, b"")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["chekpoint", "list"], "did you mean tinker-sync checkpoint?"),
        (["checkpoint", "lst"], "did you mean tinker-sync checkpoint list?"),
        (["download", "x"], "did you mean tinker-sync checkpoint download?"),
        (["list"], "tinker-sync run list or tinker-sync session list"),
        (["xyzzy"], "There are: auth, billing"),
        (["run", "list", "--limt", "3"], "--limit"),
        (["run", "list", "--format", "jsn"], "'json'"),
    ],
    ids=str,
)
def test_what_is_mistyped_gets_a_suggestion(run: Run, line: list[str], words: str) -> None:
    done = run(*line)
    assert (done.code, done.out) == (2, "")
    assert words in done.err


@pytest.mark.parametrize("quiet", [False, True])
def test_warnings_are_lines(run: Run, world: World, monkeypatch: pytest.MonkeyPatch, quiet: bool) -> None:
    def warn(*_: object) -> None:
        warnings.warn("this is on its way out", FutureWarning, stacklevel=2)
        warnings.warn("this is on its way out", FutureWarning, stacklevel=2)
        logging.getLogger("tinker_sync.session").warning("the server is %s", "slow")

    monkeypatch.setattr("tinker_sync.clients.service.ServiceClient.get_server_capabilities", warn)
    for name in (None, "tinker_sync"):  # pytest has handlers here, and an earlier test may have added some
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    done = run("model", "list", *(["-q"] if quiet else []))
    shown = [line for line in done.err.splitlines() if "Error" not in line]
    assert shown == ([] if quiet else ["Warning: this is on its way out", "Warning: the server is slow"])


@pytest.mark.parametrize("option", [("--format", "json"), ("--base-url", "http://localhost:1")])
def test_the_demo_refuses_what_a_copy_of_it_can_do(run: Run, option: tuple[str, str]) -> None:
    done = run("demo", *option)
    assert done.code == 2
    assert "copy tinker_sync/examples/demo.py" in done.err


def test_checkpoints_of_open_servers_without_a_folder(run: Run, world: World) -> None:
    world.script("/training_runs/r/checkpoints/sampler_weights/final", Answer(204))
    done = run("checkpoint", "delete", "tinker://r/final", "--yes", "--base-url", world.url)  # type: ignore[attr-defined]
    assert done.code == 0, done.err
    assert [asked.method for asked in world.asked("/training_runs/r/checkpoints/sampler_weights/final")] == [
        "DELETE"
    ]
    hosted = run("checkpoint", "delete", "tinker://r/final", "--yes", "--base-url", DEFAULT_BASE_URL)
    assert hosted.code == 1
    assert "expected tinker://RUN/FOLDER/NAME" in hosted.err


def test_the_demo_fails_if_the_model_learned_too_little(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for outcome, code in ((True, 0), (False, 1)):
        monkeypatch.setattr("tinker_sync.examples.demo.main", lambda outcome=outcome: outcome)
        done = run("demo")
        assert done.code == code
        assert ("did not learn enough" in done.err) is not outcome


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(run: Run, shell: str) -> None:
    done = run("completion", shell)
    assert done.code == 0
    assert "_TINKER_SYNC_COMPLETE" in done.out
