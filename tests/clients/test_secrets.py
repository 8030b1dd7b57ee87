"""No secret in reprs, errors, logs, pickles, handles and reports of whole clients.

The server is a parrot: it keeps every secret that it receives and repeats all of them in refusals, failures,
notices and good answers. `tests/test_secrets.py` covers settings, keys and the transport; these tests cover
the whole client. When a client ends, they search the failure reports that the server received. When a test
ends, they search the log (at DEBUG, with curl lines) and the console.
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

import pytest
import requests
from attrs import evolve
from support.authority import Authority
from support.crowd import until
from support.hasty import FLAGS, hasty_service, sampler_of, trainer_of
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
from support.servers import Peer, ScriptedServer, unused_port
from support.tinker_stub import Answer, Asked, Behaviour, Stub, StubServer

from tinker_sync import errors, types
from tinker_sync.clients.rest import AdminClient, RestClient
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.clients.service import ServiceClient
from tinker_sync.clients.training import TrainingClient
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
        heartbeat: Any = service.holder.server.session._heartbeat
        for status in (500, 410):
            stub.refuses("/session_heartbeat", status, "text")
            heartbeat.step()
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


@pytest.mark.parametrize("when", ["before", "after"])
def test_resets(when: str) -> None:
    with world() as (stub, service):
        trainer, sampler = trainer_of(service), sampler_of(service)
        stub.breaks("/retrieve_future", when)
        check_future(sampler.sample(PROMPT, 1, ONE_TOKEN))
        for path in ("/asample", "/optim_step", "/get_info", "/get_server_capabilities", "/copy_weights"):
            stub.breaks(path, when)
        check_future(sampler.sample(PROMPT, 1, ONE_TOKEN))
        check_future(trainer.optim_step(STEP))
        check_future(trainer.save_state("a"))
        check(service.get_server_capabilities)
        check_future(copied(service))


def test_servers_that_are_not_there_or_not_to_be_trusted(tmp_path: Path) -> None:
    foreign = Authority(tmp_path).server_context()
    with ScriptedServer(Peer.wait_gone, tls=foreign) as untrusted, unused_port() as port:
        for url in (untrusted.url, f"http://127.0.0.1:{port}", "http://server.invalid"):
            with ServiceClient(base_url=url, **options(max_retries=0)) as service:
                check(service.get_server_capabilities)
                check(lambda service=service: service.create_sampling_client(base_model="m").result())  # type: ignore[misc]
                check_future(copied(service))


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


def test_exchanges_that_are_refused_later() -> None:
    tokens = {"/auth/token": lambda _: Answer(body={"jwt": PLANTED["first token"]})}
    with world({"pjwt_auth_enabled": True}, hasty=False, always=tokens, max_retries=0) as (stub, service):
        sampler = sampler_of(service)
        trainer = trainer_of(service)
        stub.refuses("/auth/token", 401, "text")
        tokens_kept: Any = service.holder.connection.keys._tokens
        tokens_kept._held = evolve(tokens_kept._held, lifetime_s=0.0)
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
