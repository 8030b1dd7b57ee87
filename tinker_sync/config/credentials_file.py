"""The keys in `~/.tinker/credentials.json`, a file shared with the reference client.

Every method reads the whole file; `add` and `delete` also replace it as a whole. Any thread may call them; of
two simultaneous writers the later one wins. `add` and `delete` keep entries that this package does not know.
Errors never show a key: exceptions of parsers quote the file, so they are not chained.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from attrs import field, frozen

from tinker_sync._base.files import replacing
from tinker_sync._base.secret import Secret
from tinker_sync.errors import ConfigurationError

_DIRECTORY_MODE: Final = 0o700
_FILE_MODE: Final = 0o600
_VERSION: Final = 1


@frozen(kw_only=True)
class StoredKey:
    """A key in the credentials file.

    The `type` is "manual" for a key that the user has pasted, and "generated" for one that an older command
    line has created. `tinker-sync auth logout` deletes a generated key on the server, too. The file holds
    `organization` and `email` only together, and a generated key needs them.

    >>> StoredKey(key=Secret("tml-example"), name="laptop")
    StoredKey(key=Secret('***'), name='laptop', type='manual', note=None, organization=None, email=None)
    """

    key: Secret
    name: str
    type: Literal["manual", "generated"] = "manual"
    note: str | None = None
    organization: str | None = None
    email: str | None = None


@frozen
class CredentialsFile:
    """A file of named API keys, one of which may be the default. A missing file counts as one without keys.

    >>> import tempfile
    >>> store = CredentialsFile(Path(tempfile.mkdtemp()) / "credentials.json")
    >>> store.add("k1", StoredKey(key=Secret("tml-example"), name="laptop"), make_default=True)
    >>> store.default_id(), store.default_key().name
    ('k1', 'laptop')
    """

    path: Path = field(converter=Path)

    @path.default
    def _default_path(self) -> Path:
        return Path(os.path.expanduser("~")) / ".tinker" / "credentials.json"

    def keys(self) -> dict[str, StoredKey]:
        """Return all stored keys by id.

        Raises:
            ConfigurationError: the file cannot be read or has another form. Every method raises this.
        """
        return {key_id: _parse_record(record) for key_id, record in self._load()["keys"].items()}

    def default_id(self) -> str | None:
        """Return the id of the default key, or None if the file has none."""
        tree = self._load()
        return tree["default"] if tree.get("default") in tree["keys"] else None

    def default_key(self) -> StoredKey | None:
        """Return the default key, or None if the file has none."""
        tree = self._load()
        record = tree["keys"].get(tree.get("default"))
        return None if record is None else _parse_record(record)

    def add(self, key_id: str, stored: StoredKey, *, make_default: bool = False) -> None:
        """Store a key under an id, in place of an earlier key of that id.

        Raises:
            ConfigurationError: also if the file cannot be written, or a field of the key has a wrong type.
        """
        record = _make_record(stored)
        problem = _find_record_problem(record)
        if problem:
            raise ConfigurationError(f"the key {key_id!r} cannot be stored: {problem}")
        tree = self._load()
        tree["keys"][key_id] = record
        if make_default:
            tree["default"] = key_id
        self._save(tree)

    def delete(self, key_id: str) -> None:
        """Remove a key. If it was the default key, the file has no default key afterwards.

        Raises:
            KeyError: no key with this id is stored.
        """
        tree = self._load()
        del tree["keys"][key_id]
        if tree.get("default") == key_id:
            del tree["default"]
        self._save(tree)

    def _load(self) -> dict[str, Any]:
        tree, problem = _read_file(self.path)
        if problem:
            raise ConfigurationError(f"the credentials file {self.path} {problem}; repair it or move it away")
        return tree

    def _save(self, tree: dict[str, Any]) -> None:
        tree = {"version": _VERSION, **{name: value for name, value in tree.items() if value is not None}}
        # For a symbolic link, write the target rather than replace the link.
        problem = _replace(Path(os.path.realpath(self.path)), tree)
        if problem:
            raise ConfigurationError(f"the credentials file {self.path} cannot be written: {problem}")


def _read_file(path: Path) -> tuple[dict[str, Any], str]:
    """Read and check the file. Return its content, with keys masked in reprs, and the problem or ""."""
    try:
        tree = json.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        return {"keys": {}}, ""
    except OSError as error:
        return {}, f"cannot be read: {error.strerror}"
    except json.JSONDecodeError as error:
        return {}, f"is not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
    except UnicodeDecodeError:
        return {}, "is not UTF-8 text"
    except RecursionError:
        return {}, "is nested too deeply"
    problem = _find_problem(tree)
    if problem:
        return {}, problem
    tree["keys"] = {
        key_id: {**record, "key": Secret(record["key"]).reveal()}
        for key_id, record in tree.get("keys", {}).items()
    }
    return tree, ""


def _find_problem(tree: Any) -> str:
    if not isinstance(tree, dict):
        return "does not hold a JSON object"
    if tree.get("version", _VERSION) != _VERSION:
        return f"has a version other than {_VERSION}, which this package does not know"
    if not isinstance(tree.get("default"), (str, type(None))):
        return "has a 'default' that is not text"
    if not isinstance(tree.get("keys", {}), dict):
        return "has 'keys' that are not an object"
    for key_id, record in tree.get("keys", {}).items():
        problem = _find_record_problem(record)
        if problem:
            return f"has a wrong entry keys[{key_id!r}]: {problem}"
    return ""


def _find_record_problem(record: Any) -> str:
    if not isinstance(record, dict):
        return "not an object"
    if record.get("type") not in ("manual", "generated"):
        return "'type' is neither 'manual' nor 'generated'"
    for name in ("key", "name"):
        if not isinstance(record.get(name), str):
            return f"{name!r} is missing or not text"
    if not isinstance(record.get("note"), (str, type(None))):
        return "'note' is not text"
    details = record.get("details")
    if details is None:
        return "'details' are missing" if record["type"] == "generated" else ""
    if (
        _read_detail(details, "org_details", "name") is None
        or _read_detail(details, "user_details", "email") is None
    ):
        return "'details' do not name the organization and the user's e-mail address"
    return ""


def _read_detail(details: Any, group: str, name: str) -> str | None:
    inner = details.get(group) if isinstance(details, Mapping) else None
    value = inner.get(name) if isinstance(inner, Mapping) else None
    return value if isinstance(value, str) else None


def _parse_record(record: Mapping[str, Any]) -> StoredKey:
    details = record.get("details")
    return StoredKey(
        key=Secret(record["key"]),
        name=record["name"],
        type=record["type"],
        note=record.get("note"),
        organization=_read_detail(details, "org_details", "name"),
        email=_read_detail(details, "user_details", "email"),
    )


def _make_record(stored: StoredKey) -> dict[str, Any]:
    record: dict[str, Any] = {"type": stored.type, "key": stored.key.reveal(), "name": stored.name}
    if stored.note is not None:
        record["note"] = stored.note
    if stored.organization is not None and stored.email is not None:
        record["details"] = {
            "org_details": {"name": stored.organization},
            "user_details": {"email": stored.email},
        }
    return record


def _replace(path: Path, tree: Mapping[str, Any]) -> str:
    """Replace the file in one step, readable by its owner alone. Return the problem, or ""."""
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.parent.chmod(_DIRECTORY_MODE)
        with replacing(path, mode=_FILE_MODE) as file:
            file.write(json.dumps(tree, indent=2).encode())
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""
