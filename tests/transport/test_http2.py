"""HTTP/2: many requests on one connection, over TLS to a server that offers it, driven through clients."""

from __future__ import annotations

import gc
import gzip
import json
import random
import select
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("h2")  # the extra `http2`

from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hyperframe.frame import ContinuationFrame, HeadersFrame, PushPromiseFrame, SettingsFrame
from support.authority import Authority
from support.clock import PATIENCE_S
from support.forks import in_child
from support.servers import ProxyServer
from support.tinker_stub import Answer, Asked, Behaviour, Stub, StubServer
from support.wires import get, http_for, post

import tinker_sync as tinker
from tinker_sync.config import Timeout
from tinker_sync.runtime import reactor
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.types import AdamParams, Datum, ModelInput, SamplingParams

PROMPT, PARAMS = ModelInput.from_ints([1, 2, 3]), SamplingParams(max_tokens=4)
KEY = "tml-example-of-a-key"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(autouse=True)
def trusted(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", authority.ca_file)


class EchoStub(Stub):
    """A stub that answers requests of unknown paths with what it has seen of them."""

    def on_other(self, asked: Asked, name: str) -> Any:
        usual = super().on_other(asked, name)
        if not isinstance(usual, Answer):
            return usual
        return {"path": asked.path, "body": asked.body.decode(), "connection": asked.connection}


@contextmanager
def serving(
    authority: Authority, *, http2: bool = True, settings: dict[int, int] | None = None, **behaviour: Any
) -> Iterator[Stub]:
    server = StubServer(EchoStub(Behaviour(**behaviour)), tls=authority.server_context(), http2=http2)
    server.stub.http2_settings = settings or {}
    with server as stub:
        yield stub
        assert not stub.broken  # by the client


@pytest.fixture
def stub(authority: Authority) -> Iterator[Stub]:
    with serving(authority) as served:
        yield served


@contextmanager
def service_for(stub: Stub, **options: Any) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=stub.url, api_key=KEY, **options) as service:  # type: ignore[attr-defined]
        yield service


def used(stub: Stub) -> list[Any]:
    """Return the connections of HTTP/2 that have carried a request."""
    return [connection for connection in stub.http2 if connection.streams]


class Held:
    """Requests that the stub holds, which threads of a test wait for."""

    def __init__(self, http: Any, stub: Stub, count: int, path: str = "/held") -> None:
        self.release = stub.hold(path, count)
        self.outcomes: list[Any] = [None] * count
        self._stub, self._path = stub, path
        self._threads = [threading.Thread(target=self._ask, args=(http, at)) for at in range(count)]
        for thread in self._threads:
            thread.start()
        stub.await_asked(path, count)

    def _ask(self, http: Any, at: int) -> None:
        try:
            self.outcomes[at] = http.send(post(f"/api/v1{self._path}", f"{at}".encode()))
        except SendFailed as failed:
            self.outcomes[at] = failed

    def end(self) -> list[Any]:
        self.release.set()
        return self.join()

    def join(self) -> list[Any]:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        return self.outcomes


@pytest.fixture
def http(stub: Stub) -> Iterator[Any]:
    """An `Http` whose connection to the stub is open and one of HTTP/2."""
    with talking(stub) as made:
        yield made


@contextmanager
def talking(stub: Stub, **options: Any) -> Iterator[Any]:
    with http_for(stub.url, **options) as made:  # type: ignore[attr-defined]
        assert made.send(get("/api/v1/first")).status == 200
        yield made


def echoed(reply: Reply) -> Any:
    assert reply.status == 200
    return json.loads(reply.body)


# ---------------------------------------------------- the protocol


def test_what_differs_in_each_request_stays_out_of_the_table_of_headers(stub: Stub) -> None:
    with service_for(stub) as service:
        sampling = service.create_sampling_client(base_model="stub/model")
        for _ in range(40):
            sampling.sample(PROMPT, 1, PARAMS).result(PATIENCE_S)
        [connection] = used(stub)
        values = Counter(name for name, _ in connection.indexed())
    assert values[b"x-sdk-method"] > 0
    assert values.most_common(1)[0][1] < 20  # each one pushes out those that come again


