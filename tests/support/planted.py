"""A different secret for each place where a client can get one, and a search for them in a client's output.

Because the secrets differ, a failure can name the place.
"""

from __future__ import annotations

import base64
import json
import logging
import pickle
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from urllib.parse import quote

import attrs
import pytest
import requests

from tinker_sync._base.secret import Secret
from tinker_sync.config import CredentialsFile, StoredKey

TESTS = Path(__file__).parents[1]
JWT = "eyJhbGciOiJub25lIn0.eyJleHAiOjk5OTk5OTk5OTl9.PLANTED7jwt"

# Some do not look like keys: the package must recognise them by their origin.
PLANTED = {
    "api_key": "tml-PLANTED7argument",
    "opaque key": "PLANTED7opaque",
    "first token": "PLANTED7first",
    "second token": "PLANTED7second",
    "TINKER_API_KEY": "tml-PLANTED7environment",
    "stored key": "tml-PLANTED7stored",
    "command output": "PLANTED7printed",
    "command line": "PLANTED7commandline",
    "token": JWT,
    "default header": "PLANTED7header",
    "CF id": "PLANTED7cfid",
    "CF secret": "PLANTED7cfsecret",
    "proxy password": "PLANTED7proxy",
    "session password": "PLANTED7basic",
    "session header": "PLANTED7session",
    "weights_access_token": "PLANTED7weights",
    "userinfo": "PLANTED7userinfo",
    "signature": "PLANTED7signature",
    "bearer": "PLANTED7bearer",
    "basic": "PLANTED7own",
    "cookie": "PLANTED7cookie",
    "own cookie": "PLANTED7crumb",
    "netrc": "PLANTED7netrc",
}


def forms(text: str) -> list[str]:
    """Return the forms in which a text may occur: plain, percent-encoded, and in base64 at three offsets."""
    found = [text, quote(text, safe="")]
    for offset in range(3):
        encoded = base64.b64encode(b"x" * offset + text.encode()).decode().rstrip("=")
        found.append(encoded[4 if offset else 0 : -2])
    return found


FORMS = {
    place: forms(text.rpartition("PLANTED")[1] + text.rpartition("PLANTED")[2])
    for place, text in PLANTED.items()
}


# The parts of the secrets after "PLANTED", by which the search also finds a secret that was cut in two.
_ENDS = [text.rpartition("PLANTED")[2] for text in PLANTED.values()]
_PIECE = re.compile(
    "|".join([r"PLANTED(?!\[)", "PLANTE(?!D)", "ANTED7", *(end for end in _ENDS if len(end) > 4)])
)


def _begin_of_all(texts: tuple[str, ...]) -> str:
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in same)


# For each form, the text with which all secrets begin. A text without any of these has no secret.
_MARKS = {_begin_of_all(spellings) for spellings in zip(*FORMS.values(), strict=True)}
assert all(len(mark) > 5 for mark in _MARKS)


def found_in(text: str) -> list[str]:
    if not any(mark in text for mark in _MARKS):
        return []
    return [place for place, spellings in FORMS.items() if any(spelling in text for spelling in spellings)]


def assert_hidden(text: str, where: str) -> None:
    found = found_in(text)
    assert not found, f"{where} shows {found}: {text[:3000]}"
    rest = _PIECE.search(text)
    assert rest is None, f"{where} shows a piece of a secret: {text[max(rest.start() - 1500, 0) :][:3000]}"


# ---- the search


def faces(thing: object) -> Iterator[tuple[str, str]]:
    """Yield each text that can be made of an object, such as its repr or a pickle, after the text's name."""
    for show in (repr, str, format, ascii):
        yield show.__name__, show(thing)
    if hasattr(thing, "__dict__"):
        yield "vars", repr(vars(thing))
    if attrs.has(type(thing)):
        yield "asdict", repr(attrs.asdict(thing))  # type: ignore[arg-type]  # just checked
        yield "fields", repr([getattr(thing, name) for name in attrs.fields_dict(type(thing))])  # type: ignore[arg-type]
    yield "json", json.dumps(thing, default=repr)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        try:
            yield f"pickle {protocol}", pickle.dumps(thing, protocol).decode("latin-1")
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            yield f"refusal of pickle {protocol}", f"{error!r}"


def assert_object_hidden(thing: object) -> None:
    for name, text in faces(thing):
        assert_hidden(text, f"{name} of {type(thing).__name__}")


def chain(error: BaseException) -> Iterator[BaseException]:
    todo, seen = [error], set()
    while todo:
        one = todo.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            todo += [other for other in (one.__cause__, one.__context__) if other is not None]


def assert_exception_hidden(error: BaseException) -> None:
    for one in chain(error):
        assert_object_hidden(one)
        assert_hidden(repr(one.args), f"args of {one!r}")
    assert_hidden("".join(traceback.format_exception(error)), "the traceback")


def records_of(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """Return a function that returns all log records of the package as text, with their arguments.

    The function also checks the exceptions of the records for secrets.
    """
    caplog.set_level(logging.DEBUG, "tinker_sync")

    def all_of_it() -> str:
        # `caplog.records` is empty again in the teardown phase, so the records are taken by phase.
        written = [*caplog.get_records("setup"), *caplog.get_records("call")]
        records = [record for record in written if record.name.startswith("tinker_sync")]
        for record in records:
            if record.exc_info and record.exc_info[1]:
                assert_exception_hidden(record.exc_info[1])
        return "\n".join(f"{record.getMessage()} {vars(record)!r}" for record in records)

    return all_of_it


@contextmanager
def logger_restored() -> Iterator[None]:
    """Restore the level and the handlers of the package's logger after the block."""
    logger = logging.getLogger("tinker_sync")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.handlers = handlers
    logger.setLevel(level)


def provoke(action: Callable[[], object]) -> BaseException:
    """Return the exception of an action, which must raise one."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - every exception is searched
        return error
    raise AssertionError("nothing was raised")


# ---- the places


def planted_session(proxy: str = "") -> requests.Session:
    session = requests.Session()
    session.trust_env = False
    session.auth = ("me", PLANTED["session password"])
    session.headers["X-Session-Token"] = PLANTED["session header"]
    if proxy:
        session.proxies = {"http": f"http://me:{PLANTED['proxy password']}@{proxy}"}
    return session


def plant_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a key in the environment, and write another key to the credentials file."""
    monkeypatch.setenv("TINKER_API_KEY", PLANTED["TINKER_API_KEY"])
    CredentialsFile().add(
        "k", StoredKey(key=Secret(PLANTED["stored key"]), name="n", note="plain"), make_default=True
    )
