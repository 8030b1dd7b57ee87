"""Targets of redirects, and the headers that redirected requests keep."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from tinker_sync.transport.pools import Origin
from tinker_sync.transport.request import Hop, RedirectRefused, by_name, redirected

HEADERS = by_name(
    {
        "X-API-Key": "tml-marked",
        "Authorization": "Basic marked",
        "CF-Access-Client-Secret": "marked",
        "X-Tinker-Weights-Access-Token": "marked",
        "Cookie": "marked",
        "X-My-Gateway": "marked",
        "X-Idempotency-Key": "k",
        "Accept": "application/json",
        "Content-Type": "application/json",
        "User-Agent": "u",
    }
)


def hop(method: str = "POST", url: str = "https://h/api/v1/x?a=1", body: bytes | None = b"{}") -> Hop:
    return Hop(method, urlsplit(url), Origin.of(url), HEADERS, body)


def test_303_asks_for_a_get() -> None:
    after = redirected(hop(), 303, "/other")
    assert (after.method, after.body) == ("GET", None)
    assert not {"content-type", "x-idempotency-key"} & set(after.headers)
    assert "x-api-key" in after.headers
    assert redirected(hop("GET", body=None), 303, "/other").method == "GET"


@pytest.mark.parametrize(
    "location",
    [
        *("https://other/x", "https://h:444/x", "https://sub.h/x", "//other/x"),
        *("https://h.evil/x", "https://h@other/x", "HTTPS://OTHER/x", "https://127.0.0.1/x"),
    ],
)
def test_nothing_secret_goes_to_another_origin(location: str) -> None:
    after = redirected(hop(), 307, location)
    assert set(after.headers) == {"accept", "content-type", "user-agent"}
    assert not after.own
    assert "marked" not in str(after.headers)


@pytest.mark.parametrize("location", ["https://h:443/y", "//h/y", "https://H/y", "y", "?b=2", "/y"])
def test_the_same_origin_in_other_words(location: str) -> None:
    after = redirected(hop(), 307, location)
    assert after.headers == HEADERS
    assert after.own


def test_dropped_headers_do_not_come_back_with_a_second_redirect() -> None:
    away = redirected(hop(), 307, "https://other/x")
    back = redirected(away, 307, "https://h/api/v1/x")
    assert "x-api-key" not in back.headers
    assert not back.own


@pytest.mark.parametrize(
    "location",
    ["http://h/x", "http://other/x", "ftp://h/x", "file:///etc/passwd", "javascript:x", "https://h:99999/"],
)
def test_redirects_that_are_refused(location: str) -> None:
    with pytest.raises(RedirectRefused):
        redirected(hop(), 307, location)


def test_a_secret_in_the_body_stays_at_home() -> None:
    load = hop(body=b'{"path": "tinker://r/weights/a", "weights_access_token": "abcdefgh"}')
    with pytest.raises(RedirectRefused, match="secret"):
        redirected(load, 307, "https://other/x")
    assert redirected(load, 307, "/x").body == load.body
    assert redirected(load, 303, "https://other/x").body is None
    assert redirected(hop(body=b'{"path": "p"}'), 307, "https://other/x").body == b'{"path": "p"}'
    assert redirected(hop(body=b"\x0a\x05probe\xff"), 307, "https://other/x").body is not None


def test_locations_are_cleaned() -> None:
    assert redirected(hop(), 307, " /a b#frag ").address == "https://h/a%20b"
    assert redirected(hop(), 307, "/ü".encode().decode("latin-1")).address == "https://h/%C3%BC"
    assert redirected(hop(), 307, "https://bücher.example/").origin.host == "xn--bcher-kva.example"