def test_two_hundred_samples_wait_on_a_few_connections(stub: Stub) -> None:
    polls = stub.hold("/retrieve_future", 200)
    with service_for(stub) as service:
        sampling = service.create_sampling_client(base_model="stub/model")
        futures = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(200)]
        stub.await_asked("/retrieve_future", 200)
        polls.set()
        results = [future.result(PATIENCE_S) for future in futures]
    assert all(len(result.sequences[0].tokens) == 4 for result in results)
    assert len(used(stub)) <= 5
    headers = stub.asked("/asample")[0].headers
    assert headers["x-api-key"] == KEY
    assert headers[":scheme"] == "https"
    assert headers[":authority"] == stub.url.removeprefix("https://")  # type: ignore[attr-defined]
    assert not headers.keys() & {"connection", "transfer-encoding"}


def test_the_variable_turns_it_off(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_HTTP2", "0")
    with service_for(stub) as service:
        service.create_sampling_client(base_model="stub/model").sample(PROMPT, 1, PARAMS).result(PATIENCE_S)
    assert stub.asked("/asample")
    assert not stub.http2


def test_a_server_without_it_gets_http1(authority: Authority) -> None:
    with serving(authority, http2=False) as stub, service_for(stub) as service:
        service.create_sampling_client(base_model="stub/model").sample(PROMPT, 1, PARAMS).result(PATIENCE_S)
    assert stub.asked("/asample")
    assert not stub.http2


def test_large_requests_go_over_http1_and_their_polls_over_http2(stub: Stub) -> None:
    data = [
        Datum(
            ModelInput.from_ints(range(1000)), {"target_tokens": list(range(1000)), "weights": [1.0] * 1000}
        )
        for _ in range(20)
    ]
    with service_for(stub) as service:
        trainer = service.create_lora_training_client(base_model="stub/model")
        for _ in range(2):
            assert (
                len(trainer.forward_backward(data, "cross_entropy").result(PATIENCE_S).loss_fn_outputs) == 20
            )
        trainer.optim_step(AdamParams(learning_rate=1e-4)).result(PATIENCE_S)
    passes = stub.asked("/forward_backward")
    assert len({asked.connection for asked in passes}) == 1
    assert ":path" not in passes[0].headers
    polls = [asked for asked in stub.asked("/retrieve_future") if ":path" in asked.headers]
    assert len(polls) >= 4
    assert ":path" in stub.asked("/optim_step")[0].headers


def test_large_answers_arrive_whole(http: Any, stub: Stub) -> None:
    octets = bytes(range(256)) * 4096 * 6  # 6 MB
    stub.script("/large", Answer(body=octets), Answer(body=octets, lasts_until_close=True))
    replies = [http.send(get("/api/v1/large")) for _ in range(2)]
    assert [reply.body for reply in replies] == [octets, octets]
    assert not any(reply.may_be_cut for reply in replies)


def test_a_request_says_when_it_has_been_sent(http: Any, stub: Stub) -> None:
    sent, gate = threading.Event(), stub.hold("/held")
    asking = threading.Thread(target=http.send, args=(post("/api/v1/held", b"x", on_sent=sent.set),))
    asking.start()
    assert sent.wait(PATIENCE_S)  # before the answer
    gate.set()
    asking.join(PATIENCE_S)


def test_compressed_answers_are_decoded(http: Any, stub: Stub) -> None:
    packed = gzip.compress(b"[1]")
    stub.script("/packed", Answer(body=packed, headers={"Content-Encoding": "gzip"}))
    assert http.send(get("/api/v1/packed")).body == b"[1]"


@pytest.mark.parametrize("states_length", [True, False])
def test_an_answer_over_the_limit_is_refused_and_others_go_on(stub: Stub, states_length: bool) -> None:
    with talking(stub, max_body_bytes=10_000) as http:
        held = Held(http, stub, 1)
        stub.script("/large", Answer(body=bytes(200_000), lasts_until_close=not states_length))
        with pytest.raises(SendFailed, match="10000 bytes") as caught:
            http.send(get("/api/v1/large"))
        assert caught.value.final
        assert echoed(held.end()[0])["body"] == "0"
    assert len(used(stub)) == 1


def test_the_body_of_an_error_is_cut(http: Any, stub: Stub) -> None:
    stub.script("/wrong", Answer(400, b"x" * 1_000_000))
    reply = http.send(get("/api/v1/wrong"))
    assert (reply.status, len(reply.body)) == (400, 256 * 1024)
    assert echoed(http.send(get("/api/v1/next")))["connection"] == 0


def test_redirects_and_interim_answers_are_followed(http: Any, stub: Stub) -> None:
    def early(number: int, connection: Any) -> bytes:
        connection.send_headers(number, [(":status", "103"), ("link", "</x>")])
        connection.send_headers(number, [(":status", "307"), ("location", "/api/v1/there")], end_stream=True)
        return bytes(connection.data_to_send())

    stub.script("/here", Answer(frames=early))
    assert echoed(http.send(post("/api/v1/here", b"same")))["path"] == "/api/v1/there"


def test_a_body_waits_for_the_windows_of_the_server(authority: Authority) -> None:
    body = bytes(range(97, 123)) * 1000
    with serving(authority, settings={SettingCodes.INITIAL_WINDOW_SIZE: 100}) as stub, talking(stub) as http:
        assert echoed(http.send(post("/api/v1/windows", body)))["body"] == body.decode()


def test_connections_follow_the_number_of_streams_that_the_server_takes(authority: Authority) -> None:
    with serving(authority, settings={SettingCodes.MAX_CONCURRENT_STREAMS: 3}) as stub, talking(stub) as http:
        held = Held(http, stub, 10)
        assert sorted(echoed(reply)["body"] for reply in held.end()) == sorted(map(str, range(10)))
    assert len(used(stub)) >= 4


def test_a_ping_of_the_server_is_answered_while_nothing_is_under_way(http: Any, stub: Stub) -> None:
    connection = used(stub)[0]
    connection.ping()
    connection.await_pings(1)


@pytest.mark.parametrize("kind", [reactor.SelectorReadiness, reactor.EpollReadiness])
def test_samples_end_with_each_way_to_watch_sockets(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    if kind is reactor.EpollReadiness and not hasattr(select, "epoll"):
        pytest.skip("no epoll here")
    monkeypatch.setattr(reactor, "make_readiness", kind)
    with service_for(stub) as service:
        sampling = service.create_sampling_client(base_model="stub/model")
        futures = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(20)]
        assert all(future.result(PATIENCE_S).sequences for future in futures)
    assert used(stub)


def test_requests_over_http2_are_not_limited_by_the_files_of_the_process(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reactor, "files_to_use", lambda: 16)
    polls = stub.hold("/retrieve_future", 60)
    with service_for(stub) as service:
        sampling = service.create_sampling_client(base_model="stub/model")
        futures = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(60)]
        stub.await_asked("/retrieve_future", 60)
        polls.set()
        assert all(future.result(PATIENCE_S).sequences for future in futures)


