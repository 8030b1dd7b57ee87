"""Comparison with the reference client, version 0.36 or 0.38. It runs only if that client is installed.

`pip install -e '.[interop,test]' && pytest tests/interop` runs it with version 0.38. To run it with 0.36,
install `tinker==0.36.0` afterwards. Without the reference client, pytest collects only the tests of the
engine, the tokenizers and the images. They need torch, transformers or Pillow in its place, and are skipped
without these.

The loops of the cookbook for the reference client, and the models that it merges, are compared where
`tinker-cookbook` is installed, with version 0.38.

This module has all expectations that depend on the version of the reference client.
"""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from interop.programs import Programs

_WITHOUT_IT = {"conftest.py", "test_engine_oracle.py", "test_text_oracle.py", "test_pictures_oracle.py"}

_everything = {path.name for path in Path(__file__).parent.glob("*.py")}
collect_ignore = [] if importlib.util.find_spec("tinker") else sorted(_everything - _WITHOUT_IT)
collect_ignore.append("cookbook_script.py")  # a program, which imports the cookbook
if not importlib.util.find_spec("tinker_cookbook"):
    collect_ignore += ["test_cookbook_oracle.py", "test_cookbook_suite.py", "test_merge_oracle.py"]


_remarks: list[str] = []


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Yield the processes that run programs of either client."""
    with Programs() as programs:
        yield programs
    _remarks.extend(programs.remarks)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for remark in _remarks:
        terminalreporter.section("a program of the reference client ran a second time")
        terminalreporter.line(remark)


def _reference_version() -> tuple[int, int]:
    try:
        major, minor, *_ = importlib.metadata.version("tinker").split(".")
    except importlib.metadata.PackageNotFoundError:
        return (0, 0)
    return int(major), int(minor)


REFERENCE_VERSION: Final = _reference_version()
"""Major and minor version of the installed reference client."""

# Fields of this package's types that the reference client lacks before 0.38.
_SINCE_038: Final = {("SaveWeightsForSamplerRequest", "kind"), ("StorageBillingEvent", "free")}
_UNTIL_036: Final = {("ClientConfigResponse", "create_model_via_load_weights")}
LACKING_FIELDS: Final = {
    ("Checkpoint", "base_model"),
    *(_SINCE_038 if REFERENCE_VERSION < (0, 38) else _UNTIL_036),
}
_LACKING_NAMES: Final = {name for _, name in LACKING_FIELDS} - {"base_model"}


def shared(tree: Any) -> Any:
    """Return arguments or a dump of a type, without the fields that the reference client lacks."""
    if isinstance(tree, dict):
        return {name: shared(value) for name, value in tree.items() if name not in _LACKING_NAMES}
    if isinstance(tree, list):
        return [shared(value) for value in tree]
    return tree


INFO_IS_A_REQUEST: Final = REFERENCE_VERSION < (0, 38)
"""True if `get_info` and `get_base_model` of the reference client send requests.

From 0.38 on it sends these requests whenever it makes a client and answers from memory. This package sends
them when a script asks, so that a model that exists is not lost when such a request fails.
"""

FAILED_LOSS_ENDS_CLIENT: Final = REFERENCE_VERSION >= (0, 38)
"""True if the reference client refuses every call after a custom loss of the script has failed.

The training client of this package goes on; the script continues with a new one where the reference has to.
"""

CREATION_REQUESTS: Final = frozenset() if INFO_IS_A_REQUEST else frozenset({"/get_info", "/samplers"})
"""Requests that are not compared, because the clients send them at different moments."""

DEFAULTS: Final = {} if REFERENCE_VERSION < (0, 38) else {"kind": "snapshot"}
"""Request fields with their default values.

The reference client always sends them. This package leaves them out for servers before 0.38.
"""


def server_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings as a server of the reference client's version sends them.

    A server of 0.38 no longer sends `create_model_via_load_weights`: its clients always make models from
    checkpoints in one request.
    """
    if REFERENCE_VERSION < (0, 38):
        return settings
    return {name: value for name, value in settings.items() if name != "create_model_via_load_weights"}


def shared_handle(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a sampler handle without the fields that the reference client does not write."""
    if REFERENCE_VERSION < (0, 38):
        content.pop("base_model", None)
    return {name: shared(value) for name, value in content.items()}


def shared_print(text: str) -> str:
    """Return the output of a command without `free` of storage events, which 0.36 does not print."""
    if REFERENCE_VERSION >= (0, 38):
        return text
    head, newline, _ = text.partition("\n")
    if ",free," in head:
        rows = list(csv.reader(io.StringIO(text)))
        at = rows[0].index("free")
        kept = io.StringIO()
        csv.writer(kept, lineterminator=newline).writerows([*row[:at], *row[at + 1 :]] for row in rows)
        return kept.getvalue()
    return re.sub(r'\n *"free": (?:true|false),', "", text)
