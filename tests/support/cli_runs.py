"""Command lines that run in this process and have the exit codes and output that they have in a shell."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest

from tinker_sync.cli import main


@dataclass
class Ran:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Ran]


def runner(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs one command line."""

    def run(*arguments: str, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = main(arguments)
        printed = capsys.readouterr()
        return Ran(code, printed.out, printed.err)

    return run


def fixed_now(monkeypatch: pytest.MonkeyPatch, now: str) -> None:
    """Set the present time, from which tables compute ages."""
    monkeypatch.setattr("tinker_sync.cli.formatting.utc_now", lambda: datetime.fromisoformat(now))
