"""Sources of settings, invalid values, pickles, and console logs."""

from __future__ import annotations

import copy
import logging
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import requests

from tinker_sync.config import (
    DEFAULT_BASE_URL,
    CredentialsFile,
    HeaderMap,
    Secret,
    Settings,
    StoredKey,
    Timeout,
)
from tinker_sync.errors import ConfigurationError

KEY = "tml-planted-key-0123456789"


def resolve(environ: dict[str, str] | None = None, **arguments: Any) -> Settings:
    return Settings.resolve(environ=environ or {}, **arguments)


@pytest.fixture
def stored(tmp_path: Path) -> CredentialsFile:
    file = CredentialsFile(tmp_path / "credentials.json")
    file.add("k1", StoredKey(key=Secret("tml-stored"), name="laptop"), make_default=True)
    return file


def test_defaults() -> None:
    settings = resolve()
    assert attrs.asdict(settings, recurse=False) == {
        "base_url": "https://tinker.thinkingmachines.dev/services/tinker-prod",
        "api_key": None,
        "api_key_source": None,
        "credential_cmd": None,
        "credential_cmd_timeout_s": 30.0,
        "project_id": None,
        "tags": (),
        "log": None,
        "cf_access_id": None,
        "cf_access_secret": None,
        "default_headers": HeaderMap(),
        "session": None,
        "timeout": Timeout(connect=5.0, read=60.0, idle=None),
        "max_retries": 10,
        "max_body_bytes": 1 << 30,
        "max_connections": None,
        "http2": True,
        "sdk_version": "0.38.0",
        "dialect": "auto",
        "deadline_s": None,
        "pace": 1.0,
    }
    assert settings == Settings()


def test_the_most_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_MAX_CONNECTIONS", " 200 ")
    assert Settings.resolve().max_connections == 200
    assert Settings.resolve(max_connections=3).max_connections == 3
    for wrong in ("0", "-1", "many", "1.5"):
        monkeypatch.setenv("TINKER_MAX_CONNECTIONS", wrong)
        with pytest.raises(ConfigurationError, match=f"TINKER_MAX_CONNECTIONS .*{wrong}"):
            Settings.resolve()
    with pytest.raises(ConfigurationError, match="max_connections must be a whole number from 1, not 0"):
        Settings(max_connections=0)


def test_environment_is_the_default_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "http://localhost:1/")
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    settings = Settings.resolve()
    assert (settings.base_url, settings.api_key) == ("http://localhost:1", Secret(KEY))


# -------------------------------------------------------------------------- arguments before variables
@pytest.mark.parametrize(
    ("field", "variable", "from_variable", "argument"),
    [
        ("base_url", "TINKER_BASE_URL", "http://variable", "http://argument"),
        ("api_key", "TINKER_API_KEY", "tml-variable", "tml-argument"),
        ("credential_cmd", "TINKER_CREDENTIAL_CMD", "echo variable", "echo argument"),
        ("project_id", "TINKER_PROJECT_ID", "p-variable", "p-argument"),
        ("cf_access_id", "CLOUDFLARE_ACCESS_CLIENT_ID", "id-variable", "id-argument"),
        ("cf_access_secret", "CLOUDFLARE_ACCESS_CLIENT_SECRET", "s-variable", "s-argument"),
    ],
)
def test_argument_overrides_variable(field: str, variable: str, from_variable: str, argument: str) -> None:
    def value(settings: Settings) -> object:
        found = getattr(settings, field)
        return found.reveal() if isinstance(found, Secret) else found

    default = value(resolve())
    assert value(resolve({variable: from_variable})) == from_variable
    assert value(resolve({variable: from_variable}, **{field: argument})) == argument
    assert value(resolve({variable: from_variable}, **{field: ""})) == from_variable
    assert value(resolve({variable: ""}, **{field: ""})) == default


