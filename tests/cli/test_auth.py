"""`auth`: login, logout, status and whoami."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.cli_runs import Run
from support.cli_world import KEY, World
from support.tinker_stub import Answer

from tinker_sync._base.secret import Secret
from tinker_sync.config import CredentialsFile
from tinker_sync.config.address import DEFAULT_BASE_URL
from tinker_sync.config.credentials_file import StoredKey


@pytest.fixture
def keyless(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.delenv("TINKER_API_KEY")
    return world


def stored() -> dict[str, object]:
    tree: dict[str, object] = json.loads((Path.home() / ".tinker" / "credentials.json").read_text())
    return tree


def test_a_pasted_key_is_checked_and_stored(run: Run, keyless: World) -> None:
    done = run("auth", "login", stdin=f"  {KEY}\n")
    assert (done.code, done.out) == (0, "")
    assert "Logged in as ada@example.com (Analytical Engines)" in done.err
    # For the server of another operator, the message does not name a page of the hosted service.
    assert "Ask the operator of http://127.0.0.1:" in done.err
    assert "thinkingmachines" not in done.err
    assert KEY not in done.err
    people = {"org_details": {"name": "Analytical Engines"}, "user_details": {"email": "ada@example.com"}}
    record = {"type": "manual", "key": KEY, "name": "laptop", "note": "", "details": people}
    assert stored() == {"version": 1, "keys": {"17": record}, "default": "17"}
    again = run("auth", "login", stdin=f"{KEY}\n")
    assert again.code == 1
    assert "tinker-sync auth logout" in again.err


@pytest.mark.parametrize("command", ["login", "logout"])
def test_hosted_services_have_pages_for_keys(run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    if command == "logout":
        CredentialsFile().add("17", StoredKey(key=Secret(KEY), name="laptop"), make_default=True)
    done = run("auth", command, stdin="\n")  # an empty key: nothing is sent
    page = "/keys/17" if command == "logout" else "/keys?new_key=true&key_name=tinker-cli-"
    assert page in done.err


def test_the_server_on_this_machine_needs_no_login(run: Run) -> None:
    done = run("auth", "login", "--base-url", "local", stdin=f"{KEY}\n")
    assert done.code == 1
    assert "needs no login" in done.err
    assert CredentialsFile().default_key() is None


@pytest.mark.parametrize(("pasted", "words"), [("tml-wrong\n", "401"), ("\n", "empty"), ("", "empty")])
def test_a_refused_key_is_not_stored(run: Run, keyless: World, pasted: str, words: str) -> None:
    done = run("auth", "login", stdin=pasted)
    assert done.code == 1
    assert words in done.err
    assert "tml-wrong" not in done.err
    assert CredentialsFile().default_key() is None


def test_logout_forgets_the_key(run: Run, keyless: World) -> None:
    run("auth", "login", stdin=f"{KEY}\n")
    done = run("auth", "logout")
    assert done.code == 0
    assert "Analytical Engines" in done.err
    assert "thinkingmachines" not in done.err
    assert stored() == {"version": 1, "keys": {}}
    assert [asked.method for asked in keyless.asked("/auth/apikey/me")] == ["GET"]
    assert run("auth", "logout").code == 1


@pytest.mark.parametrize("key", [KEY, "tml-unknown"])
def test_logout_deletes_a_generated_key_on_the_server(run: Run, keyless: World, key: str) -> None:
    record = StoredKey(
        key=Secret(key), name="old", type="generated", organization="Engines", email="ada@example.com"
    )
    CredentialsFile().add("9", record, make_default=True)
    done = run("auth", "logout")
    assert [asked.method for asked in keyless.asked("/auth/apikey/me")] == ["DELETE"]
    assert CredentialsFile().default_key() is None
    assert done.code == (0 if key == KEY else 1)
    assert ("deleted on the server" if key == KEY else "still valid") in done.err


def test_status(run: Run, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    about = f"Server: {os.environ['TINKER_BASE_URL']}\nKey: from TINKER_API_KEY\n"
    assert run("auth", "status").out == f"Credentials available: yes\nTinker accessible: yes\n{about}"
    assert run("auth", "status", "-f", "json").json == {
        "credentials_available": True,
        "tinker_accessible": True,
        "base_url": os.environ["TINKER_BASE_URL"],
        "key_source": "from TINKER_API_KEY",
    }
    world.script("/get_server_capabilities", Answer(402, {"detail": "no money"}))
    refused = run("auth", "status")
    assert refused.code == 1
    assert refused.out == f"Credentials available: yes\nTinker accessible: no\n{about}"
    assert "no money" in refused.err
    monkeypatch.delenv("TINKER_API_KEY")
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "printf no-key")
    assert "Key: from TINKER_CREDENTIAL_CMD\n" in run("auth", "status").out
    monkeypatch.delenv("TINKER_CREDENTIAL_CMD")
    monkeypatch.delenv("TINKER_BASE_URL")
    none = run("auth", "status")
    assert none.code == 1
    assert none.out == f"Credentials available: no\nServer: {DEFAULT_BASE_URL}\n"
    assert "tinker-sync auth login" in none.err


def test_whoami(run: Run, world: World) -> None:
    assert run("auth", "whoami", "--format", "json").json == {
        "user_urn": "tml:user:ada",
        "org_urn": "tml:organization:engines",
        "email": "ada@example.com",
    }
    assert "ada@example.com" in run("auth", "whoami").out


@pytest.mark.parametrize(
    ("url", "words"),
    [("tinker.example", "does not start with http"), ("http://ada:secret@127.0.0.1:1", "user name")],
)
def test_status_reports_a_bad_address(run: Run, world: World, url: str, words: str) -> None:
    done = run("auth", "status", "--base-url", url)
    assert (done.code, done.out) == (1, "Credentials available: no\n")
    assert words in done.err
    assert "no key" not in done.err
    assert "secret" not in done.err


def test_a_command_without_a_key_names_the_options_of_the_command_line(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    done = run("run", "list")
    assert (done.code, done.out) == (1, "")
    assert "tinker-sync auth login" in done.err
    assert "--base-url local" in done.err