# ---------------------------------------------------- ends of streams and connections


@pytest.mark.parametrize("seed", range(4))
def test_no_sample_is_lost_while_connections_end_in_every_way(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setenv("TINKER_PACE", "0.01")
    chance = random.Random(seed)
    limits = {SettingCodes.MAX_CONCURRENT_STREAMS: chance.choice([3, 30, 128])}

    def damage(asked: Asked) -> Answer | None:
        connection = stub.http2[asked.connection]
        kind = chance.randrange(20)
        if kind == 0:
            connection.drop()
        elif kind == 1:
            connection.go_away(chance.choice(connection.streams))
        elif kind == 2:
            return Answer(reset=ErrorCodes.REFUSED_STREAM)
        elif kind == 3:
            return Answer(reset=ErrorCodes.INTERNAL_ERROR)
        elif kind == 4:
            return Answer(abort="after")
        return None

    with serving(authority, settings=limits) as stub, service_for(stub) as service:
        sampling = service.create_sampling_client(base_model="stub/model")
        sampling.sample(PROMPT, 1, PARAMS).result(PATIENCE_S)
        stub.script("/asample", *[damage] * 200)
        stub.script("/retrieve_future", *[damage] * 200)
        futures = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(150)]
        assert all(len(future.result(PATIENCE_S).sequences[0].tokens) == 4 for future in futures)
        assert all(":path" in asked.headers for asked in stub.log)


