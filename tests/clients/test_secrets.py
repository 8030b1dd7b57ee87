"""No secret in reprs, errors, logs, pickles, handles and warnings of clients, wherever the secret came from.

Each place that can hold a secret has a different one (`support/planted.py`), so that a failure names the
place. The server is a parrot: it keeps every secret that it receives and repeats all of them in refusals,
failures, notices and good answers. When a test ends, the log (at DEBUG, with curl lines) and the console are
searched. New code through which secrets pass needs a case here.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import requests
from support.authority import Authority
from support.crowd import until
from support.hasty import FLAGS, beat_now, hasty_service, sampler_of, trainer_of
from support.planted import (
    JWT,
    PLANTED,
    assert_exception_hidden,
    assert_hidden,
    assert_object_hidden,
    found_in,
    logger_restored,
    plant_environment,
    planted_session,
    provoke,
    records_of,
)
from support.servers import Peer, ProxyServer, ScriptedServer, answer, resets, silent, unused_port
from support.tinker_stub import Answer, Asked, Behaviour, Stub, StubServer

from tinker_sync import auth, errors, types
from tinker_sync.clients.rest import AdminClient, RestClient
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.clients.service import ServiceClient
from tinker_sync.clients.training import TrainingClient
from tinker_sync.config import CredentialsFile
from tinker_sync.errors import EarlierCallFailedError

PATIENCE_S = 120.0
SOON_S = 60.0
"""A deadline that passes at once, because pauses take no time."""
PROMPT = types.ModelInput.from_ints([4711471, 4711472, 4711473])
ONE_TOKEN = types.SamplingParams(max_tokens=1)
STEP = types.AdamParams()
DATA = [types.Datum(PROMPT, {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]})]
CHECKPOINT = "tinker://run-1/weights/a"
TOKEN = PLANTED["weights_access_token"]
# The secrets that every request carries.
ALWAYS_TOLD = ("opaque key", "default header", "CF id", "CF secret", "session header")


# ---- the server


class Parrot(Stub):
    """A stub that repeats the secrets of earlier requests in all answers, and refuses what a test wants."""

    def __init__(self, flags: Mapping[str, Any] | None = None) -> None:
        config = {**FLAGS, "billing_exception_max_pause_duration_sec": 30, **(flags or {})}
        super().__init__(Behaviour(config=config))
        self.url = ""  # set by `StubServer`
        self.always: dict[str, Callable[[Asked], Answer]] = {}
        """The answer to every request of a path, until the test removes it."""
        self.discreet = False
        """True: it adds no secrets to good answers."""
        self._told: set[str] = set()

    async def answer(self, asked: Asked) -> Answer:
        self._told.update(value for value in asked.headers.values() if found_in(value))
        with suppress(ValueError):
            body = asked.json()
            self._told.update(text for text in (body or {}).values() if found_in(str(text)))
        made = await super().answer(asked)
        if self.discreet:
            return made
        made.headers.setdefault("X-Echo", self.words)
        if isinstance(made.body, dict):
            made.body = {**made.body, "heard": self.words}
        return made

    def _next_script(self, name: str, asked: Asked) -> Answer | None:
        always = self.always.get(name)
        return always(asked) if always else super()._next_script(name, asked)

    @property
    def words(self) -> str:
        """A text with every received header value and body field that contains a secret, and their parts."""
        parts = {part for told in self._told for part in re.split(r"[\s;=]+", told) if found_in(part)}
        logins = {told.partition(" ")[2] for told in self._told if told.startswith("Basic ")}
        passwords = {base64.b64decode(login).decode().partition(":")[2] for login in logins}
        return "you sent " + " ".join(sorted({*self._told, *parts, *passwords}))

    def refuses(self, path: str, status: int, form: str = "error") -> None:
        """Answer every request to a path with a status, and with all received secrets in one of `FORMS`."""

        def respond(asked: Asked) -> Answer:
            words = self.words
            body = FORMS[form](words)
            headers = {"X-Echo": words, "X-Request-Id": words, "X-Deprecation-Note": words}
            content_type = "text/html" if isinstance(body, bytes) else "application/json"
            return Answer(status, body, headers, content_type)

        self.always[path] = respond

    def says(self, path: str, make: Callable[[str], Any], status: int = 200) -> None:
        """Answer every request to a path with the body that `make` returns for the text of all secrets."""

        def respond(asked: Asked) -> Answer:
            return Answer(status, make(self.words))

        self.always[path] = respond

    def breaks(self, path: str, when: str = "after") -> None:
        """Cut the connection at every request to a path, before or after the server does the work."""
        self.always[path] = lambda _: Answer(abort=when)


FORMS: dict[str, Callable[[str], Any]] = {
    "error": lambda words: {"error": words, "category": "user"},
    "detail": lambda words: {"detail": words},
    "fields": lambda words: {"detail": [{"loc": ["body", "path"], "msg": words, "input": words}]},
    "inner": lambda words: {"detail": {"request": json.dumps({"heard": words})}},
    "text": lambda words: words.encode("latin-1"),
    "page": lambda words: f"<html><title>{words}</title></html>".encode("latin-1"),
}


def options(**more: Any) -> dict[str, Any]:
    """Return client options with a secret in every option that may have one."""
    return {
        "api_key": PLANTED["opaque key"],
        "default_headers": {"X-My-Token": PLANTED["default header"], "X-Plain": "plain"},
        "session": planted_session(),
        **more,
    }


@contextmanager
def world(
    flags: Mapping[str, Any] | None = None,
    *,
    hasty: bool = True,
    open_server: bool = False,
    always: Mapping[str, Callable[[Asked], Answer]] | None = None,
    **more: Any,
) -> Iterator[tuple[Parrot, ServiceClient]]:
    """Yield a parrot, and a client of it with a secret in every option.

    Args:
        flags: settings of the server.
        hasty: make a client whose pauses take no time.
        open_server: see `hasty_service`.
        always: the parrot's answers by path, before the client sends its first request; see `Parrot`.
        more: options of the client.
    """
    with StubServer(Parrot(flags)) as stub:
        assert isinstance(stub, Parrot)
        stub.always.update(always or {})
        given = options(**{"max_retries": 1, **more})
        if hasty:
            client = hasty_service(stub, open_server=open_server, **given)
        else:
            client = ServiceClient(base_url=stub.url, **given)
        with client:
            yield stub, client


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    return records_of(caplog)


@pytest.fixture(autouse=True)
def _planted_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plant_environment(monkeypatch)
    monkeypatch.setenv("CLOUDFLARE_ACCESS_CLIENT_ID", PLANTED["CF id"])
    monkeypatch.setenv("CLOUDFLARE_ACCESS_CLIENT_SECRET", PLANTED["CF secret"])
    monkeypatch.setenv("TINKER_LOG", "curl")
    with logger_restored():
        yield


@pytest.fixture(autouse=True)
def _nothing_shown(logged: Callable[[], str], capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert_hidden(logged(), "the log")
    assert_hidden("".join(capfd.readouterr()), "the console")


# ---- the checks


def check(action: Callable[[], object]) -> BaseException:
    """Check that the exception of an action shows no secret, also after pickling. Return the exception."""
    error = provoke(action)
    assert_exception_hidden(error)
    if isinstance(error, errors.TinkerError):
        assert_exception_hidden(pickle.loads(pickle.dumps(error)))
    return error


def check_future(future: Any) -> BaseException:
    """Check every way to read the failure of a future, also in another thread. Return the failure."""
    error = check(lambda: future.result(PATIENCE_S))
    with ThreadPoolExecutor(1) as threads:
        elsewhere = threads.submit(future.result, PATIENCE_S).exception(PATIENCE_S)
    assert elsewhere is not None
    assert_exception_hidden(elsewhere)
    assert_exception_hidden(provoke(lambda: asyncio.run(future.result_async())))
    assert_object_hidden(future)
    assert_hidden(f"{future.status()!r} {future.timeline!r} {future.request_ids!r}", "the status")
    return error


def copied(service: ServiceClient) -> Any:
    """Return the future of a copy of a checkpoint. Only this call has the access token of another user."""
    return RestClient(service.holder).copy_weights(CHECKPOINT, "project", weights_access_token=TOKEN)


# ---- the search


def test_the_search_finds_what_is_planted() -> None:
    """The search finds every secret in every form. Without this, the other tests would prove nothing."""
    for place, text in PLANTED.items():
        for shown in (f"x{text}x", quote(text, safe=""), basic(text), repr({"k": text})):
            assert found_in(shown) == [place]
    with pytest.raises(AssertionError, match=r"shows \['token'\]"):
        assert_exception_hidden(ValueError(PLANTED["token"]))
    assert found_in(pickle.dumps(PLANTED["stored key"]).decode("latin-1")) == ["stored key"]


# ---- reprs and logs of clients


def test_everything_clients_consist_of() -> None:
    with world(hasty=False) as (stub, service):
        trainer, sampler = trainer_of(service), sampler_of(service)
        rest, admin = RestClient(service.holder), AdminClient(service.holder)
        futures: list[Any] = [
            trainer.forward_backward(DATA, "cross_entropy"),
            trainer.optim_step(STEP),
            trainer.save_state("a"),
            sampler.sample(PROMPT, 1, ONE_TOKEN),
            sampler.compute_logprobs(PROMPT),
            rest.list_user_checkpoints(),
            copied(service),
        ]
        for future in futures:
            assert_object_hidden(future)
            future.result(PATIENCE_S)
            assert_object_hidden(future)
        assert {*found_in(stub.words)} >= {*ALWAYS_TOLD, "weights_access_token"}  # it has these to repeat
        for client in (service, trainer, sampler, rest, admin, service.holder):
            assert_object_hidden(client)


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"me:{password}".encode()).decode()


def session_with(**attributes: Any) -> requests.Session:
    session = requests.Session()
    session.trust_env = False
    for name, value in attributes.items():
        getattr(session, name).update(value) if name != "auth" else setattr(session, name, value)
    return session


BARE: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "bearer": (
        "bearer",
        lambda: {"default_headers": {"Authorization": f"Bearer {PLANTED['bearer']}"}, "session": None},
    ),
    "login": (
        "basic",
        lambda: {"default_headers": {"Authorization": basic(PLANTED["basic"])}, "session": None},
    ),
    "own cookies": (
        "own cookie",
        lambda: {"default_headers": {"Cookie": f"a=b; c={PLANTED['own cookie']}"}, "session": None},
    ),
    "bearer of a session": (
        "bearer",
        lambda: {"session": session_with(headers={"Authorization": f"bearer {PLANTED['bearer']}"})},
    ),
    "cookies of a session": (
        "cookie",
        lambda: {"session": session_with(cookies={"crumb": PLANTED["cookie"]})},
    ),
    "password of a session": (
        "session password",
        lambda: {"session": session_with(auth=("me", PLANTED["session password"]))},
    ),
}


@pytest.mark.parametrize("case", BARE)
@pytest.mark.parametrize("form", FORMS)
def test_what_a_server_reads_from_a_header_and_repeats(case: str, form: str) -> None:
    place, make = BARE[case]
    with world(**make()) as (stub, service):
        stub.refuses("/checkpoints", 422, form)
        check_future(RestClient(service.holder).list_user_checkpoints())
        assert place in found_in(stub.words)
        sampler = sampler_of(service)
        stub.refuses("/retrieve_future", 403, form)
        check_future(sampler.sample(PROMPT, 1, ONE_TOKEN))


def test_the_password_of_a_netrc_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine 127.0.0.1 login me password {PLANTED['netrc']}\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    with requests.Session() as session, world(session=session) as (stub, service):
        stub.refuses("/checkpoints", 422)
        check_future(RestClient(service.holder).list_user_checkpoints())
        assert "netrc" in found_in(stub.words)


def use_source(source: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the options of a client whose key comes from this place."""
    if source == "api_key":
        return {"api_key": PLANTED["api_key"]}
    if source != "TINKER_API_KEY":
        monkeypatch.delenv("TINKER_API_KEY")
    if source == "command output":
        line = f": {PLANTED['command line']}; printf %s {PLANTED['command output']}"
        monkeypatch.setenv("TINKER_CREDENTIAL_CMD", line)
    return {"api_key": None}