@pytest.mark.parametrize("field", ["api_key", "credential_cmd", "cf_access_id", "cf_access_secret"])
def test_secrets_are_wrapped_once(field: str) -> None:
    assert getattr(resolve(**{field: "abc"}), field) == Secret("abc")
    assert getattr(resolve(**{field: Secret("abc")}), field) == Secret("abc")
    assert getattr(resolve(**{field: "  abc\n"}), field) == Secret("abc")
    assert getattr(resolve(**{field: " \n"}), field) is None


@pytest.mark.parametrize(
    ("variable", "argument", "tags"),
    [
        ("", None, ()),
        ("a", None, ("a",)),
        (",b,, a ,b", None, ("b", "a")),
        ("v", ["b", "", "a", "b"], ("b", "a")),
        ("v", [], ()),
        ("v", "b,a", ("b", "a")),
    ],
)
def test_tags(variable: str, argument: Any, tags: tuple[str, ...]) -> None:
    assert resolve({"TINKER_TAGS": variable}, tags=argument).tags == tags


# -------------------------------------------------------------------------------------------- base URL
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("http://h", "http://h"),
        ("http://h:1/pre/", "http://h:1/pre"),
        ("https://h/a/b///", "https://h/a/b"),
        ("  http://h/ \n", "http://h"),
        ("HTTPS://Host/Path", "HTTPS://Host/Path"),
        ("http://[::1]:8000/x", "http://[::1]:8000/x"),
        ("http://127.0.0.1", "http://127.0.0.1"),
    ],
)
def test_base_url(given: str, kept: str) -> None:
    assert resolve(base_url=given).base_url == kept
    assert resolve({"TINKER_BASE_URL": given}).base_url == kept


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("h:8000", "does not start with http"),
        ("localhost", "does not start with http"),
        ("ftp://h", "does not start with http"),
        ("http://", "names no host"),
        ("http:///path", "names no host"),
        ("https://h/x?q=1", "query or fragment"),
        ("https://h/x?", "query or fragment"),
        ("https://h/x#f", "query or fragment"),
        (f"https://user:{KEY}@h/", "user name or password"),
        ("https://user@h/", "user name or password"),
        ("http://h:port", "not a valid address"),
        ("http://h:99999", "not a valid address"),
        ("http://h:0", "not a valid address"),
        ("http://[::1", "not a valid address"),
        ("http://h/a b", "not a valid address"),
        ("http://h/a\r\nX: y", "not a valid address"),
    ],
)
def test_invalid_base_url_is_refused(given: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint) as by_argument:
        resolve(base_url=given)
    assert str(by_argument.value).startswith("base_url ")
    assert KEY not in str(by_argument.value)
    with pytest.raises(ConfigurationError, match=complaint) as by_variable:
        resolve({"TINKER_BASE_URL": given})
    assert str(by_variable.value).startswith("TINKER_BASE_URL ")


@pytest.mark.parametrize(
    "given",
    [
        *("me:hunter22@h", "me:hunter22@h:8000/x", "//me:hunter22@h", "me:hunt/er22@hunter22@h"),
        *("https:me:hunter22@h", "https:/me:hunter22@h", "https//me:hunter22@h", "https:///me:hunter22@h"),
    ],
)
def test_a_password_in_an_address_without_a_scheme_is_masked(given: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve({"TINKER_BASE_URL": given})
    assert "er22" not in f"{caught.value}{caught.value!r}"
    assert "***@h" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "vendor"),
    [
        (DEFAULT_BASE_URL, True),
        ("https://tinker.thinkingmachines.ai", True),
        ("https://THINKINGMACHINES.dev:8443/x", True),
        ("https://a.b.thinkingmachines.dev./x", True),
        ("http://localhost:8000", False),
        ("https://thinkingmachines.dev.evil.org", False),
        ("https://notthinkingmachines.dev", False),
        ("https://evil.org/thinkingmachines.dev", False),
    ],
)
def test_vendor_hosts(url: str, vendor: bool) -> None:
    assert resolve(base_url=url).is_vendor_host is vendor


