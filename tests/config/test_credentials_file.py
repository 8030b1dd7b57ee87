"""The credentials file: its form, its permissions, and errors for a broken file."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from support.raising import raising

from tinker_sync.config import CredentialsFile, Secret, StoredKey
from tinker_sync.errors import ConfigurationError

KEY = "tml-planted-key-0123456789"
DETAILS = {"org_details": {"name": "Acme"}, "user_details": {"email": "a@acme.example"}}

posix = pytest.mark.skipif(os.name != "posix", reason="file modes and links of POSIX")


@pytest.fixture
def file(tmp_path: Path) -> CredentialsFile:
    return CredentialsFile(tmp_path / "home" / ".tinker" / "credentials.json")


def key(text: str = KEY, **more: Any) -> StoredKey:
    return StoredKey(key=Secret(text), name="laptop", **more)


def test_written_form(file: CredentialsFile) -> None:
    file.add("k1", key(note="mine", organization="Acme", email="a@acme.example"), make_default=True)
    file.add("k2", key("tml-2"))
    assert json.loads(file.path.read_text()) == {
        "version": 1,
        "default": "k1",
        "keys": {
            "k1": {"type": "manual", "key": KEY, "name": "laptop", "note": "mine", "details": DETAILS},
            "k2": {"type": "manual", "key": "tml-2", "name": "laptop"},
        },
    }
    assert file.path.read_text().startswith('{\n  "version": 1,\n')


def test_keys_of_the_reference_client_are_read(file: CredentialsFile) -> None:
    file.path.parent.mkdir(parents=True)
    tree = {
        "version": 1,
        "default": "g",
        "keys": {"g": {"type": "generated", "key": KEY, "name": "cli", "details": DETAILS}},
    }
    file.path.write_text(json.dumps(tree, indent=2))
    assert file.default_key() == StoredKey(
        key=Secret(KEY), name="cli", type="generated", organization="Acme", email="a@acme.example"
    )


def test_byte_order_mark_is_ignored(file: CredentialsFile) -> None:
    file.add("k1", key(), make_default=True)
    file.path.write_bytes(b"\xef\xbb\xbf" + file.path.read_bytes())
    assert file.default_key() == key()


@pytest.mark.parametrize("tree", [{}, {"keys": {}}, {"version": 1, "default": None, "keys": {}}])
def test_absent_fields_have_defaults(file: CredentialsFile, tree: Any) -> None:
    file.path.parent.mkdir(parents=True)
    file.path.write_text(json.dumps(tree))
    assert (file.keys(), file.default_key()) == ({}, None)


def test_default_must_be_stored(file: CredentialsFile) -> None:
    file.add("k1", key())
    tree = json.loads(file.path.read_text())
    file.path.write_text(json.dumps({**tree, "default": "gone"}))
    assert file.default_id() is None
    assert file.default_key() is None


def test_deleting_the_default_key_clears_the_default(file: CredentialsFile) -> None:
    file.add("k1", key(), make_default=True)
    file.add("k2", key("tml-2"))
    file.delete("k2")
    assert file.default_id() == "k1"
    file.delete("k1")
    assert json.loads(file.path.read_text()) == {"version": 1, "keys": {}}
    with pytest.raises(KeyError):
        file.delete("k1")


def test_unknown_entries_survive(file: CredentialsFile) -> None:
    file.path.parent.mkdir(parents=True)
    record = {"type": "manual", "key": KEY, "name": "n", "since": 2027}
    file.path.write_text(json.dumps({"version": 1, "theme": "dark", "keys": {"k": record}}))
    file.add("k2", key("tml-2"))
    tree = json.loads(file.path.read_text())
    assert (tree["theme"], tree["keys"]["k"]) == ("dark", record)


@posix
def test_file_is_private(file: CredentialsFile) -> None:
    before = os.umask(0)
    try:
        file.add("k1", key())
        file.add("k2", key())
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700
    file.path.chmod(0o644)
    file.add("k3", key())
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600


def test_write_replaces_the_file_in_one_step(file: CredentialsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.add("k1", key())
    before = file.path.read_bytes()
    seen: list[tuple[bytes, bytes]] = []
    replace = os.replace

    def watch(source: Any, target: Any) -> None:
        seen.append((Path(source).read_bytes(), Path(target).read_bytes()))
        if os.name == "posix":
            assert stat.S_IMODE(os.stat(source).st_mode) == 0o600
        replace(source, target)

    monkeypatch.setattr(os, "replace", watch)
    file.add("k2", key("tml-2"))
    ((complete, old),) = seen
    assert old == before
    assert json.loads(complete)["keys"].keys() == {"k1", "k2"}
    assert [path.name for path in file.path.parent.iterdir()] == ["credentials.json"]


def test_failed_write_keeps_the_old_file(file: CredentialsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.add("k1", key())
    before = file.path.read_bytes()

    monkeypatch.setattr(os, "fsync", raising(OSError(28, "No space left on device")))
    with pytest.raises(ConfigurationError, match=r"credentials\.json .*No space left"):
        file.add("k2", key("tml-2"))
    assert file.path.read_bytes() == before
    assert [path.name for path in file.path.parent.iterdir()] == ["credentials.json"]


@posix
def test_symbolic_link_is_followed(file: CredentialsFile, tmp_path: Path) -> None:
    target = tmp_path / "dotfiles" / "credentials.json"
    target.parent.mkdir()
    target.write_text("{}")
    file.path.parent.mkdir(parents=True)
    file.path.symlink_to(target)
    file.add("k1", key())
    assert file.path.is_symlink()
    assert "k1" in json.loads(target.read_text())["keys"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is not JSON"),
        (b'{"keys": {"k": "' + KEY.encode(), r"is not JSON: .* \(line 1, column 16\)"),
        (b'{"\xff": "' + KEY.encode(), "is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'["' + KEY.encode() + b'"]', "does not hold a JSON object"),
        (b'{"version": 2}', "version other than 1"),
        (b'{"version": "1"}', "version other than 1"),
        (b'{"default": 3}', "'default' that is not text"),
        (b'{"keys": ["' + KEY.encode() + b'"]}', "'keys' that are not an object"),
        (b'{"keys": {"k1": "' + KEY.encode() + b'"}}', r"wrong entry keys\['k1'\]: not an object"),
        (b'{"keys": {"k1": {"key": "%s", "name": "n"}}}' % KEY.encode(), "'type' is neither"),
        (b'{"keys": {"k1": {"type": "stolen", "key": "%s"}}}' % KEY.encode(), "'type' is neither"),
        (b'{"keys": {"k1": {"type": "manual", "name": "n"}}}', "'key' is missing or not text"),
        (b'{"keys": {"k1": {"type": "manual", "key": 3, "name": "n"}}}', "'key' is missing or not text"),
        (b'{"keys": {"k1": {"type": "manual", "key": "%s"}}}' % KEY.encode(), "'name' is missing"),
        (b'{"keys": {"k1": {"type": "manual", "key": "k", "name": "n", "note": 3}}}', "'note' is not text"),
        (b'{"keys": {"k1": {"type": "generated", "key": "k", "name": "n"}}}', "'details' are missing"),
        (
            b'{"keys": {"k1": {"type": "manual", "key": "k", "name": "n", "details": {}}}}',
            "'details' do not name",
        ),
    ],
)
def test_broken_file_is_named_without_content(file: CredentialsFile, content: bytes, complaint: str) -> None:
    file.path.parent.mkdir(parents=True)
    file.path.write_bytes(content)
    for use in (
        file.keys,
        file.default_key,
        file.default_id,
        lambda: file.add("k", key()),
        lambda: file.delete("k"),
    ):
        with pytest.raises(ConfigurationError, match=complaint) as caught:
            use()
        assert str(file.path) in str(caught.value)
        assert KEY not in str(caught.value)
        # The exceptions of parsers hold the whole text.
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None
    assert file.path.read_bytes() == content


def test_directory_in_place_of_the_file(file: CredentialsFile) -> None:
    file.path.mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        file.keys()


def test_unwritable_home(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file, not a directory")
    file = CredentialsFile(tmp_path / "home" / ".tinker" / "credentials.json")
    with pytest.raises(ConfigurationError, match="cannot be"):
        file.add("k", key())


def test_incomplete_keys_are_refused(file: CredentialsFile) -> None:
    with pytest.raises(ConfigurationError, match="'details' are missing"):
        file.add("k", key(type="generated"))
    assert not file.path.exists()