@pytest.mark.parametrize("source", ["api_key", "TINKER_API_KEY", "stored key", "command output"])
def test_keys_from_every_place(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with world(**use_source(source, monkeypatch)) as (stub, service):
        sampler = sampler_of(service)
        stub.refuses("/asample", 401, "text")
        check_future(sampler.sample(PROMPT, 1, ONE_TOKEN))
        assert source in found_in(stub.words)
        for client in (service, sampler, service.holder, service.holder.connection):
            assert_object_hidden(client)


def test_a_secret_that_is_cut_short() -> None:
    """If the client cuts a long text within a secret, no part of the secret stays."""
    key = PLANTED["default header"]
    with world() as (stub, service):
        service.get_server_capabilities()  # the client has the secret to compare with
        for cut in range(1, len(key)):
            text = "x" * (64 * 1024 - cut) + key + " and more"
            stub.always["/get_server_capabilities"] = lambda _, text=text: Answer(500, text.encode())  # type: ignore[misc]
            check(service.get_server_capabilities)


# ---- keys that are not to be had


@pytest.mark.parametrize(
    "line",
    [
        "echo {out}; echo 'it was {out}' >&2; exit 3",
        "echo {out}; echo {out}",
        "printf '{out}\\303\\274'",
        "echo {out}; echo {line} >&2; kill -9 $$",
        "true {line}",
        "no-such-command-{line}",
    ],
)
def test_credential_commands_that_fail(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY")
    command = line.format(out=PLANTED["command output"], line=PLANTED["command line"])
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", command)
    with world(api_key=None, hasty=False) as (_, service):
        assert isinstance(check(service.get_server_capabilities), errors.CredentialError)
        assert_object_hidden(service)


@pytest.mark.parametrize(
    "content",
    [
        '{{"keys": {{"k": {{"type": "manual", "key": "{}", ',
        '{{"keys": {{"k": {{"type": "manual", "key": "{}"}}}}}}',
        '{{"keys": {{"k": "{}"}}}}',
        '["{}"]',
        "{}",
    ],
)
def test_credentials_files_that_cannot_be_read(content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY")
    file = CredentialsFile()
    file.path.write_text(content.format(PLANTED["stored key"]))
    for use in (file.keys, file.default_key, ServiceClient, auth.raise_if_tinker_not_accessible):
        check(use)


def test_a_credentials_file_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    file = CredentialsFile()
    stored = file.default_key()
    assert stored is not None
    assert_object_hidden(file)
    assert_object_hidden(stored)
    check(lambda: file.delete("missing"))
    for name in ("replace", "fsync", "chmod"):
        with monkeypatch.context() as patch:
            patch.setattr(f"os.{name}", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "disk full")))
            check(lambda: file.add("k2", stored))


@pytest.mark.parametrize("status", [401, 500])
def test_asking_whether_the_service_is_accessible(
    status: int, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], str]
) -> None:
    with StubServer(Parrot()) as stub:
        assert isinstance(stub, Parrot)
        stub.refuses("/get_server_capabilities", status)
        monkeypatch.setenv("TINKER_BASE_URL", stub.url)
        check(auth.raise_if_tinker_not_accessible)
        assert "TINKER_API_KEY" in found_in(stub.words)
    assert "$TINKER_API_KEY" in logged()


