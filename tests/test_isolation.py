"""The rules of the suite work: each rule is broken once, in a separate run of pytest, which fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

TESTS = Path(__file__).parent

NEXT = "def test_next_is_not_blamed():\n    pass\n"
BREACHES = {
    "a thread that outlives its test": (
        """
import threading
gate = threading.Event()
def test_starts():
    threading.Thread(target=gate.wait, name="tinker-poll", daemon=True).start()
""",
        "threads that outlive their test: tinker-poll",
    ),
    "a connection off this machine": (
        """
import socket
def test_connects():
    with socket.socket() as one:
        one.connect(("192.0.2.1", 80))
""",
        "may not reach ('192.0.2.1', 80)",
    ),
    "a swallowed connection off this machine": (
        """
import socket
def test_connects():
    try:
        socket.create_connection(("example.com", 443), timeout=1)
    except Exception:
        pass
""",
        "the test tried to reach [('example.com', 0)]",
    ),
    "an exception in a thread": (
        """
import threading
def test_raises():
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
""",
        "PytestUnhandledThreadExceptionWarning",
    ),
    "a file nobody closed": (
        """
import gc, os
def test_opens():
    open(os.devnull)
    gc.collect()
""",
        "ResourceWarning",
    ),
    "an expected failure that passes": (
        """
import pytest
@pytest.mark.xfail
def test_passes():
    pass
""",
        "XPASS(strict)",
    ),
    "a lock under a lock": (
        """
from tinker_sync.runtime.rate_limiter import RateLimiter
def test_nests():
    with RateLimiter()._lock:
        RateLimiter().close_for(1)
""",
        "is taken under the lock of tinker_sync.runtime.rate_limiter",
    ),
    "a future that ends under a lock": (
        """
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.rate_limiter import RateLimiter
def test_ends():
    future = APIFuture()
    with RateLimiter()._lock:
        future.resolve(1)
""",
        "is called under the lock of tinker_sync.runtime.rate_limiter",
    ),
}


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Run pytest with a file for each breach. Return the texts of failures, by file number and test."""
    root = tmp_path_factory.mktemp("breaches")
    folder = root / "tests"
    folder.mkdir()
    for path in ("setup.cfg", "tests/conftest.py"):
        (root / path).write_text((TESTS.parent / path).read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "support").symlink_to(TESTS / "support")
    files = [f"tests/test_breach_{number}.py" for number in range(len(BREACHES))]
    for file, (code, _) in zip(files, BREACHES.values(), strict=True):
        (root / file).write_text(code + NEXT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml", *files],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(TESTS.parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found: dict[str, dict[str, str]] = {}
    for case in ET.parse(root / "report.xml").iter("testcase"):
        text = "".join(f"{each.get('message')}\n{each.text}" for each in case)
        number = case.attrib["classname"].rpartition("_")[2]
        of_file = found.setdefault(number, {})
        of_file[case.attrib["name"]] = of_file.get(case.attrib["name"], "") + text
    return found


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_fails_its_test_only(complaints: dict[str, dict[str, str]], breach: str) -> None:
    broken, following = complaints[str(list(BREACHES).index(breach))].values()
    assert BREACHES[breach][1] in broken
    assert following == ""


def test_the_users_configuration_is_out_of_sight(tmp_path: Path) -> None:
    names = {name.upper() for name in os.environ}
    found = [name for name in names if name.startswith("TINKER_") or name.endswith("_PROXY")]
    assert found == ["TINKER_LOCAL_DATA_DIR"]
    assert os.environ["TINKER_LOCAL_DATA_DIR"] == "temporary"
    assert not names & {"REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "NETRC"}
    assert list(Path.home().iterdir()) == []
    assert Path("~").expanduser() == Path.home()
    assert list(tmp_path.iterdir()) == []
