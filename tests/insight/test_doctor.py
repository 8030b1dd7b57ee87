"""Each problem is found, with advice; a good setup gives no findings but "ok"."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from email.utils import formatdate
from importlib import metadata
from pathlib import Path

import pytest
from support.authority import Authority
from support.embedded import running
from support.servers import AnsweringServer, answer, unused_port
from support.tinker_stub import Answer, Stub, StubServer

import tinker_sync
from tinker_sync._base.clock import SYSTEM_CLOCK
from tinker_sync.clients.doctor import VARIABLES
from tinker_sync.insight import Finding, examine

KEY = "tml-secret-of-the-doctor"


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    with StubServer() as stub:
        monkeypatch.setenv("TINKER_BASE_URL", stub.url)  # type: ignore[attr-defined]
        monkeypatch.setenv("TINKER_API_KEY", KEY)
        yield stub


def findings(base_url: str | None = None) -> dict[str, Finding]:
    found = examine(base_url)
    assert KEY not in repr(found)
    assert all(each.advice for each in found if each.state in ("warning", "failure"))
    return {each.name: each for each in found}


def test_no_problem(stub: Stub) -> None:
    date = {"Date": formatdate(SYSTEM_CLOCK.time(), usegmt=True)}
    stub.script("/healthz", Answer(body={"status": "ok"}, headers=date))
    found = findings()
    assert {each.state for each in found.values()} == {"ok"}
    assert found["key"].what == "from TINKER_API_KEY"
    assert found["clock"].what == "as the server's"
    assert "x-api-key" not in stub.asked("/healthz")[0].headers


def test_the_embedded_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "local")
    found = findings()
    assert {each.state for each in found.values()} <= {"ok", "skipped"}, found
    assert found["key"].what == "of the server on this machine"
    assert found["access"].state == "ok"


@pytest.mark.parametrize(("ahead_s", "words"), [(-90, "90 s ahead"), (3600, "3600 s behind")])
def test_a_wrong_clock(stub: Stub, ahead_s: float, words: str) -> None:
    date = {"Date": formatdate(SYSTEM_CLOCK.time() + ahead_s, usegmt=True)}
    stub.script("/healthz", Answer(headers=date))
    clock = findings()["clock"]
    assert clock.state == "warning"
    assert abs(int(clock.what.split()[0]) - abs(ahead_s)) <= 2
    assert words.split()[2] in clock.what


def test_a_missing_and_a_refused_key(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.behaviour.key = "tml-other"
    found = findings()
    assert (found["key"].state, found["access"].state) == ("ok", "failure")
    assert "401" in found["access"].what
    monkeypatch.delenv("TINKER_API_KEY")
    assert findings()["key"].state == "warning"
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "echo tml-other")
    found = findings()
    assert (found["key"].what, found["access"].state) == ("from TINKER_CREDENTIAL_CMD", "ok")


def test_variables_that_are_not_used(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "echo tml-of-the-command")
    key = findings()["key"]
    assert (key.state, key.what) == ("warning", "from TINKER_API_KEY; TINKER_CREDENTIAL_CMD is not used")
    monkeypatch.setenv("TINKER_BASE_URL", "local")
    assert findings()["key"].what == (
        "of the server on this machine; TINKER_API_KEY and TINKER_CREDENTIAL_CMD are not used"
    )


def test_unusable_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "ftp://x")
    found = findings()
    assert found["settings"].state == "failure"
    assert "TINKER_BASE_URL" in found["settings"].what


def test_an_unreachable_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with StubServer() as gone:
        url = gone.url  # type: ignore[attr-defined]
    found = findings(url)
    assert (found["connection"].state, found["server"].state) == ("failure", "failure")
    assert (found["clock"].state, found["access"].state) == ("skipped", "skipped")
    for host in ("nowhere.invalid", "nowhere..invalid", f"{'a' * 64}.invalid"):
        found = findings(f"https://{host}")
        assert (found["name"].state, found["server"].state) == ("failure", "failure")
        assert f"{host} cannot be resolved" in found["name"].what


@pytest.mark.parametrize(
    ("url", "words"),
    [("http://10.0.0.9.invalid", "use https"), ("http://127.0.0.1:1/api/v1", "leave out /api/v1")],
)
def test_questionable_addresses(url: str, words: str) -> None:
    assert words in findings(url)["address"].advice


def test_a_proxy(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    with unused_port() as port:
        monkeypatch.setenv("http_proxy", f"http://user:hidden-word@127.0.0.1:{port}")
        found = findings()
    assert found["proxy"].state == "warning"
    assert found["proxy"].what == f"http://127.0.0.1:{port}"
    assert "NO_PROXY=127.0.0.1" in found["proxy"].advice
    assert "hidden-word" not in repr(found)
    assert (found["name"].state, found["server"].state) == ("skipped", "failure")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert findings()["proxy"].what == "none for this server"


def test_a_proxy_that_the_client_cannot_use(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "socks5://user:hidden-word@127.0.0.1:9")
    found = findings()
    assert "only HTTP proxies" in found["connection"].what
    assert "hidden-word" not in repr(found)
    assert (found["connection"].state, found["server"].state) == ("failure", "failure")


def test_the_trusted_certificates_are_those_of_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    with AnsweringServer(lambda _: answer(b"{}"), tls=authority.server_context()) as server:
        unknown = findings(server.url)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", authority.ca_file)
        trusted = findings(server.url)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "none.pem"))
        missing = findings(server.url)
    states = [(each["connection"].state, each["server"].state) for each in (unknown, trusted, missing)]
    assert states == [("failure", "failure"), ("ok", "ok"), ("failure", "failure")]
    assert "is not trusted" in unknown["connection"].what
    assert "REQUESTS_CA_BUNDLE" in unknown["connection"].advice
    assert "TLSv1" in trusted["connection"].what
    assert "none.pem' cannot be used" in missing["connection"].what


def test_a_readable_key_file(stub: Stub) -> None:
    path = Path.home() / ".tinker" / "credentials.json"
    path.parent.mkdir()
    path.write_text('{"version": 1, "keys": {}}')
    path.chmod(0o644)
    assert findings()["key file"].advice == f"chmod 600 {path}"
    path.chmod(0o600)
    assert "key file" not in findings()


def test_every_extra_that_is_missing_is_named_with_its_packages(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name in ("jinja2", "tqdm", "pandas", "ray", "torch"):
            raise metadata.PackageNotFoundError(name)
        return "9"

    monkeypatch.setattr(metadata, "version", version)
    found = findings()["extras"]
    assert found.what == "not installed: chat, progress, torch, notebook, ray"
    assert "chat: pip install jinja2" in found.advice
    assert "ray: pip install 'ray[data]'" in found.advice


def test_the_variables_of_the_guide_are_known() -> None:
    guide = Path(tinker_sync.__file__).with_name("docs") / "configuration.md"
    documented = re.findall(r"^\| `(TINKER_\w+)` \|", guide.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(documented) == VARIABLES


def test_fields_that_an_embedded_server_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path) as server:
        monkeypatch.setenv("TINKER_BASE_URL", server.url)
        monkeypatch.setenv("TINKER_API_KEY", server.key)
        assert "fields" not in {each.name for each in examine()}
        server.session(colour="red")
        found = {each.name: each for each in examine()}
    assert found["fields"].state == "warning"
    assert "CreateSessionRequest.colour" in found["fields"].what
    assert found["access"].state == "ok"


def test_a_server_error(stub: Stub) -> None:
    stub.script("/healthz", Answer(503))
    assert findings()["server"].state == "failure"


def test_an_unknown_variable(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_APIKEY", "x")
    assert findings()["variables"].what == "unknown, without effect: TINKER_APIKEY"
    assert "TINKER_API_KEY" in os.environ