# ---- pickles and handles


def test_pickles_and_handles_hold_no_secret() -> None:
    more = {"Accept-Team": "plain", "X-Disguised": f"Bearer {JWT}", "X-Same": PLANTED["opaque key"]}
    headers = {"X-My-Token": PLANTED["default header"], "Cookie": PLANTED["session header"], **more}
    with world(default_headers=headers) as (_, service):
        sampler = sampler_of(service)
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            assert_hidden(pickle.dumps(sampler, protocol).decode("latin-1"), f"pickle {protocol}")
        for handle in (sampler.get_sampler_handle(), sampler.__reduce__()[1][1]):
            content = base64.urlsafe_b64decode(handle).decode()
            assert_hidden(handle + content, "the handle")
            holder = json.loads(content)["holder"]
            assert (holder["api_key"], holder["default_headers_overrides"]) == (
                None,
                {"Accept-Team": "plain"},
            )
        told = base64.urlsafe_b64decode(sampler.get_sampler_handle(include_api_key=True)).decode()
        assert found_in(told) == ["opaque key"]
        trainer = trainer_of(service)
        for client in (service, service.holder, trainer, RestClient(service.holder)):
            refusal = provoke(lambda client=client: pickle.dumps(client))  # type: ignore[misc]
            assert_hidden(f"{refusal!r}", "the refusal of a pickle")


