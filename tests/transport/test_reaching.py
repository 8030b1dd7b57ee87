"""TLS, proxies, cookies and other properties of a session. Only the right host gets the key."""

from __future__ import annotations

import contextlib
import ssl
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import certifi
import pytest
import requests
import requests.adapters
import requests.auth
from support.authority import Authority
from support.servers import AnsweringServer, Peer, ProxyServer, ScriptedServer, Seen, answer, redirect
from support.wires import KEY, get, http_for, post

from tinker_sync.clients.service import ServiceClient
from tinker_sync.errors import ConfigurationError
from tinker_sync.transport.http import Call, Http, SendFailed

PROXY_USER, PROXY_PASSWORD = "user", "p@ss:marked"
PROXY_LOGIN = "user:p%40ss%3Amarked"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def session() -> Iterator[requests.Session]:
    with requests.Session() as made:
        yield made


def echo(seen: Seen) -> bytes:
    return answer(seen.target.encode())


def fails(http: Http, call: Call) -> SendFailed:
    with pytest.raises(SendFailed) as caught:
        http.send(call)
    http.close()
    return caught.value


def all_bytes(server: Any) -> str:
    """Return a text with the targets, headers and bodies of all requests that a server has received."""
    return repr([(seen.target, seen.pairs, seen.body) for seen in server.seen])


# --------------------------------------------------------------------------------------------------- TLS


def test_a_private_authority(authority: Authority, session: requests.Session) -> None:
    session.verify = authority.ca_file
    with AnsweringServer(echo, tls=authority.server_context()) as server:
        http = http_for(server, session=session)
        assert http.send(post()).body == b"/api/v1/x"
        assert http.send(post()).body == b"/api/v1/x"
        http.close()
    assert server.connections == 1
    assert [seen.header("x-api-key") for seen in server.seen] == [KEY, KEY]


def test_an_unknown_authority_is_final_and_sees_nothing(
    authority: Authority, session: requests.Session
) -> None:
    with AnsweringServer(echo, tls=authority.server_context()) as server:
        failed = fails(http_for(server, session=session), post())
    assert (failed.final, failed.maybe_received) == (True, False)
    assert "certificate" in str(failed).lower()
    assert server.seen == []


def puzzled(peer: Peer) -> None:
    """Answer a TLS handshake with a 400, as servers of plain HTTP do."""
    peer.send(answer(b"Invalid HTTP request", status=400))
    peer.wait_gone()