def test_a_request_that_is_given_up_disturbs_no_other(http: Any, stub: Stub) -> None:
    held = Held(http, stub, 3)
    stub.script("/slow", Answer(status=0))
    with pytest.raises(SendFailed, match="in time") as caught:
        http.send(Call(path="/api/v1/slow", body=b"x", read_s=0.05))
    assert caught.value.timed_out
    assert [echoed(reply)["connection"] for reply in held.end()] == [0, 0, 0]
    used(stub)[0].await_resets(1)


def test_cancelled_samples_end_their_streams(stub: Stub) -> None:
    gate = stub.hold("/asample", 2)
    with service_for(stub) as service:
        sampling = service.create_sampling_client(base_model="stub/model")
        first, second = (sampling.sample(PROMPT, 1, PARAMS) for _ in range(2))
        stub.await_asked("/asample", 2)
        assert first.cancel()
        connection = next(each for each in used(stub) if each.number == stub.asked("/asample")[0].connection)
        connection.await_resets(1)
        gate.set()
        assert second.result(PATIENCE_S).sequences


def test_goaway_lets_streams_end_and_the_others_begin_again(http: Any, stub: Stub) -> None:
    held = Held(http, stub, 4)
    connection = used(stub)[0]
    connection.go_away(last=sorted(connection.streams)[-3])
    stub.await_asked("/held", 6)  # the last two came again, on another connection
    late = echoed(http.send(get("/api/v1/late")))
    replies = [echoed(reply) for reply in held.end()]
    assert sorted(reply["body"] for reply in replies) == ["0", "1", "2", "3"]
    assert sorted(reply["connection"] for reply in replies) == [0, 0, 1, 1]
    assert late["connection"] == 1
    connection.await_closed()  # by the client, after the last answer


def test_requests_over_a_connection_that_breaks_are_of_unknown_fate(http: Any, stub: Stub) -> None:
    held = Held(http, stub, 3)
    again = stub.hold("/held", 3)
    used(stub)[0].drop()
    stub.await_asked("/held", 6)  # as over HTTP/1.1: sent again at once, because the calls may be repeated
    again.set()
    held.release.set()
    replies = held.join()
    assert sorted(echoed(reply)["body"] for reply in replies) == ["0", "1", "2"]
    assert all(reply.resent for reply in replies)


def test_a_call_that_must_not_be_repeated_is_not(http: Any, stub: Stub) -> None:
    stub.script("/once", Answer(abort="before"))
    with pytest.raises(SendFailed, match="connection") as caught:
        http.send(Call(path="/api/v1/once", body=b"x", repeatable=False))
    assert caught.value.maybe_received
    assert len(stub.asked("/once")) == 1


def test_a_server_that_cuts_each_connection_is_not_asked_without_pause(http: Any, stub: Stub) -> None:
    stub.script("/poison", *[Answer(abort="before")] * 10)
    with pytest.raises(SendFailed):
        http.send(post("/api/v1/poison", b"x"))
    assert len(stub.asked("/poison")) == 2