def test_clients_made_of_handles() -> None:
    with world(hasty=False) as (stub, service):
        sampler = sampler_of(service)
        stub.discreet = True  # a client cannot know the secrets of other clients
        copies = [
            SamplingClient.from_sampler_handle(sampler.get_sampler_handle(include_api_key=True)),
            SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key=PLANTED["first token"]),
        ]
        try:
            for copy in copies:
                copy.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
                assert_object_hidden(copy)
                assert_hidden(copy.get_sampler_handle(), "the handle of a copy")
        finally:
            for copy in copies:
                copy.holder.close("success").result(PATIENCE_S)
        keys = {asked.headers["x-api-key"] for asked in stub.asked("/asample")}
        assert keys == {PLANTED["opaque key"], PLANTED["first token"]}


def handle_with(holder: Mapping[str, Any] | None = None, **changes: Any) -> str:
    """Return a sampler handle with a key and a secret header, which the reference client's may contain."""
    whole = {
        "base_url": "http://localhost:1",
        "default_headers_overrides": {"X-My-Token": PLANTED["default header"]},
        "client_config": {},
        "client_dynamic_config": {},
        "api_key": PLANTED["opaque key"],
        **(holder or {}),
    }
    state = {"session_id": "s", "sampling_session_id": "p", "holder": whole, **changes}
    return base64.urlsafe_b64encode(json.dumps(state).encode()).decode()


@pytest.mark.parametrize(
    "handle",
    [
        handle_with()[:-9],
        handle_with() + "\u00fc",
        base64.urlsafe_b64encode(PLANTED["opaque key"].encode()).decode(),
        base64.urlsafe_b64encode(json.dumps([PLANTED["opaque key"]]).encode()).decode(),
        handle_with(session_id=""),
        handle_with({"api_key": f"{PLANTED['opaque key']} {PLANTED['opaque key']}"}),
        handle_with({"api_key": [PLANTED["opaque key"]]}),
        handle_with({"base_url": f"http://me:{PLANTED['userinfo']}@host"}),
        handle_with({"client_config": {"fwdbwd_max_chunk_len": PLANTED["opaque key"]}}),
        handle_with({"client_config": [PLANTED["opaque key"]]}),
        handle_with({"client_config": {"tinker_sync": {"dialect": {"version": None}}}}),
        handle_with({"default_headers_overrides": {"X-My-Token": [PLANTED["default header"]]}}),
        handle_with({"default_headers_overrides": [PLANTED["default header"]]}),
        handle_with({"default_headers_overrides": {"X-My-Token": f"{PLANTED['default header']}\n"}}),
    ],
)
def test_invalid_handles(handle: str) -> None:
    for api_key in (None, f"{PLANTED['api_key']} and a blank"):
        error = check(lambda api_key=api_key: SamplingClient.from_sampler_handle(handle, api_key=api_key))  # type: ignore[misc]
        assert isinstance(error, (errors.InvalidInputError, errors.ConfigurationError)), repr(error)


# ---- making clients


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout": -1},
        {"dialect": "none"},
        {"base_url": f"http://me:{PLANTED['userinfo']}@host"},
        {"base_url": f"http://host/?token={PLANTED['userinfo']}"},
        {"api_key": f"{PLANTED['api_key']} x"},
        {"default_headers": {"X-My-Token": [PLANTED["default header"]]}},
        {"default_headers": {1: PLANTED["default header"]}},
        {"default_headers_overrides": {"X-My-Token": f"{PLANTED['default header']}\n"}},
        {"max_retries": -1},
    ],
    ids=lambda wrong: "-".join(wrong),
)
def test_clients_that_cannot_be_made(wrong: dict[str, Any]) -> None:
    error = check(lambda: ServiceClient(**options(**wrong)))
    assert isinstance(error, errors.ConfigurationError)
    given = {name: value for name, value in wrong.items() if name in ("base_url", "api_key")}
    if given:
        check(lambda: RestClient(**given))
        check(lambda: AdminClient(**given))


