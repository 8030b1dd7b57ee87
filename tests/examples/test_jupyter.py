"""The notebook of the examples under a real Jupyter kernel, and an `await` that the kernel interrupts.

`.ci/run notebook` installs the kernel and runs this file; without one it is not collected.
"""

from __future__ import annotations

import json
import re
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tinker_sync.examples import notebook

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings of the kernel's libraries
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")

pytestmark = pytest.mark.filterwarnings("default")
PATIENCE_S = 300
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def executed() -> Any:
    """Return the notebook of the examples with its outputs, after a kernel has run it."""
    made = nbformat.read(notebook.NOTEBOOK, as_version=4)
    nbformat.validate(made)
    nbclient.NotebookClient(made, timeout=PATIENCE_S, resources={"metadata": {"path": str(ROOT)}}).execute()
    return made


def outputs(executed: Any) -> list[Any]:
    return [out for cell in executed.cells if cell.cell_type == "code" for out in cell.outputs]


def test_every_cell_runs_and_prints_only_bars_and_the_interrupt(executed: Any) -> None:
    cells = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert [out for out in outputs(executed) if out.output_type == "error"] == []
    streams = [out for out in outputs(executed) if out.output_type == "stream"]
    assert ["interrupted after" in out.text for out in streams if out.name == "stdout"] == [True]
    # Without widgets the bars of tqdm are text on stderr.
    assert [out.text for out in streams if out.name == "stderr" and "samples" not in out.text] == []


def test_values_show_themselves(executed: Any) -> None:
    shown = [out.data["text/html"] for out in outputs(executed) if "text/html" in out.get("data", {})]
    assert len(shown) == 9
    assert any("<polyline" in html for html in shown)  # the curve of the training client
    plain = [out.data["text/plain"] for out in outputs(executed) if "data" in out]
    assert all(plain)


def test_the_model_has_learned(executed: Any) -> None:
    shown = [out.data["text/html"] for out in outputs(executed) if "text/html" in out.get("data", {})]
    texts = [re.sub("<[^>]+>", "", html) for html in shown if "mean log-probability" in html]
    assert ["aabbccdd" in text for text in texts] == [False, True, True]


# ---------------------------------------------------------------------------------- an interrupt
@pytest.fixture
def kernel() -> Iterator[Any]:
    """Start a kernel, and yield a client of it, whose `parent` is the kernel's manager."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(startup_timeout=PATIENCE_S, cwd=str(ROOT))
    client.parent = manager
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def until_idle(client: Any, message_id: str, on_word: Any = None) -> list[Any]:
    """Wait for the end of a cell, and return the messages about it. Call `on_word` at each of its outputs."""
    read = []
    ends_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends_s:
        message = client.get_iopub_msg(timeout=PATIENCE_S)
        if message["parent_header"].get("msg_id") != message_id:
            continue
        read.append(message)
        if message["msg_type"] == "stream" and on_word is not None:
            on_word()
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return read
    raise TimeoutError(json.dumps([message["content"] for message in read], default=str))


@pytest.mark.skipif(sys.platform == "win32", reason="interrupts by signal")
def test_an_await_in_a_cell_is_interrupted_and_the_kernel_goes_on(kernel: Any) -> None:
    waits = (
        "from tinker_sync import APIFuture\nfuture = APIFuture()\nprint('waiting', flush=True)\nawait future"
    )
    read = until_idle(kernel, kernel.execute(waits), on_word=kernel.parent.interrupt_kernel)
    errors = [message["content"]["ename"] for message in read if message["msg_type"] == "error"]
    assert errors in (["KeyboardInterrupt"], ["CancelledError"]), errors
    read = until_idle(kernel, kernel.execute("print(future.done())"))
    assert [message["content"]["text"] for message in read if message["msg_type"] == "stream"] == ["False\n"]