def test_a_port_without_tls_is_reported_at_once(session: requests.Session) -> None:
    with ScriptedServer(puzzled) as server:
        failed = fails(http_for(server.url.replace("http://", "https://"), session=session), post())
    where = f"the server at 127.0.0.1:{server.port}"
    assert str(failed) == f"{where} does not speak TLS; begin its address with http://, or name another port"
    assert (failed.final, failed.maybe_received, server.connections) == (True, False, 1)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_server_that_was_reached_may_be_hidden_for_a_while(
    authority: Authority, session: requests.Session, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    """As by the page with which a wireless network asks for a login."""
    session.verify = authority.ca_file
    own, other = authority.server_context(), Authority(tmp_path).server_context()
    own.maximum_version = version

    def serve(peer: Peer) -> None:
        with own.wrap_socket(peer.sock, server_side=True) as peer.sock:
            peer.read_request()
            peer.send(answer(b"{}", headers={"Connection": "close"}))

    def pretend(peer: Peer) -> None:
        with contextlib.suppress(OSError), other.wrap_socket(peer.sock, server_side=True):
            pass

    with ScriptedServer(serve, puzzled, pretend, serve) as server:
        http = http_for(server.url.replace("http://", "https://"), session=session)
        assert http.send(post()).status == 200
        for words in ("does not speak TLS", "is not trusted"):
            with pytest.raises(SendFailed, match=words) as caught:
                http.send(post(repeatable=False))
            assert (caught.value.final, caught.value.maybe_received) == (False, False)
        assert http.send(post()).status == 200
        http.close()


def alert(peer: Peer) -> None:
    """Answer plain HTTP with a TLS alert, as some TLS servers do."""
    peer.send(bytes([21, 3, 1, 0, 2, 2, 70]))


def hang_up(peer: Peer) -> None:
    peer.read_request()


def test_a_port_with_tls_is_reported_at_once() -> None:
    with ScriptedServer(alert) as server:
        failed = fails(http_for(server), post())
    where = f"the server at 127.0.0.1:{server.port}"
    assert str(failed) == f"{where} speaks TLS; begin its address with https://, or name another port"
    assert (failed.final, failed.maybe_received) == (True, False)
    assert server.seen == []


def test_the_error_of_a_port_that_hangs_up_names_tls_until_it_has_answered() -> None:
    hint = "; if the server speaks TLS, its address begins with https://"

    def twice(peer: Peer) -> None:
        for _ in range(2):
            peer.read_request()
            peer.send(answer(b"{}"))
        peer.read_request()

    with ScriptedServer(hang_up, hang_up, twice) as server:
        http = http_for(server)
        for _ in range(2):
            with pytest.raises(SendFailed) as caught:
                http.send(post())
            assert not caught.value.final
            assert str(caught.value).endswith(hint)
        for _ in range(2):
            http.send(post())
        with pytest.raises(SendFailed) as caught:
            http.send(post(repeatable=False))
        http.close()
        assert str(caught.value) == "the connection was closed without an answer"
        assert (server.connections, len(server.seen)) == (3, 5)


def test_a_certificate_for_another_name(authority: Authority, session: requests.Session) -> None:
    session.verify = authority.ca_file
    with AnsweringServer(echo, tls=authority.server_context("other.test")) as server:
        failed = fails(http_for(server, session=session), post())
    assert (failed.final, failed.maybe_received) == (True, False)
    assert server.seen == []


@pytest.mark.filterwarnings("ignore::urllib3.exceptions.InsecureRequestWarning")
def test_verification_can_be_switched_off(authority: Authority, session: requests.Session) -> None:
    session.verify = False
    with AnsweringServer(echo, tls=authority.server_context("other.test")) as server:
        http = http_for(server, session=session)
        assert http.send(post()).status == 200
        http.close()


def test_a_client_certificate(authority: Authority, session: requests.Session) -> None:
    session.verify = authority.ca_file
    with AnsweringServer(echo, tls=authority.server_context(wants_client=True)) as server:
        failed = fails(http_for(server, session=session), post())
        assert failed.maybe_received in (True, False)  # TLS 1.3 refuses after the handshake
        session.cert = authority.client_certificate("me")
        http = http_for(server, session=session)
        assert http.send(post()).status == 200
        http.close()


def test_certificates_that_cannot_be_read(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for name, path in [("verify", tmp_path / "missing.pem"), ("verify", broken), ("cert", broken)]:
        with requests.Session() as mine:
            setattr(mine, name, str(path))
            http = http_for("https://127.0.0.1:9", session=mine)
            with pytest.raises(ConfigurationError, match=path.name):
                http.send(post())
            http.close()


def test_trusted_authorities_from_the_environment(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", authority.ca_file)
    with AnsweringServer(echo, tls=authority.server_context()) as server:
        http = http_for(server)
        assert http.send(post()).status == 200
        http.close()
        with requests.Session() as deaf:
            deaf.trust_env = False
            assert fails(http_for(server, session=deaf), post()).final


@pytest.mark.parametrize("proxied", [False, True])
@pytest.mark.parametrize("name", ["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"])
def test_each_variable_that_names_trusted_authorities(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, name: str, proxied: bool
) -> None:
    monkeypatch.setenv(name, authority.ca_file)
    if proxied:  # the environment names a proxy, but not for this server
        monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with AnsweringServer(echo, tls=authority.server_context()) as server:
        http = http_for(server)
        assert http.send(post()).status == 200
        http.close()


@pytest.mark.parametrize("variable", ["REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"])
@pytest.mark.parametrize("trusted", [True, False], ids=["the authority", "another"])
@pytest.mark.parametrize("verify", [True, False, "the authority"], ids=str)
@pytest.mark.parametrize("trust_env", [True, False])
def test_a_session_and_the_environment_count_as_in_requests(
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    trusted: bool,
    verify: bool | str,
    trust_env: bool,
) -> None:
    monkeypatch.setenv(variable, authority.ca_file if trusted else certifi.where())
    with (
        AnsweringServer(echo, tls=authority.server_context()) as server,
        requests.Session() as mine,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # about `verify=False`
        mine.trust_env, mine.verify = trust_env, authority.ca_file if verify == "the authority" else verify
        try:
            theirs = mine.post(server.url).status_code
        except requests.exceptions.SSLError:
            theirs = None
        http = http_for(server, session=mine)
        try:
            ours = http.send(post()).status
        except SendFailed:
            ours = None
        http.close()
    assert ours == theirs


# --------------------------------------------------------------------------------------------- redirects


def test_the_key_stays_with_its_host(authority: Authority, session: requests.Session) -> None:
    """A server redirects to another server, which gets the body, but no secret."""
    session.verify = authority.ca_file
    session.headers["X-Gateway"] = "marked-gateway"
    session.auth = ("me", "marked-password")
    session.cookies.set("sid", "marked-cookie", domain="127.0.0.1")
    tls = authority.server_context("127.0.0.1", "localhost")
    with (
        AnsweringServer(echo, tls=tls, name="localhost") as storage,
        AnsweringServer(lambda seen: redirect(f"{storage.url}/signed?sig=1"), tls=tls) as api,
    ):
        headers = {"X-My-Token": "marked-token"}
        http = http_for(api, session=session, default_headers=headers, cf_access_secret="marked-cf")
        call = post(headers={"X-Tinker-Weights-Access-Token": "marked-weights"}, body=b'{"a": 1}')
        reply = http.send(call)
        http.close()
    assert reply.body == b"/signed?sig=1"
    (at_api,), (at_storage,) = api.seen, storage.seen
    names = {"x-api-key", "x-gateway", "authorization", "x-my-token", "cf-access-client-secret", "cookie"}
    assert names <= {name.lower() for name, _ in at_api.pairs}
    assert "marked" not in all_bytes(storage)
    assert at_storage.header("authorization") is None  # this header would hold the password in base64
    assert (at_storage.method, at_storage.body) == ("POST", b'{"a": 1}')
    assert at_storage.header("host") == f"localhost:{storage.port}"


def test_https_is_not_left_for_http(authority: Authority, session: requests.Session) -> None:
    session.verify = authority.ca_file
    with (
        AnsweringServer(echo) as plain,
        AnsweringServer(lambda seen: redirect(f"{plain.url}/x"), tls=authority.server_context()) as api,
    ):
        failed = fails(http_for(api, session=session), post())
    assert failed.final
    assert "unprotected" in str(failed)
    assert plain.seen == []


# ----------------------------------------------------------------------------------------------- proxies


def test_a_tunnel_through_a_proxy_that_asks_for_a_password(
    authority: Authority, session: requests.Session
) -> None:
    session.verify = authority.ca_file
    with (
        AnsweringServer(echo, tls=authority.server_context()) as server,
        ProxyServer(user=PROXY_USER, password=PROXY_PASSWORD) as proxy,
    ):
        session.proxies = {"https": f"http://{PROXY_LOGIN}@127.0.0.1:{proxy.port}"}
        http = http_for(server, session=session)
        assert http.send(post()).status == 200
        assert http.send(post()).status == 200
        http.close()
    (tunnel,) = proxy.seen
    assert (tunnel.method, tunnel.target) == ("CONNECT", f"127.0.0.1:{server.port}")
    assert KEY not in all_bytes(proxy)
    assert [seen.header("proxy-authorization") for seen in server.seen] == [None, None]
    assert KEY in all_bytes(server)


@pytest.mark.parametrize("login", ["", "user:wrong@"])
def test_a_proxy_that_does_not_know_us(login: str, authority: Authority, session: requests.Session) -> None:
    session.verify = authority.ca_file
    with (
        AnsweringServer(echo, tls=authority.server_context()) as server,
        ProxyServer(user=PROXY_USER, password=PROXY_PASSWORD) as proxy,
    ):
        session.proxies = {"https": f"http://{login}127.0.0.1:{proxy.port}"}
        failed = fails(http_for(server, session=session), post())
    assert not failed.maybe_received
    assert "407" in str(failed)
    assert server.seen == []


def test_a_proxy_out_of_order_is_worth_another_try(authority: Authority) -> None:
    with ProxyServer(refuse=503) as proxy, requests.Session() as mine:
        mine.proxies = {"https": f"http://127.0.0.1:{proxy.port}"}
        failed = fails(http_for("https://127.0.0.1:9", session=mine), post())
    assert (failed.maybe_received, failed.final) == (False, False)
    assert "503" in str(failed)


def test_plain_http_is_forwarded(session: requests.Session) -> None:
    with AnsweringServer(echo) as server, ProxyServer(user=PROXY_USER, password=PROXY_PASSWORD) as proxy:
        session.proxies = {"http": f"http://{PROXY_LOGIN}@127.0.0.1:{proxy.port}"}
        http = http_for(server, session=session)
        assert http.send(post(query="a=1")).body == b"/api/v1/x?a=1"
        http.close()
    (seen,) = proxy.seen
    assert seen.target == f"{server.url}/api/v1/x?a=1"
    assert server.seen[0].header("proxy-authorization") is None


def test_a_redirect_does_not_take_the_proxys_password_along(session: requests.Session) -> None:
    with (
        AnsweringServer(echo, host="127.0.0.2") as storage,
        AnsweringServer(lambda seen: redirect(storage.url + "/there")) as api,
        ProxyServer() as proxy,
    ):
        session.proxies = {"http://127.0.0.1": f"http://{PROXY_LOGIN}@127.0.0.1:{proxy.port}"}
        http = http_for(api, session=session)
        assert http.send(get()).body == b"/there"
        http.close()
    assert len(proxy.seen) == 1
    assert "Proxy-Authorization" not in all_bytes(storage)


def test_proxies_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with AnsweringServer(echo) as server, ProxyServer() as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"127.0.0.1:{proxy.port}")
        monkeypatch.setenv("http_proxy", f"127.0.0.1:{proxy.port}")
        http = http_for(server)
        http.send(post())
        http.close()
        assert len(proxy.seen) == 1
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        http = http_for(server)
        http.send(post())
        http.close()
        monkeypatch.delenv("NO_PROXY")
        monkeypatch.delenv("no_proxy")
        with requests.Session() as deaf:
            deaf.trust_env = False
            http = http_for(server, session=deaf)
            http.send(post())
            http.close()
    assert len(proxy.seen) == 1
    assert len(server.seen) == 3


def test_an_unusable_proxy_address() -> None:
    with requests.Session() as mine:
        mine.proxies = {"http": "http://user:marked@:nowhere"}
        http = http_for("http://127.0.0.1:9", session=mine)
        with pytest.raises(ConfigurationError) as caught:
            http.send(post())
        assert "marked" not in str(caught.value)
        http.close()


@pytest.mark.parametrize("scheme", ["socks5", "socks5h", "https"])
def test_a_proxy_of_another_kind_is_refused(scheme: str, session: requests.Session) -> None:
    session.proxies = {"http": f"{scheme}://user:marked@127.0.0.1:9"}
    http = http_for("http://127.0.0.1:9", session=session)
    with pytest.raises(ConfigurationError, match="only HTTP proxies") as caught:
        http.send(post())
    assert "marked" not in str(caught.value)
    http.close()


# --------------------------------------------------------------------------- headers, passwords and cookies


def test_basic_authentication_of_the_session(session: requests.Session) -> None:
    for auth in (("me", "pw"), requests.auth.HTTPBasicAuth("me", "pw")):
        session.auth = auth
        with AnsweringServer(echo) as server, http_for(server, session=session) as http:
            http.send(post())
        assert server.seen[0].header("authorization") == "Basic bWU6cHc="
        assert server.seen[0].header("x-api-key") == KEY


def test_netrc_adds_a_password_and_touches_no_key(
    session: requests.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password pw\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    with AnsweringServer(echo) as server:
        for options in (
            {"session": session},
            {"session": session, "default_headers": {"Authorization": "Bearer mine"}},
            {},
        ):
            http = http_for(server, **options)
            http.send(post())
            http.close()
        session.trust_env = False
        http = http_for(server, session=session)
        http.send(post())
        http.close()
    sent = [seen.header("authorization") for seen in server.seen]
    assert sent == ["Basic bWU6cHc=", "Bearer mine", None, None]
    assert {seen.header("x-api-key") for seen in server.seen} == {KEY}


def test_cookies_are_kept_and_sent_where_they_belong(session: requests.Session) -> None:
    def respond(seen: Seen) -> bytes:
        return answer(headers={"Set-Cookie": "balancer=7; Path=/; HttpOnly"})

    with AnsweringServer(respond) as server, AnsweringServer(echo, host="127.0.0.2") as other:
        http = http_for(server, session=session)
        http.send(post())
        http.send(post())
        http.close()
        http = http_for(other, session=session)
        http.send(post())
        http.close()
    assert [seen.header("cookie") for seen in server.seen] == [None, "balancer=7"]
    assert other.seen[0].header("cookie") is None
    assert session.cookies.get("balancer") == "7"


class Signature(requests.auth.AuthBase):
    pass


class OtherSession(requests.Session):
    pass


class OtherAdapter(requests.adapters.HTTPAdapter):
    pass


def with_adapter(adapter: requests.adapters.BaseAdapter) -> requests.Session:
    made = requests.Session()
    made.mount("https://host", adapter)
    return made


def with_attribute(name: str, value: Any) -> requests.Session:
    made = requests.Session()
    setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("unusual", "problem"),
    [
        (OtherSession(), "OtherSession is a subclass of requests.Session"),
        (with_attribute("hooks", {"response": [print]}), "it has hooks"),
        (with_attribute("params", {"team": "blue"}), "it has params"),
        (with_attribute("auth", Signature()), "its auth is a Signature"),
        (with_adapter(OtherAdapter()), "the adapter mounted at 'https://host' is a OtherAdapter"),
        (with_adapter(requests.adapters.HTTPAdapter(max_retries=1)), "pass max_retries to the client"),
        (with_adapter(requests.adapters.HTTPAdapter(pool_block=True)), "limits connections"),
    ],
    ids=["subclass", "hooks", "params", "auth", "adapter", "retries", "pool"],
)
def test_a_session_that_changes_how_requests_are_sent_is_refused(
    unusual: requests.Session, problem: str
) -> None:
    with unusual, pytest.raises(ConfigurationError, match=problem):
        ServiceClient(base_url="http://127.0.0.1:9", api_key=KEY, session=unusual)


def test_closing_leaves_the_users_session_usable(session: requests.Session) -> None:
    with AnsweringServer(echo) as server:
        http = http_for(server, session=session)
        http.send(post())
        http.close()
        assert session.get(server.url + "/mine").status_code == 200