@pytest.mark.parametrize(
    "wrong",
    [
        {"TINKER_BASE_URL": f"https://me:{PLANTED['userinfo']}@host"},
        {"TINKER_API_KEY": f"{PLANTED['TINKER_API_KEY']} x"},
        {"CLOUDFLARE_ACCESS_CLIENT_SECRET": f"{PLANTED['CF secret']}\u00fc"},
    ],
    ids=lambda wrong: "-".join(wrong),
)
def test_environments_in_which_no_client_can_be_made(
    wrong: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in wrong.items():
        monkeypatch.setenv(name, value)
    assert isinstance(check(ServiceClient), errors.ConfigurationError)


def test_arguments_that_make_no_sense() -> None:
    with pytest.warns(FutureWarning, match="bearer") as warned:
        service = ServiceClient(bearer=PLANTED["opaque key"])
    with service:
        assert_hidden(str(warned[0].message), "the warning")
        check(lambda: ServiceClient(bearer=PLANTED["opaque key"]))  # it warns, and warnings are errors here
        check(lambda: ServiceClient(apikey=PLANTED["opaque key"]))
        check(lambda: RestClient(service.holder, api_key=PLANTED["opaque key"]))


# ---- refusals


@pytest.mark.parametrize(("status", "form"), [(422, "fields"), (422, "inner"), (401, "text"), (500, "page")])
def test_refused_calls(status: int, form: str) -> None:
    with world() as (stub, service):
        trainer, sampler = trainer_of(service), sampler_of(service)
        for path in ("/asample", "/optim_step", "/get_info", "/get_server_capabilities", "/copy_weights"):
            stub.refuses(path, status, form)
        check_future(copied(service))
        assert {*found_in(stub.words)} >= {*ALWAYS_TOLD, "weights_access_token"}
        check_future(sampler.sample(PROMPT, 1, ONE_TOKEN))
        check_future(sampler.compute_logprobs(PROMPT))
        first, second = trainer.optim_step(STEP), trainer.save_state("a")
        assert isinstance(check_future(first), errors.APIStatusError)
        for later in (second, trainer.forward(DATA, "cross_entropy")):
            if status == 422:  # the application has refused the call, so the next calls are sent
                assert later.exception(PATIENCE_S) is None
                continue
            error = check_future(later)
            assert isinstance(error, EarlierCallFailedError)
            assert "***" in error.cause
        check(trainer.get_info)
        check(service.get_server_capabilities)


@pytest.mark.parametrize(("form", "open_server"), [("error", False), ("fields", True), ("text", True)])
def test_refused_results(form: str, open_server: bool) -> None:
    with world(open_server=open_server) as (stub, service):
        trainer, sampler = trainer_of(service), sampler_of(service)
        for status in (400, 401, 402, 404, 408, 410, 500):
            stub.refuses("/retrieve_future", status, form)
            check_future(sampler.sample(PROMPT, 1, ONE_TOKEN, deadline=SOON_S))
            check_future(trainer.optim_step(STEP, deadline=SOON_S))


BEGINNINGS = ("/client/config", "/client/dynamic_config", "/create_session", "/create_sampling_session")


@pytest.mark.parametrize("path", BEGINNINGS)
def test_refusals_of_the_first_requests(path: str) -> None:
    with StubServer(Parrot()) as stub:
        assert isinstance(stub, Parrot)
        with ServiceClient(base_url=stub.url, **options(max_retries=0)) as service:
            for status, form in ((403, "text"), (422, "fields"), (501, "detail"), (200, "text")):
                stub.refuses(path, status, form)
                if path.startswith("/client") and status == 501:
                    continue  # a server without such a call
                check(lambda: sampler_of(service))


def test_messages_and_sessions_that_are_lost(logged: Callable[[], str]) -> None:
    kinds = ("info_message", "warning_message", "error_message")
    with world() as (stub, service):
        stub.says("/create_session", lambda words: {"session_id": "s", **dict.fromkeys(kinds, words)})
        sampler = sampler_of(service)
        assert logged().count("you sent") >= len(kinds)
        for status in (500, 410):
            stub.refuses("/session_heartbeat", status, "text")
            beat_now(service)
        error = check(lambda: sampler.sample(PROMPT, 1, ONE_TOKEN))
        assert isinstance(error, errors.SessionLostError)
        assert "***" in error.reason
        stub.refuses("/sessions/s/finish", 500, "text")
    assert_object_hidden(service)


# ---- answers that cannot be read


@pytest.mark.parametrize(
    "make",
    [
        lambda words: words.encode("latin-1"),
        lambda words: {"request_id": [words], "model_id": {words: words}, "tinker_path": {"a": words}},
        lambda words: [words],
    ],
    ids=["text", "wrong kinds", "list"],
)
def test_answers_that_cannot_be_read(make: Callable[[str], Any]) -> None:
    with world() as (stub, service):
        trainer, sampler = trainer_of(service), sampler_of(service)
        copied(service).result(PATIENCE_S)
        for path in ("/asample", "/get_info", "/create_sampling_session", "/copy_weights", "/optim_step"):
            stub.says(path, make)
        check_future(trainer.optim_step(STEP))
        check_future(sampler.sample(PROMPT, 1, ONE_TOKEN))
        check(trainer.get_info)
        check(lambda: sampler_of(service))
        check_future(copied(service))


@pytest.mark.parametrize(
    "make",
    [
        lambda words: words.encode("latin-1"),
        lambda words: {"error": words, "category": "user"},
        lambda words: {"sequences": [{"stop_reason": words, "tokens": [1]}], "metrics": {words: words}},
        lambda words: {"sequences": words, "metrics": [words], "path": [words]},
    ],
    ids=["text", "error", "fields", "kinds"],
)
def test_results_that_cannot_be_read(make: Callable[[str], Any]) -> None:
    with world() as (stub, service):
        trainer, sampler = trainer_of(service), sampler_of(service)
        copied(service).result(PATIENCE_S)
        stub.says("/retrieve_future", make)
        check_future(sampler.sample(PROMPT, 1, ONE_TOKEN))
        check_future(trainer.optim_step(STEP))
        check_future(trainer.save_state("a"))


def test_polls_for_many_that_cannot_be_read(logged: Callable[[], str]) -> None:
    with world({"sample_use_retrieve_futures": True}, hasty=False) as (stub, service):
        stub.says("/retrieve_futures", lambda words: {"completions": [], "cursor": words})
        sampler = sampler_of(service)
        sampler.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
    assert "one by one" in logged()


# ---- no answer at all


def test_servers_that_are_not_there_or_not_to_be_trusted(tmp_path: Path) -> None:
    foreign = Authority(tmp_path).server_context()
    with ScriptedServer(Peer.wait_gone, tls=foreign) as untrusted, unused_port() as port:
        for url in (untrusted.url, f"http://127.0.0.1:{port}", "http://server.invalid"):
            with ServiceClient(base_url=url, **options(max_retries=0)) as service:
                check(service.get_server_capabilities)
                check(lambda service=service: service.create_sampling_client(base_model="m").result())  # type: ignore[misc]
                check_future(copied(service))


def talk_nonsense(peer: Peer) -> None:
    seen = peer.read_request()
    peer.send(b"HTTP/1.1 200 OK\r\nX-Bad " + str(seen.pairs).encode() + b"\r\n\r\n")
    peer.close()


def break_off(peer: Peer) -> None:
    seen = peer.read_request()
    peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n" + str(seen.pairs).encode())
    peer.close()


def say_it_for_a_version(peer: Peer) -> None:
    seen = peer.read_request()
    peer.send(b"HTTP/1.1 " + str(seen.header("x-my-token")).encode() + b"\r\n\r\n")
    peer.close()


def say_it_for_a_size(peer: Peer) -> None:
    seen = peer.read_request()
    peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    peer.send(str(seen.header("x-my-token")).encode() + b"\r\n")
    peer.close()


def redirect_away(peer: Peer) -> None:
    peer.read_request()
    target = f"http://me:{PLANTED['userinfo']}@localhost:1/x?sig={PLANTED['signature']}"
    peer.send(answer(b"", status=307, headers={"Location": target}))
    peer.wait_gone()


@pytest.mark.parametrize(
    "script",
    [silent, resets, talk_nonsense, break_off, say_it_for_a_version, say_it_for_a_size, redirect_away],
    ids=lambda script: script.__name__,
)
def test_servers_that_break_the_rules(script: Callable[[Peer], None]) -> None:
    with (
        ScriptedServer(script) as server,
        ServiceClient(base_url=server.url, **options(max_retries=0, timeout=0.1)) as service,
    ):
        check(service.get_server_capabilities)
        check_future(copied(service))
        assert_object_hidden(service)


@pytest.mark.parametrize("refuse", [0, 403, 502])
@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("place", ["session", "environment"])
def test_proxies_that_refuse(place: str, scheme: str, refuse: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with ProxyServer(user="me", password="another", refuse=refuse) as proxy:
        session = None
        if place == "session":
            session = planted_session(f"127.0.0.1:{proxy.port}")
            session.proxies["https"] = session.proxies["http"]
        else:
            monkeypatch.setenv(f"{scheme}_proxy", f"me:{PLANTED['proxy password']}@127.0.0.1:{proxy.port}")
        given = options(max_retries=0, session=session)
        with ServiceClient(base_url=f"{scheme}://server.invalid", **given) as service:
            check(service.get_server_capabilities)
            check_future(copied(service))
        assert proxy.seen


@pytest.mark.parametrize("proxy", ["127.0.0.1:1", "127.0.0.1:port", "[::1", "server.invalid:3128"])
def test_proxies_that_are_not_there(proxy: str) -> None:
    def use() -> None:
        given = options(max_retries=0, session=planted_session(proxy))
        with ServiceClient(base_url="http://server.invalid", **given) as service:
            service.get_server_capabilities()

    check(use)


# ---- queues and deadlines


@pytest.mark.parametrize(
    ("status", "notice"),
    [
        (408, lambda words: {"queue_state": "paused_capacity", "queue_state_reason": words}),
        (200, lambda words: {"type": "try_again", "queue_state": "active", "queue_state_reason": words}),
        (408, lambda words: {"queue_state": words, "queue_state_reason": words}),
    ],
)
def test_notices_and_deadlines(status: int, notice: Callable[[str], Any]) -> None:
    heard: list[Any] = []
    with world() as (stub, service):
        service.holder.notices.listen(heard.append)
        sampler = sampler_of(service)
        trainer = trainer_of(service)
        stub.says("/retrieve_future", notice, status)
        for future in (
            sampler.sample(PROMPT, 1, ONE_TOKEN, deadline=SOON_S),
            trainer.optim_step(STEP, deadline=SOON_S),
        ):
            error = check_future(future)
            assert isinstance(error, errors.DeadlineError)
            assert "***" in error.last_words
    assert heard
    for state in heard[:5]:
        assert_object_hidden(state)


def test_futures_that_are_paused() -> None:
    with world(hasty=False) as (stub, service):
        sampler = sampler_of(service)
        notice = {"queue_state": "paused_capacity", "queue_state_reason": stub.words}
        stub.script("/retrieve_future", Answer(408, notice), Answer(status=0))
        future = sampler.sample(PROMPT, 1, ONE_TOKEN)
        until(lambda: future.status().reason is not None)
        assert "***" in str(future.status().reason)
        assert_object_hidden(future)
        check(lambda: future.result(0))


def test_listeners_and_callbacks_that_fail(logged: Callable[[], str]) -> None:
    with world() as (stub, service):
        service.holder.notices.listen(lambda _: 1 / 0)
        sampler = sampler_of(service)
        notice = {"queue_state": "paused_capacity", "queue_state_reason": stub.words}
        stub.script("/retrieve_future", Answer(408, notice))
        future = sampler.sample(PROMPT, 1, ONE_TOKEN)
        future.add_done_callback(lambda _: 1 / 0)
        future.result(PATIENCE_S)
        until(lambda: "a callback of" in logged())
    assert "an observer of queue states failed" in logged()


# ---- weights of other users


def calls_with_tokens(service: ServiceClient, trainer: TrainingClient) -> list[Callable[[], object]]:
    """Return functions for all calls that take an access token, plain and awaited.

    The last two copy checkpoints.
    """
    rest = RestClient(service.holder)
    soon = {"deadline": SOON_S}

    def call(method: Callable[..., Any], *args: Any, **more: Any) -> Callable[[], object]:
        def made() -> object:
            outcome = method(*args, weights_access_token=TOKEN, **more)
            return outcome.result(PATIENCE_S)

        return made

    def await_(method: Callable[..., Any], *args: Any, **more: Any) -> Callable[[], object]:
        async def made() -> object:
            outcome = await method(*args, weights_access_token=TOKEN, **more)
            return await outcome if hasattr(outcome, "result_async") else outcome

        return lambda: asyncio.run(made())

    return [
        call(service.create_training_client_from_state, CHECKPOINT, **soon),
        call(service.create_training_client_from_state_with_optimizer, CHECKPOINT, **soon),
        await_(service.create_training_client_from_state_async, CHECKPOINT, **soon),
        call(trainer.load_state, CHECKPOINT, **soon),
        await_(trainer.load_state_with_optimizer_async, CHECKPOINT, **soon),
        call(rest.copy_weights, CHECKPOINT, "project"),
        await_(rest.copy_weights_async, CHECKPOINT, "project"),
    ]


both_flows = pytest.mark.parametrize(
    "flags",
    [{"create_model_via_load_weights": False}, {"create_model_via_load_weights": True}],
    ids=["three calls", "one call"],
)
no_warning = pytest.mark.filterwarnings("ignore:load_state")


@no_warning
@both_flows
def test_access_tokens_in_use(flags: dict[str, Any], logged: Callable[[], str]) -> None:
    with world(flags, hasty=False, project_id="project") as (stub, service):
        trainer = trainer_of(service)
        for call in calls_with_tokens(service, trainer):
            assert_object_hidden(call())
        service.copy_weights(CHECKPOINT, weights_access_token=TOKEN).result(PATIENCE_S)
        assert TOKEN in stub.words
    assert "$WEIGHTS_ACCESS_TOKEN" in logged()
    assert "$X_TINKER_WEIGHTS_ACCESS_TOKEN" in logged()


CHECKPOINTS = ("/weights_info", "/load_weights", "/copy_weights")
RESULTS = ("/retrieve_future",)
TROUBLE: dict[str, tuple[tuple[str, ...], Callable[[Parrot, str], None]]] = {
    "422": (CHECKPOINTS[1:], lambda stub, path: stub.refuses(path, 422, "fields")),
    "reset": (CHECKPOINTS, lambda stub, path: stub.breaks(path)),
    "odd": (CHECKPOINTS, lambda stub, path: stub.says(path, lambda words: [words])),
    "odd result": (RESULTS, lambda stub, path: stub.says(path, lambda words: {"path": [words]})),
    "failed": (RESULTS, lambda stub, path: stub.says(path, lambda words: {"error": words})),
    "paused": (RESULTS, lambda stub, path: stub.says(path, lambda words: {"queue_state": words}, 408)),
}


@no_warning
@both_flows
@pytest.mark.parametrize("trouble", TROUBLE)
def test_access_tokens_in_trouble(flags: dict[str, Any], trouble: str) -> None:
    with world(flags, max_retries=0) as (stub, service):
        trainer = trainer_of(service)
        calls = calls_with_tokens(service, trainer)
        paths, make = TROUBLE[trouble]
        for path in paths:
            make(stub, path)
        if paths is RESULTS:
            for copy in calls[-2:]:  # the answer to a copy is no promise
                copy()
            del calls[-2:]
        for call in calls:
            check(call)
        assert TOKEN in stub.words


@no_warning
def test_access_tokens_after_the_end() -> None:
    with world() as (_, service):
        trainer = trainer_of(service)
        service.close("success").result(PATIENCE_S)
        for call in calls_with_tokens(service, trainer):
            assert isinstance(check(call), errors.ClientClosedError)


@no_warning
@both_flows
@pytest.mark.parametrize("wrong", ["\ud800", {1, 2}, float("nan")], ids=["surrogate", "set", "nan"])
def test_loads_that_cannot_be_sent(flags: dict[str, Any], wrong: Any) -> None:
    with world(flags) as (_, service):
        load = partial(service.create_training_client_from_state, CHECKPOINT)
        check(lambda: load(user_metadata={"note": wrong}, weights_access_token=TOKEN))
        check(lambda: load(weights_access_token=f"{TOKEN}\ud800"))
        trainer = trainer_of(service)
        check(lambda: trainer.load_state(f"{CHECKPOINT}\ud800", weights_access_token=TOKEN))


# ---- short-lived tokens, signed addresses


def test_exchanged_tokens() -> None:
    tokens = {"/auth/token": lambda _: Answer(body={"jwt": JWT})}
    with world({"pjwt_auth_enabled": True}, always=tokens, max_retries=0) as (stub, service):
        sampler = sampler_of(service)
        sampler.sample(PROMPT, 1, ONE_TOKEN).result(PATIENCE_S)
        assert JWT in stub.words
        assert_hidden(sampler.get_sampler_handle(), "the handle")
        stub.refuses("/asample", 401, "text")
        check_future(sampler.sample(PROMPT, 1, ONE_TOKEN))


@pytest.mark.parametrize("status", [401, 500])
def test_exchanges_that_are_refused(status: int) -> None:
    with world({"pjwt_auth_enabled": True}, hasty=False, max_retries=0) as (stub, service):
        stub.refuses("/auth/token", status, "text")
        check(lambda: sampler_of(service))
        check(service.get_server_capabilities)


@pytest.mark.parametrize(
    "body",
    [f'{{"jwt": "{JWT}"', f'{{"jwt": ["{JWT}"]}}', f'{{"jwt": "{JWT} x"}}', f'{{"token": "{JWT}"}}', JWT],
)
def test_exchanges_that_cannot_be_read(body: str) -> None:
    tokens = {"/auth/token": lambda _: Answer(body=body.encode(), headers={"Set-Cookie": JWT})}
    with world({"pjwt_auth_enabled": True}, always=tokens, hasty=False, max_retries=0) as (_, service):
        check(service.get_server_capabilities)


def test_exchanges_that_are_refused_later() -> None:
    tokens = {"/auth/token": lambda _: Answer(body={"jwt": PLANTED["first token"]})}
    with world({"pjwt_auth_enabled": True}, always=tokens, max_retries=0) as (stub, service):
        sampler = sampler_of(service)
        trainer = trainer_of(service)
        stub.refuses("/auth/token", 401, "text")
        clock: Any = service.holder.clock
        clock.advance(1e7)  # longer than any token lasts
        for future in (sampler.sample(PROMPT, 1, ONE_TOKEN), trainer.optim_step(STEP), copied(service)):
            assert "no new one" in str(check_future(future))


def test_tokens_that_were_replaced() -> None:
    """An earlier token is still masked wherever its value occurs."""
    tokens = iter(["first token", "second token"])
    exchange = {"/auth/token": lambda _: Answer(body={"jwt": PLANTED[next(tokens)]})}
    with world({"pjwt_auth_enabled": True}, always=exchange, max_retries=0) as (stub, service):
        service.get_server_capabilities()
        clock: Any = service.holder.clock
        clock.advance(59)
        service.get_server_capabilities()
        assert {*found_in(stub.words)} >= {"first token", "second token"}
        stub.refuses("/get_server_capabilities", 401, "text")
        check(service.get_server_capabilities)


def test_signed_addresses() -> None:
    signed = f"https://bucket/o?X-Signature={PLANTED['signature']}"
    with world() as (stub, service):
        rest = RestClient(service.holder)
        run = "/training_runs/run-1/checkpoints"
        stub.says(
            f"{run}/external_weights/a/external_weights_urls",
            lambda _: {"urls": {"a": signed}, "expires": "2026-01-31"},
        )
        stub.always[f"{run}/weights/a/archive"] = lambda _: Answer(302, headers={"Location": signed})
        stub.says("/sessions/s/trace_export", lambda _: {"status": "ready", "url": signed})
        futures: list[Any] = [
            rest.get_external_weights_urls("tinker://run-1/external_weights/a"),
            rest.get_checkpoint_archive_url("run-1", "weights/a"),
            rest.export_session_trace("s"),
        ]
        for future in futures[:2]:
            assert_hidden(f"{future.result(PATIENCE_S)!r} {future.result()!s}", "an address")
        assert futures[2].result(PATIENCE_S) == signed
        for future in futures:
            assert_hidden(repr(future), "a future")
        stub.says("/sessions/s/trace_export", lambda words: {"status": "failed", "error": words})
        check_future(rest.export_session_trace("s"))
        stub.says("/sessions/s/trace_export", lambda words: {"status": words, "url": signed})
        check_future(rest.export_session_trace("s"))
        stub.says("/sessions/s/trace_export", lambda words: words.encode())
        check_future(rest.export_session_trace("s"))
