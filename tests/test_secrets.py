"""No secret in reprs, log records, exceptions and pickles of settings, keys and the transport.

Each place that can hold a secret has a different one, so that a failure names the place. Each test uses all
of them, and then searches its results, exceptions and log. New code through which secrets pass needs a new
test.
"""

from __future__ import annotations

import base64
import copy
import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import attrs
import pytest
from support.clock import FakeClock
from support.planted import (
    JWT,
    PLANTED,
    assert_exception_hidden,
    assert_hidden,
    assert_object_hidden,
    found_in,
    logger_restored,
    plant_environment,
    planted,
    planted_session,
    provoke,
    records_of,
)
from support.servers import AnsweringServer, ProxyServer, ScriptedServer, answer

from tinker_sync import auth, errors
from tinker_sync._base.secret import Secret
from tinker_sync.config import CredentialsFile, Settings
from tinker_sync.errors import TinkerError
from tinker_sync.transport.auth import KeyRing
from tinker_sync.transport.call import Call, Reply
from tinker_sync.transport.caller import Caller
from tinker_sync.transport.http import Http
from tinker_sync.transport.journal import Journal
from tinker_sync.transport.tokens import Grant, read_grant


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    return records_of(caplog)


@pytest.fixture(autouse=True)
def _quiet_logger() -> Iterator[None]:
    with logger_restored():
        yield