def test_a_refused_stream_begins_again_once(http: Any, stub: Stub) -> None:
    refusal = Answer(reset=ErrorCodes.REFUSED_STREAM)
    stub.script("/busy", refusal)
    once = Call(path="/api/v1/busy", body=b"x", repeatable=False)
    assert echoed(http.send(once))["body"] == "x"
    stub.script("/busy", refusal, refusal)
    with pytest.raises(SendFailed, match="refuses") as caught:
        http.send(once)
    assert not caught.value.maybe_received


def test_a_stream_that_the_server_ends_is_of_unknown_fate(http: Any, stub: Stub) -> None:
    stub.script("/broken", Answer(reset=ErrorCodes.INTERNAL_ERROR))
    with pytest.raises(SendFailed, match="INTERNAL_ERROR") as caught:
        http.send(post("/api/v1/broken", b"x"))
    assert caught.value.maybe_received
    assert not caught.value.final


def test_a_server_that_asks_for_http1_gets_it(http: Any, stub: Stub) -> None:
    stub.script("/old", Answer(reset=ErrorCodes.HTTP_1_1_REQUIRED))
    assert echoed(http.send(post("/api/v1/old", b"x")))["body"] == "x"
    http.send(get("/api/v1/next"))
    assert ":path" not in stub.asked("/old")[1].headers
    assert ":path" not in stub.asked("/next")[0].headers


def _continuations(number: int, _: Any) -> bytes:
    first = HeadersFrame(number, b"\x88")
    rest = ContinuationFrame(number, b"\x88" * 100)
    return bytes(first.serialize() + rest.serialize() * 100)


def _header_bomb(number: int, _: Any) -> bytes:
    # One long header in the table of HPACK, and then thousands of references to it.
    block = b"\x88\x40\x01a\x7f\x81\x1e" + b"b" * 4000 + b"\xbe" * 10_000
    return bytes(HeadersFrame(number, block, flags=["END_HEADERS", "END_STREAM"]).serialize())


def _push(number: int, connection: Any) -> bytes:
    frame = PushPromiseFrame(number, 2, b"\x82\x87\x84", flags=["END_HEADERS"])
    return bytes(frame.serialize())


HOSTILE: dict[str, Callable[[int, Any], bytes]] = {
    "no HTTP/2": lambda *_: b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    "continuations without end": _continuations,
    "headers that grow": _header_bomb,
    "a pushed answer": _push,
    "a frame of 16 MB": lambda number, _: b"\xff\xff\xff\x00\x00" + number.to_bytes(4, "big"),
    "an answer to no request": lambda *_: bytes(HeadersFrame(77, b"\x88", flags=["END_HEADERS"]).serialize()),
    "settings out of range": lambda *_: bytes(SettingsFrame(0, settings={4: 2**31}).serialize()),
}


@pytest.mark.parametrize("trick", HOSTILE)
def test_a_hostile_server_gets_http1_and_ends_nothing_else(http: Any, stub: Stub, trick: str) -> None:
    stub.script("/trick", Answer(frames=HOSTILE[trick]))
    assert echoed(http.send(post("/api/v1/trick", b"x")))["body"] == "x"
    assert ":path" not in stub.asked("/trick")[-1].headers
    assert len(stub.asked("/trick")) == 2


@pytest.mark.parametrize(
    "head",
    [
        [(":status", "200"), ("a", "b\r\nx-injected: c")],
        [(":status", "2000")],
        [(":status", "200"), ("a b", "c")],
    ],
)
def test_a_malformed_head_fails_its_request_alone(http: Any, stub: Stub, head: list[Any]) -> None:
    def frames(number: int, connection: Any) -> bytes:
        block = connection.encoder.encode(head)
        return bytes(HeadersFrame(number, block, flags=["END_HEADERS"]).serialize())

    held = Held(http, stub, 1)
    stub.script("/wrong", Answer(frames=frames))
    with pytest.raises(SendFailed) as caught:
        http.send(get("/api/v1/wrong"))
    assert caught.value.maybe_received
    assert echoed(held.end()[0])["connection"] == 0


