"""The log and the observer get every event, and their failures have no effect."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.wires import KEY, Notebook, heard_by, post

from tinker_sync._base.events import (
    Events,
    Redirected,
    ReplyReceived,
    RequestLost,
    RequestSent,
    RetryScheduled,
    SessionStarted,
)
from tinker_sync._base.secret import Secret
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.transport.journal import Journal, curl, redact_body
from tinker_sync.transport.request import by_name

CALL = post(body=b'{"weights_access_token": "marked-token", "a": 1}', attempt=2)
REPLY = Reply(
    200, {"content-type": "application/json", "set-cookie": "marked"}, b'{"jwt": "marked-jwt-token"}'
)


def everything(journal: Journal) -> None:
    journal.sent(CALL, by_name({"X-API-Key": KEY, "Accept": "*/*"}))
    journal.redirected(CALL, 307, same_origin=False, to="https://other")
    journal.redirected(CALL, 307, same_origin=True, to="https://h")
    journal.answered(CALL, REPLY, 0.5)
    journal.lost(CALL, SendFailed(f"bad {KEY}", maybe_received=True), 0.25)
    journal.retrying(CALL, 1.5, "503")


def test_the_observer_receives_all_of_it() -> None:
    notebook = Notebook()
    everything(Journal(heard_by(notebook)))
    common = {"method": "POST", "path": "/api/v1/x"}
    assert notebook.events == [
        RequestSent(**common, attempt=2, size_bytes=len(CALL.body or b"")),
        Redirected(**common, status=307, same_origin=False),
        Redirected(**common, status=307, same_origin=True),
        ReplyReceived(**common, attempt=2, status=200, size_bytes=27, duration_s=0.5),
        RequestLost(**common, attempt=2, reason="SendFailed", maybe_received=True, duration_s=0.25),
        RetryScheduled(**common, attempt=2, delay_s=1.5, reason="503"),
    ]


def test_no_secret_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tinker_sync")
    everything(Journal(base_url="https://h", as_curl=True, secrets=lambda: [Secret(KEY)]))
    assert "POST /api/v1/x, attempt 2, 48 bytes" in caplog.text
    assert "-X POST https://h/api/v1/x" in caplog.text
    assert "200 in 0.500 s" in caplog.text
    assert "redirected to https://other, without credentials" in caplog.text
    assert "again in 1.50 s (503)" in caplog.text
    assert "marked" not in caplog.text


def test_without_debug_nothing_is_formatted(caplog: pytest.LogCaptureFixture) -> None:
    def never() -> list[Secret]:
        raise AssertionError("nobody listens")

    caplog.set_level(logging.INFO, "tinker_sync")
    everything(Journal(secrets=never))
    assert len(caplog.records) == 1  # a warning, because the request was redirected without its credentials


def test_an_observer_that_raises_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def observe(self, event: object) -> None:
            raise RuntimeError("mine")

    everything(Journal(heard_by(Broken())))
    assert caplog.text.count("an observer raised") == 6


def test_observers_that_many_threads_add_and_remove_are_all_kept_and_all_gone() -> None:
    started, notebook = SessionStarted("s"), Notebook()
    events = Events()
    stops: list[Callable[[], None]] = []
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            stops += pool.map(events.listen, [notebook] * 2000)
            events.notify(started)
            assert notebook.events == [started] * 2000
            list(pool.map(lambda stop: stop(), stops))
    finally:
        sys.setswitchinterval(usual_s)
    stops[0]()
    assert not events.wants(SessionStarted)


# -------------------------------- Log texts of calls: masked, bounded, and as a curl line that runs
PLANTED_KEY = "tml-planted-key-0123456789"
BASE = "https://h.example/pre"

needs_shell = pytest.mark.skipif(
    os.name != "posix" or shutil.which("sh") is None, reason="curl lines are for POSIX shells"
)


def arguments(line: str, **variables: str) -> list[str]:
    """Run a curl line in a shell with these variables. Return the arguments that curl gets."""
    script = 'curl() { for word in "$@"; do printf "%s\\0" "$word"; done; }\n' + line
    done = subprocess.run(["sh", "-euc", script], env=variables, capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


def header_table(words: list[str]) -> dict[str, str]:
    headers = [words[place + 1] for place, word in enumerate(words) if word == "-H"]
    return dict(header.split(": ", 1) for header in headers)


# ---- curl


@needs_shell
def test_a_shell_gets_back_what_was_sent() -> None:
    body = {
        "path": 'it\'s "$HOME" `here` \\ ü \n',
        "weights_access_token": PLANTED_KEY,
        "seq_id": 3,
        "n": [None, 1.5],
    }
    call = Call(method="POST", path="/api/v1/load_weights", query="a=1&b=%20", body=json.dumps(body).encode())
    sent = {"X-API-Key": PLANTED_KEY, "Content-Type": "application/json", "X-Note": 'it\'s $(id) `id` "q"'}
    line = curl(call, BASE, sent)
    assert PLANTED_KEY not in line
    words = arguments(line, TINKER_API_KEY=PLANTED_KEY, WEIGHTS_ACCESS_TOKEN=PLANTED_KEY)
    assert words[:5] == ["-sS", "--compressed", "-X", "POST", f"{BASE}/api/v1/load_weights?a=1&b=%20"]
    assert header_table(words) == sent
    assert words[-2] == "--data-raw"
    assert json.loads(words[-1]) == body


@needs_shell
@pytest.mark.parametrize(
    ("header", "variable"),
    [
        ("X-API-Key", "TINKER_API_KEY"),
        ("CF-Access-Client-Id", "CLOUDFLARE_ACCESS_CLIENT_ID"),
        ("CF-Access-Client-Secret", "CLOUDFLARE_ACCESS_CLIENT_SECRET"),
        ("Authorization", "AUTHORIZATION"),
        ("X-Tinker-Weights-Access-Token", "X_TINKER_WEIGHTS_ACCESS_TOKEN"),
        ("X-My-Token", "X_MY_TOKEN"),
    ],
)
def test_each_secret_header_is_a_variable(header: str, variable: str) -> None:
    line = curl(Call(method="GET", path="/x"), BASE, {header: PLANTED_KEY})
    assert PLANTED_KEY not in line
    assert header_table(arguments(line, **{variable: PLANTED_KEY})) == {header: PLANTED_KEY}


@needs_shell
def test_a_header_name_is_no_shell_code() -> None:
    line = curl(Call(method="GET", path="/x"), BASE, {'a"$(id)-token': PLANTED_KEY})
    assert "-H" in arguments(line, A___ID__TOKEN="v")
    assert "uid=" not in " ".join(arguments(line, A___ID__TOKEN="v"))


@needs_shell
def test_texts_below_a_secret_name_of_a_body_are_its_variable() -> None:
    body = {"user_metadata": {"password": ["opaque-1", {"old": "opaque-1", "age": 3}]}}
    line = curl(Call(method="POST", path="/x", body=json.dumps(body).encode()), BASE, {})
    assert "opaque" not in line
    assert json.loads(arguments(line, PASSWORD="opaque-1")[-1]) == body


def test_without_headers_it_shows_what_the_call_says() -> None:
    line = curl(Call(method="GET", path="/x", accept="a/b", headers={"X-One": "1"}), BASE)
    assert line == (
        "curl -sS --compressed -X GET https://h.example/pre/x -H 'Accept: a/b' -H 'X-One: 1' "
        "-H 'X-API-Key: '\"$TINKER_API_KEY\""
    )
    assert "X-API-Key" not in curl(Call(method="GET", path="/x", credential="none"), BASE)


def test_what_curl_writes_itself_is_left_out() -> None:
    sent = {
        "Host": "h",
        "Content-Length": "9",
        "Connection": "keep-alive",
        "Accept-Encoding": "gzip",
        "X-A": "1",
    }
    line = curl(Call(method="POST", path="/x", body=b"{}"), BASE, sent)
    assert line == "curl -sS --compressed -X POST https://h.example/pre/x -H 'X-A: 1' --data-raw '{}'"


@pytest.mark.parametrize(
    "call",
    [
        Call(method="POST", path="/x", body=b"\x0a\x05probe", content_type="application/x-protobuf"),
        Call(method="POST", path="/x", body=b"(\xb5/\xfd", headers={"Content-Encoding": "zstd"}),
        Call(method="POST", path="/x", body=b"{broken"),
        Call(method="POST", path="/x", body=b'{"a": "' + b"x" * 100_000 + b'"}'),
        Call(method="POST", path="/x", body=b"[" * 60_000),
    ],
    ids=["protobuf", "compressed", "broken", "long", "deep"],
)
def test_bodies_that_do_not_fit_a_command_line(call: Call) -> None:
    assert curl(call, BASE).endswith("--data-binary @body.bin")


def test_known_values_are_masked_wherever_they_stand() -> None:
    call = Call(method="POST", path="/x/opaque-1", query="q=opaque-1", body=b'{"note": "opaque-1"}')
    line = curl(call, BASE, {"X-Note": "opaque-1"}, [Secret("opaque-1")])
    assert "opaque" not in line
    assert line.count("***") == 4


def test_signed_addresses_are_masked() -> None:
    assert "abc" not in curl(Call(method="GET", path="/x", query="sig=abc&X-Amz-Signature=abc"), BASE)


# ---- bodies


@pytest.mark.parametrize(
    ("content", "kind", "shown"),
    [
        (None, "application/json", ""),
        (b"", "application/json", ""),
        (b'{"jwt": "a.b.c"}', "application/json", '{"jwt": "***"}'),
        (b'{"jwt": "a.b.c"}', "application/problem+json; charset=utf-8", '{"jwt": "***"}'),
        (b"sent Bearer abcdefgh", "text/plain", "sent Bearer ***"),
        (b"\xff\xfe", "text/plain", "\ufffd\ufffd"),
        (b"\x00" * 7, "application/x-protobuf", "<7 bytes of application/x-protobuf>"),
        (b"\x00", "", "<1 bytes of unknown type>"),
    ],
)
def test_bodies(content: bytes | None, kind: str, shown: str) -> None:
    assert redact_body(content, kind) == shown


def test_long_bodies_are_cut_and_very_long_ones_only_counted() -> None:
    shown = redact_body(b"x" * 5000, "text/plain")
    assert shown == "x" * 2048 + "... (5000 bytes)"
    assert redact_body(b"x" * 100_000, "text/plain") == "<100000 bytes of text/plain>"


@pytest.mark.parametrize("length", range(2000, 2060, 7))
def test_no_cut_leaves_a_piece_of_a_secret(length: int) -> None:
    tree = {"pad": "x" * length, "jwt": "secret" * 1000, "more": "hidden-value"}
    shown = redact_body(json.dumps(tree).encode(), "application/json", ["hidden-value"])
    assert "secret" not in shown
    assert "hidden" not in shown