@pytest.fixture(autouse=True)
def _nothing_shown(logged: Callable[[], str], capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert_hidden(logged(), "the log")
    assert_hidden("".join(capfd.readouterr()), "the console")


@pytest.fixture(autouse=True)
def _planted_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_environment(monkeypatch)


def test_the_search_finds_what_is_planted() -> None:
    """The search finds every secret in every form. Without this, the other tests would prove nothing."""
    for place, text in PLANTED.items():
        basic = base64.b64encode(f"me:{text}".encode()).decode()
        for shown in (f"x{text}x", quote(text, safe=""), f"Basic {basic}", repr({"k": text})):
            assert found_in(shown) == [place]
    with pytest.raises(AssertionError, match=r"shows \['token'\]"):
        assert_exception_hidden(ValueError(PLANTED["token"]))
    assert found_in(pickle.dumps(PLANTED["stored key"]).decode("latin-1")) == ["stored key"]


# ---- settings, keys and files


@pytest.mark.parametrize("source", ["argument", "environment", "stored"])
def test_settings(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more: dict[str, Any] = {} if source == "argument" else {"api_key": ""}
    if source == "stored":
        monkeypatch.delenv("TINKER_API_KEY")
        more["credential_cmd"] = ""
    settings = planted(**more)
    assert settings.api_key_source == source
    for thing in (
        settings,
        copy.copy(settings),
        copy.deepcopy(settings),
        attrs.evolve(settings, project_id="p"),
    ):
        assert_object_hidden(thing)
    assert_object_hidden(settings.default_headers)
    assert_hidden(repr(dict(settings.default_headers)), "default headers as a dict")
    assert_hidden(repr(settings.secrets), "the list of secrets")


@pytest.mark.parametrize(
    "wrong",
    [
        {"base_url": f"https://me:{PLANTED['userinfo']}@host"},
        {"base_url": f"https://host/?token={PLANTED['userinfo']}"},
        {"base_url": f"nonsense://me:{PLANTED['userinfo']}@host:port"},
        {"api_key": f"{PLANTED['api_key']} and a blank"},
        {"cf_access_secret": f"{PLANTED['CF secret']}\u00fc"},
        {"default_headers": {"X-My-Token": f"{PLANTED['default header']}\r\n"}},
        {"timeout": -1},
        {"max_retries": -1},
        {"dialect": "none"},
        {"log": "none"},
        {"session": None, "deadline_s": -1},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_settings_that_are_refused(wrong: dict[str, Any]) -> None:
    error = provoke(lambda: planted(**wrong))
    assert isinstance(error, errors.ConfigurationError)
    assert_exception_hidden(error)


def test_environment_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = f"http://u:{PLANTED['proxy password']}@p"
    given = {"TINKER_API_KEY": PLANTED["TINKER_API_KEY"], "HTTPS_PROXY": proxy}
    assert_exception_hidden(provoke(lambda: Settings.resolve(environ=given, max_retries=-1)))
    monkeypatch.setenv("TINKER_BASE_URL", f"https://me:{PLANTED['userinfo']}@host")
    monkeypatch.setenv("CLOUDFLARE_ACCESS_CLIENT_SECRET", PLANTED["CF secret"])
    assert_exception_hidden(provoke(Settings.resolve))
    monkeypatch.setenv("TINKER_BASE_URL", "http://host")
    monkeypatch.setenv("CLOUDFLARE_ACCESS_CLIENT_SECRET", f"{PLANTED['CF secret']}\u00fc")
    assert_exception_hidden(provoke(Settings.resolve))


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
def test_broken_credentials_files(content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY")
    file = CredentialsFile()
    file.path.write_text(content.format(PLANTED["stored key"]))
    for use in (file.keys, file.default_key, Settings.resolve):
        assert_exception_hidden(provoke(use))


def test_credentials_file_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    file = CredentialsFile()
    stored = file.default_key()
    assert stored is not None
    assert_object_hidden(file)
    assert_object_hidden(stored)
    assert_hidden(repr(file.keys()), "all keys")
    assert_exception_hidden(provoke(lambda: file.delete("missing")))
    for name in ("mkdir", "replace", "fsync", "chmod"):
        with monkeypatch.context() as patch:
            patch.setattr(f"os.{name}", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "disk full")))
            if name != "mkdir":
                assert_exception_hidden(provoke(lambda: file.add("k2", stored)))


# ---- commands and tokens


@pytest.mark.parametrize(
    "line",
    [
        "echo {out}; exit 3",
        "echo {out}; echo 'it was {out}' >&2; exit 3",
        "echo {out} {out}",
        "echo {out}; echo {out}",
        "printf '{out}\\303\\274'",
        "echo {out}; echo {line} >&2; kill -9 $$",
        "true {line}",
        "echo {out}; echo {out} >&2; exec sleep 600",
        "while :; do echo {out}; done",
        "no-such-command-{line}",
    ],
)
def test_credential_commands_that_fail(line: str) -> None:
    command = line.format(out=PLANTED["command output"], line=PLANTED["command line"])
    settings = planted(
        api_key="",
        environ={"TINKER_CREDENTIAL_CMD": command},
        credential_cmd="",
        credential_cmd_timeout_s=0.3,
    )
    ring = KeyRing(settings)
    for ask in (ring.credential, ring.for_exchange):
        error = provoke(ask)
        assert isinstance(error, errors.CredentialError)
        assert_exception_hidden(error)
    assert_object_hidden(ring)


def test_the_last_resort_of_wrong_keys() -> None:
    settings = planted("", api_key="PLANTED7cfid", credential_cmd="")  # not a key of the vendor
    for ask in (KeyRing(settings).credential, KeyRing(settings).for_exchange, KeyRing(settings).check):
        assert_exception_hidden(provoke(ask))


def test_tokens(logged: Callable[[], str]) -> None:
    clock = FakeClock()
    ring = KeyRing(planted(), clock=clock)
    script: list[Callable[[], Grant]] = [
        lambda: Grant(Secret(JWT), 9999999999 - 100),
        lambda: refused(ring.for_exchange()),
        lambda: refused(ring.for_exchange()),
        lambda: refused(ring.for_exchange()),
    ]
    ring.use_exchange(lambda: script.pop(0)())
    assert ring.credential() == JWT
    assert_object_hidden(ring)
    assert_object_hidden(ring._tokens)
    assert_hidden(repr(ring.secrets), "the list of secrets")
    assert_hidden(repr({"X-API-Key": ring.credential()}), "a table of headers")
    clock.advance(95)
    assert ring.credential() == JWT  # it also logs a warning
    clock.advance(10)
    ring.step()  # it logs another warning
    assert_exception_hidden(provoke(ring.credential))
    assert "no new token" in logged()


def refused(credential: str) -> Grant:
    """Raise the error of a token exchange whose refusal repeats the credential."""
    raise errors.APIStatusError.from_reply(
        401,
        {"X-Echo": JWT},
        json.dumps({"detail": f"bad credential {credential} {JWT}"}).encode(),
        secrets=[PLANTED["api_key"]],
    )


@pytest.mark.parametrize(
    "body",
    [f'{{"jwt": "{JWT}"', f'{{"jwt": ["{JWT}"]}}', f'{{"jwt": "{JWT} x"}}', f'{{"token": "{JWT}"}}', JWT],
)
def test_answers_of_the_exchange_that_do_not_fit(body: str) -> None:
    assert_exception_hidden(provoke(lambda: read_grant(Reply(200, {"Set-Cookie": JWT}, body.encode()))))


# ---- errors


@pytest.mark.parametrize("status", [401, 422])
@pytest.mark.parametrize(
    "body",
    [
        '{{"error": "you sent {}", "category": "user"}}',
        '{{"detail": "you sent {}"}}',
        '{{"detail": [{{"loc": ["body", "weights_access_token"], "msg": "bad", "input": "{}"}}]}}',
        '{{"detail": [{{"loc": ["body"], "msg": "bad", "input": {{"weights_access_token": "{}"}}}}]}}',
        "you sent {}",
        "<html><title>you sent {}</title></html>",
    ],
)
def test_servers_that_repeat_what_they_got(status: int, body: str) -> None:
    for place in ("api_key", "token", "default header", "weights_access_token", "command output"):
        echo = body.format(PLANTED[place])
        request = errors.RequestInfo(
            method="POST",
            url=f"https://me:{PLANTED['userinfo']}@host/x?X-Amz-Signature={PLANTED['signature']}",
            headers={"X-API-Key": PLANTED["api_key"], "X-My-Token": PLANTED["default header"]},
        )
        headers = {"Location": f"https://bucket/o?sig={PLANTED['signature']}", "X-Echo": PLANTED[place]}
        error = errors.APIStatusError.from_reply(
            status, headers, echo.encode(), request=request, secrets=[PLANTED[place]]
        )
        assert_exception_hidden(error)
        assert_exception_hidden(pickle.loads(pickle.dumps(error)))
        assert error.response is not None
        assert_object_hidden(error.response)
        assert_hidden(error.response.content.decode("latin-1"), "the body kept")
        assert_hidden(repr(error.body), "the parsed body")
    proxy = errors.APIConnectionError(f"bad proxy http://u:{PLANTED['api_key']}@p:1/")
    assert proxy.message == "bad proxy http://***@p:1/"


def test_a_secret_that_is_cut_short_is_hidden() -> None:
    """If the client cuts a long text within a secret, no part of the secret stays."""
    key = PLANTED["default header"]
    for cut in range(1, len(key)):
        content = b"x" * (64 * 1024 - cut) + key.encode() + b" and more"
        error = errors.APIStatusError.from_reply(500, {}, content, secrets=[key])
        assert_hidden(str(error.body)[-100:], "the body")
        assert error.response is not None
        assert_hidden(error.response.text[-100:], "the body kept")


# ---- the transport


class Wires:
    """The parts of a client that send requests, with a scripted exchange of keys for tokens."""

    def __init__(self, settings: Settings, *, exchange: bool = True) -> None:
        self.keys = KeyRing(settings)
        if exchange:
            self.keys.use_exchange(lambda: Grant(Secret(JWT)))
        self.journal = Journal(
            base_url=settings.base_url, as_curl=settings.log_curl, secrets=lambda: self.keys.secrets
        )
        self.clock = FakeClock()
        self.http = Http(settings, self.keys, journal=self.journal)
        self.caller = Caller(
            self.http, settings, clock=self.clock, journal=self.journal, secrets=lambda: self.keys.secrets
        )

    def __enter__(self) -> Wires:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def parts(self) -> list[object]:
        return [self.keys, self.journal, self.http, self.caller, self.caller.judge]


def load_weights(**more: Any) -> Call:
    body = {"path": "tinker://r/weights/a", "weights_access_token": PLANTED["weights_access_token"]}
    headers = {"X-Tinker-Weights-Access-Token": PLANTED["weights_access_token"]}
    return Call(
        method="POST", path="/api/v1/load_weights", body=json.dumps(body).encode(), headers=headers, **more
    )


def echo_everything(status: int) -> Callable[[Any], bytes]:
    def respond(seen: Any) -> bytes:
        heard = {"body": seen.body.decode("latin-1"), **dict(seen.pairs)}
        headers = {"Content-Type": "application/json", "Set-Cookie": f"jwt={JWT}", "X-Echo": JWT}
        return answer(json.dumps({"detail": heard}).encode(), status=status, headers=headers)

    return respond


def hang_up(peer: Any) -> None:
    peer.read_request()
    peer.reset()


def stay_silent(peer: Any) -> None:
    peer.read_request()
    peer.wait_gone()


def talk_nonsense(peer: Any) -> None:
    seen = peer.read_request()
    peer.send(b"HTTP/1.1 200 OK\r\nX-Bad " + str(seen.pairs).encode() + b"\r\n\r\n")
    peer.close()


def break_off(peer: Any) -> None:
    seen = peer.read_request()
    peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n" + str(seen.pairs).encode())
    peer.close()


def begin_with_it(peer: Any) -> None:
    seen = peer.read_request()
    peer.send(b"HTTP/1.1 " + seen.header("x-my-token").encode() + b"\r\n\r\n")
    peer.close()


def say_it_for_a_size(peer: Any) -> None:
    seen = peer.read_request()
    peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    peer.send(seen.header("x-my-token").encode() + b"\r\n")
    peer.close()


FAILING = [hang_up, stay_silent, talk_nonsense, break_off, begin_with_it, say_it_for_a_size]


def redirect_away(peer: Any) -> None:
    peer.read_request()
    target = f"http://me:{PLANTED['userinfo']}@localhost:1/x?sig={PLANTED['signature']}"
    peer.send(answer(b"", status=307, headers={"Location": target}))
    peer.wait_gone()


def check_wires(wires: Wires, outcome: object, logged: Callable[[], str]) -> None:
    if isinstance(outcome, BaseException):
        assert isinstance(outcome, TinkerError)
        assert_exception_hidden(outcome)
    for part in wires.parts():
        assert_object_hidden(part)
    assert "load_weights" in logged()


@pytest.mark.parametrize("status", [200, 401, 422, 500])
def test_answers_that_repeat_the_request(status: int, logged: Callable[[], str]) -> None:
    with AnsweringServer(echo_everything(status)) as server, Wires(planted(server.url)) as wires:
        outcome: object
        if status == 200:
            outcome = wires.caller.call(load_weights())
            assert_hidden(repr(outcome), "repr of the reply")
        else:
            outcome = provoke(lambda: wires.caller.call(load_weights(max_retries=1)))
        sent = " ".join(value for _, value in server.seen[0].pairs)
        # The secrets were really sent, so the test would find them.
        places = {"token", "default header", "CF id", "CF secret", "weights_access_token", "session header"}
        assert all(PLANTED[place] in sent for place in places)
        assert base64.b64encode(f"me:{PLANTED['session password']}".encode()).decode() in sent
        check_wires(wires, outcome, logged)


@pytest.mark.parametrize("script", [*FAILING, redirect_away], ids=lambda script: script.__name__)
def test_servers_that_fail(
    script: Callable[[Any], None], logged: Callable[[], str], capfd: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer(script) as server, Wires(planted(server.url, timeout=0.1)) as wires:
        call = load_weights(max_retries=1, repeatable=True)
        outcome = provoke(lambda: wires.caller.call(call))
        check_wires(wires, outcome, logged)


@pytest.mark.parametrize("refuse", [0, 403, 502])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_proxies_that_fail(scheme: str, refuse: int, logged: Callable[[], str]) -> None:
    with ProxyServer(user="me", password="another", refuse=refuse) as proxy:
        session = planted_session(f"127.0.0.1:{proxy.port}")
        session.proxies["https"] = session.proxies["http"]
        settings = planted(f"{scheme}://server.invalid", session=session)
        with Wires(settings) as wires:
            outcome = provoke(lambda: wires.caller.call(load_weights(max_retries=0)))
            check_wires(wires, outcome, logged)


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("refuse", [0, 502])
def test_a_proxy_of_the_environment_repeats_its_password(
    scheme: str, refuse: int, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], str]
) -> None:
    with ProxyServer(user="me", password="another", refuse=refuse) as proxy:
        monkeypatch.setenv(f"{scheme}_proxy", f"me:{PLANTED['proxy password']}@127.0.0.1:{proxy.port}")
        with Wires(planted(f"{scheme}://server.invalid", session=None)) as wires:
            outcome = provoke(lambda: wires.caller.call(load_weights(max_retries=0)))
            check_wires(wires, outcome, logged)
        assert proxy.seen


@pytest.mark.parametrize("proxy", ["127.0.0.1:1", "127.0.0.1:port", "[::1", "server.invalid:3128"])
def test_proxies_that_are_not_there(proxy: str) -> None:
    with Wires(planted("http://server.invalid", session=planted_session(proxy))) as wires:
        outcome = provoke(lambda: wires.caller.call(load_weights(max_retries=0)))
        assert_exception_hidden(outcome)


@pytest.mark.parametrize("status", [401, 500])
def test_asking_whether_the_service_is_accessible(
    status: int, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], str]
) -> None:
    monkeypatch.setenv("TINKER_LOG", "curl")
    with AnsweringServer(echo_everything(status)) as server:
        monkeypatch.setenv("TINKER_BASE_URL", server.url)
        assert_exception_hidden(provoke(auth.raise_if_tinker_not_accessible))
        assert server.seen[0].header("x-api-key") == PLANTED["TINKER_API_KEY"]
    assert "$TINKER_API_KEY" in logged()