def test_errors_show_no_header_that_the_server_repeats(http: Any, stub: Stub) -> None:
    def frames(number: int, connection: Any) -> bytes:
        block = connection.encoder.encode([(":status", f"200{KEY}"), ("x-api-key", KEY)])
        return bytes(HeadersFrame(number, block, flags=["END_HEADERS", "END_STREAM"]).serialize())

    stub.script("/wrong", Answer(frames=frames))
    with pytest.raises(SendFailed) as caught:
        http.send(get("/api/v1/wrong"))
    assert KEY not in repr(caught.value) + repr(caught.value.__cause__)


# ---------------------------------------------------- the life of a client


def test_close_ends_requests_connections_and_thread(stub: Stub) -> None:
    with http_for(stub.url) as http:  # type: ignore[attr-defined]
        http.send(get("/api/v1/first"))
        held = Held(http, stub, 3)
        http.close()
        outcomes = held.join()
        assert all(isinstance(each, SendFailed) and each.final for each in outcomes)
        assert not [thread for thread in threading.enumerate() if thread.name == "tinker-http2"]
        with pytest.raises(SendFailed, match="closed"):
            http.send(get("/api/v1/late"))
    used(stub)[0].await_closed()
    held.release.set()


def test_a_lost_client_leaves_no_thread(stub: Stub) -> None:
    with http_for(stub.url) as http:  # type: ignore[attr-defined]
        made = type(http)(http.settings)
        made.send(get("/api/v1/first"))
        threads = [thread for thread in threading.enumerate() if thread.name == "tinker-http2"]
        del made
        gc.collect()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_idle_connections_are_closed_when_they_are_forgotten(http: Any, stub: Stub) -> None:
    http.forget_idle()
    used(stub)[0].await_closed()
    assert echoed(http.send(get("/api/v1/next")))["connection"] == 1


def test_a_burst_after_the_last_connection_opens_one_connection(http: Any, stub: Stub) -> None:
    http.forget_idle()
    held = Held(http, stub, 20)
    assert len({echoed(reply)["connection"] for reply in held.end()}) <= 3


def test_a_server_that_is_gone_fails_its_requests(authority: Authority) -> None:
    with serving(authority) as stub:
        http_context = http_for(stub.url)  # type: ignore[attr-defined]
        http = http_context.__enter__()
        http.send(get("/api/v1/first"))
    with http_context, pytest.raises(SendFailed, match="cannot connect") as caught:
        http.send(get("/api/v1/next"))
    assert not caught.value.maybe_received


def test_a_forked_child_opens_its_own_connection(http: Any, stub: Stub) -> None:
    held = Held(http, stub, 1)

    def work() -> None:
        http.renew_after_fork()
        assert echoed(http.send(get("/api/v1/child")))["connection"] == 1
        http.close()

    in_child(work)
    assert echoed(held.end()[0])["connection"] == 0
    assert echoed(http.send(get("/api/v1/parent")))["connection"] == 0


def test_a_proxy_tunnels_it(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    with ProxyServer() as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        with talking(stub) as http:
            assert echoed(http.send(get("/api/v1/through")))["connection"] == 0
        assert [seen.method for seen in proxy.seen] == ["CONNECT"]
    assert used(stub)


def test_a_deadline_ends_a_sample_that_waits(stub: Stub) -> None:
    gate = stub.hold("/retrieve_future", 2)
    with service_for(stub, timeout=Timeout(connect=5, read=30)) as service:
        sampling = service.create_sampling_client(base_model="stub/model")
        late = sampling.sample(PROMPT, 1, PARAMS, deadline=0.3)
        other = sampling.sample(PROMPT, 1, PARAMS)
        with pytest.raises(tinker.DeadlineError):
            late.result(PATIENCE_S)
        gate.set()
        assert other.result(PATIENCE_S).sequences