def test_direct_construction_is_checked() -> None:
    with pytest.raises(ConfigurationError, match="does not start with http"):
        Settings(base_url="nonsense")
    with pytest.raises(ConfigurationError, match="ends with a slash"):
        Settings(base_url="http://h/")
    with pytest.raises(ConfigurationError, match="max_retries"):
        attrs.evolve(Settings(), max_retries=-1)


# ------------------------------------------------------------------------------------------------ keys
def test_source_of_the_key(stored: CredentialsFile) -> None:
    def found(environ: dict[str, str], **arguments: Any) -> tuple[object, object]:
        settings = resolve(environ, credentials_file=stored, **arguments)
        return settings.api_key and settings.api_key.reveal(), settings.api_key_source

    variable, command = {"TINKER_API_KEY": "tml-v"}, {"TINKER_CREDENTIAL_CMD": "true"}
    assert found(variable, api_key="tml-a") == ("tml-a", "argument")
    assert found(variable) == ("tml-v", "environment")
    assert found({**variable, **command}) == ("tml-v", "environment")
    assert found({}) == ("tml-stored", "stored")
    assert found({"TINKER_API_KEY": ""}) == ("tml-stored", "stored")
    assert found(command) == (None, None)
    assert found({}, credential_cmd="true") == (None, None)


def test_broken_credentials_file_matters_only_when_needed(tmp_path: Path) -> None:
    broken = CredentialsFile(tmp_path / "credentials.json")
    broken.path.write_text(f'{{"keys": "{KEY}", ')
    assert resolve(api_key="tml-a", credentials_file=broken).api_key == Secret("tml-a")
    assert resolve(credential_cmd="true", credentials_file=broken).api_key is None
    with pytest.raises(ConfigurationError, match=r"credentials\.json is not JSON") as caught:
        resolve(credentials_file=broken)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("key", ["tml-a b", "tml-a\nb", "tml-ü", "tml-a\x00"])
@pytest.mark.parametrize("variable", ["TINKER_API_KEY", "CLOUDFLARE_ACCESS_CLIENT_SECRET"])
def test_unsendable_keys_are_refused(key: str, variable: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{variable} holds blanks") as caught:
        resolve({variable: key})
    assert key not in str(caught.value)


# ---------------------------------------------------------------------------------------------- others
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"api_key": 7}, "api_key: expected text, got int"),
        ({"base_url": b"http://x"}, "base_url: expected text, got bytes"),
        ({"credential_cmd": ["key"]}, "credential_cmd: expected text, got list"),
        ({"cf_access_id": 7}, "cf_access_id: expected text, got int"),
        ({"cf_access_secret": 7}, "cf_access_secret: expected text, got int"),
        ({"max_retries": -1}, "max_retries must be a whole number from 0"),
        ({"max_retries": 2.5}, "max_retries"),
        ({"max_retries": True}, "max_retries"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"deadline_s": 0}, "deadline_s must be a positive number"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"deadline_s": "3"}, "deadline_s"),
        ({"credential_cmd_timeout_s": 0}, "credential_cmd_timeout_s"),
        ({"dialect": "yaml"}, "dialect is one of auto, proto, json"),
        ({"dialect": None}, "dialect"),
        ({"log": "loud"}, "log is one of info, debug, curl"),
        ({"timeout": 0}, "timeout.read must be a positive"),
        ({"timeout": (1, -1)}, "timeout.read"),
        ({"timeout": (1, 2, 3)}, "pair"),
        ({"timeout": float("inf")}, "timeout.read"),
        ({"timeout": "1"}, "timeout.read must be a number"),
        ({"default_headers": {"X-A": 3}}, r"default_headers\['X-A'\] is int, not str"),
        ({"default_headers": {"X-A": "a\r\nB: c"}}, r"default_headers\['X-A'\] cannot be sent"),
        ({"default_headers": {"X-A": "é"}}, r"default_headers\['X-A'\] cannot be sent: .* outside ASCII"),
        ({"default_headers": {"X-A": "\x7f"}}, r"default_headers\['X-A'\] cannot be sent"),
        ({"default_headers": {"X A": "a"}}, "cannot be sent"),
        ({"default_headers": {"é": "a"}}, "cannot be sent: that is no header name"),
        ({"default_headers": {"": "a"}}, "cannot be sent"),
    ],
)
def test_invalid_values_are_refused(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        resolve(**arguments)


@pytest.mark.parametrize(
    ("given", "connect", "read", "idle_s"),
    [
        (None, 5.0, 60.0, 60.0),
        (7, 5.0, 7.0, 7.0),
        ((3, 9), 3.0, 9.0, 9.0),
        (Timeout(connect=1, read=2, idle=3), 1.0, 2.0, 3.0),
        (SimpleNamespace(connect=10.0, read=300.0, write=None, pool=None), 10.0, 300.0, 300.0),
        (SimpleNamespace(connect=None, read=None), 86400.0, 86400.0, 86400.0),
    ],
)
def test_timeout_forms(given: Any, connect: float, read: float, idle_s: float) -> None:
    timeout = resolve(timeout=given).timeout
    assert (timeout.connect, timeout.read, timeout.idle_s) == (connect, read, idle_s)


def test_a_timeout_takes_the_arguments_of_the_reference_client() -> None:
    assert Timeout(60, connect=5) == Timeout(timeout=60, connect=5, write=1, pool=None)
    assert Timeout(60, connect=5) == Timeout(connect=5, read=60)
    assert Timeout(7) == Timeout(connect=7, read=7)
    assert Timeout(None) == Timeout(connect=None, read=None) == Timeout(86400)
    assert Timeout(SimpleNamespace(connect=3, read=None), read=9) == Timeout((3, 9))
    assert Timeout(Timeout(idle=4), read=9) == Timeout(read=9, idle=4)
    with pytest.raises(ConfigurationError, match=r"read must be .*'x'"):
        Timeout("x")
    made = Timeout(60, connect=5, idle=2)
    assert attrs.evolve(made, read=8) == Timeout(connect=5, read=8, idle=2)
    assert pickle.loads(pickle.dumps(made)) == made == copy.copy(made)


def test_a_base_url_may_be_an_object_whose_text_is_a_url() -> None:
    class URL:
        scheme = "http"

        def __str__(self) -> str:
            return "http://localhost:8000/pre/"

    assert resolve(base_url=URL()).base_url == "http://localhost:8000/pre"


# -------------------------------------------------------------------------------- frozen, equal, moved
def test_settings_are_frozen_values() -> None:
    settings = resolve(api_key=KEY, default_headers={"X-A": "1"})
    assert settings == resolve(api_key=KEY, default_headers={"x-a": "1"})
    assert settings != resolve(api_key=KEY + "x", default_headers={"X-A": "1"})
    assert len({settings, resolve(api_key=KEY, default_headers={"X-A": "1"})}) == 1
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        settings.base_url = "x"  # type: ignore[misc]  # the test
    assert copy.copy(settings) is copy.deepcopy(settings) is settings


def test_pickle_omits_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = resolve(
        base_url="http://h/pre",
        api_key=KEY,
        credential_cmd=f"echo {KEY}",
        cf_access_id=f"{KEY}id",
        cf_access_secret=f"{KEY}secret",
        project_id="p",
        tags=["t"],
        default_headers={"X-A": "1", "X-My-Token": KEY, "X-Note": f"see {KEY}"},
        session=requests.Session(),
        timeout=7,
        max_retries=3,
        max_body_bytes=9,
        sdk_version="0.25.0",
        dialect="json",
        deadline_s=4.0,
    )
    data = pickle.dumps(settings)
    assert KEY.encode() not in data
    monkeypatch.setenv("TINKER_API_KEY", "tml-other")
    monkeypatch.setenv("CLOUDFLARE_ACCESS_CLIENT_ID", "other-id")
    monkeypatch.setenv("TINKER_PROJECT_ID", "other-project")
    monkeypatch.setenv("TINKER_TAGS", "other")
    there = pickle.loads(data)
    assert (there.api_key, there.api_key_source) == (Secret("tml-other"), "environment")
    assert (there.cf_access_id, there.cf_access_secret) == (Secret("other-id"), None)
    assert (there.credential_cmd, there.session) == (None, None)
    assert there.default_headers == {"X-A": "1"}
    not_moved = ("api_key", "api_key_source", "cf_access_id", "cf_access_secret", "credential_cmd", "session")
    same = [a.name for a in attrs.fields(Settings) if a.name not in (*not_moved, "default_headers")]
    assert {name: getattr(there, name) for name in same} == {name: getattr(settings, name) for name in same}


# ------------------------------------------------------------------------------------------------ logs
@pytest.fixture
def our_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("tinker_sync")
    before = (logger.level, list(logger.handlers))
    yield logger
    logger.level, logger.handlers = before
    logger.setLevel(before[0])  # also clears the levels cached by child loggers


@contextmanager
def bare_root() -> Iterator[logging.Logger]:
    """Yield the root logger without its handlers, which are pytest's, as in a program without logging."""
    root = logging.getLogger()
    before = list(root.handlers)
    root.handlers = []
    try:
        yield root
    finally:
        root.handlers = before


@pytest.mark.parametrize(
    ("value", "level", "log"),
    [
        ("info", logging.INFO, "info"),
        ("debug", logging.DEBUG, "debug"),
        ("curl", logging.DEBUG, "curl"),
        ("DEBUG", None, None),
        ("nonsense", None, None),
        ("", None, None),
        (None, None, None),
    ],
)
def test_tinker_log(
    our_logger: logging.Logger, value: str | None, level: int | None, log: str | None
) -> None:
    before = our_logger.level
    settings = resolve({} if value is None else {"TINKER_LOG": value})
    assert settings.log == log
    assert settings.log_curl is (log == "curl")
    assert our_logger.level == (before if level is None else level)
    assert logging.getLogger().level != logging.DEBUG


def test_argument_overrides_tinker_log(our_logger: logging.Logger) -> None:
    assert resolve({"TINKER_LOG": "debug"}, log="info").log == "info"
    assert our_logger.level == logging.INFO


def test_records_are_printed_once(our_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    with bare_root() as root:
        for _ in range(3):
            resolve({"TINKER_LOG": "info"})
        child = logging.getLogger("tinker_sync.transport")
        child.info("hello %d", 3)
        child.debug("not this")
        assert root.handlers == []
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    stamp, name, rest = line.rstrip("\n").split(" - ", 2)
    assert len(stamp) == len("[2026-01-02 03:04:05")
    assert name.startswith("tinker_sync.transport:")
    assert rest == "INFO] hello 3"


def test_each_record_is_printed_once(our_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    with bare_root() as root:
        resolve({"TINKER_LOG": "debug"})
        root.addHandler(Keeper())  # after the client, as programs do
        logging.getLogger("tinker_sync.x").debug("hello")
    assert seen == ["hello"]
    assert capsys.readouterr().err == ""


def test_the_logger_of_the_reference_client_sets_level_and_handlers(our_logger: logging.Logger) -> None:
    seen: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    resolve({})
    our_logger.setLevel(logging.NOTSET)
    theirs, keeper = logging.getLogger("tinker"), Keeper()
    before = theirs.level
    theirs.addHandler(keeper)
    try:
        for level in (logging.INFO, logging.ERROR):
            theirs.setLevel(level)
            logging.getLogger("tinker_sync.session").warning("at %d", level)
    finally:
        theirs.removeHandler(keeper)
        theirs.setLevel(before)
    assert seen == ["at 20"]


def test_broken_stderr_is_ignored(our_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve({"TINKER_LOG": "debug"})
    monkeypatch.setattr(logging, "raiseExceptions", False)
    monkeypatch.setattr(sys, "stderr", None)
    with bare_root():
        logging.getLogger("tinker_sync.x").debug("hello")
