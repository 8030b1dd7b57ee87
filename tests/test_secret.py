"""Secrets are hidden, and texts that look like secrets are recognised."""

from __future__ import annotations

import copy
import hmac
import json
import pickle
import time
from typing import Any

import attrs
import pytest

from tinker_sync._base.secret import (
    HeaderMap,
    Secret,
    is_secret_header,
    is_secret_name,
    is_secret_parameter,
    mask_headers,
    mask_json,
    mask_text,
    mask_url,
)

TEXT = "tml-planted-key-0123456789"
JWT = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJ1MSJ9.c2ln"


@attrs.frozen
class Holder:
    key: Secret


@pytest.mark.parametrize(
    "show",
    [
        repr,
        str,
        format,
        ascii,
        lambda s: f"{s} {s!r} {s:>9}",
        lambda s: "%s %r" % (s, s),  # noqa: UP031 - one more way to show it
        lambda s: repr([s, {"k": s}]),
        lambda s: repr(Holder(s)),
        lambda s: repr(attrs.asdict(Holder(s))),
        lambda s: repr(dir(s)) + repr(type(s).__dict__),
        lambda s: repr(s.reveal()),
        lambda s: repr({"X-API-Key": s.reveal()}),
    ],
)
def test_a_secret_is_not_shown(show: Any) -> None:
    assert TEXT not in show(Secret(TEXT))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_secret_cannot_be_pickled(protocol: int) -> None:
    for value in (Secret(TEXT), Secret(TEXT).reveal(), Holder(Secret(TEXT))):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(value, protocol)


def test_secrets_compare_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert Secret("a\ud800é") == Secret("a\ud800é")
    assert Secret("a") != Secret("b")
    assert len(compared) == 2
    assert Secret("a") != "a"
    assert len({Secret("a"), Secret("a"), Secret("b")}) == 2


# ----------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "name",
    [
        *("X-API-Key", "authorization", "Proxy-Authorization", "Cookie", "Set-Cookie", "X-Team-Key"),
        *("CF-Access-Client-Id", "CF-Access-Client-Secret", "CF-Access-Jwt-Assertion"),
        *("X-Tinker-Weights-Access-Token", "X-Auth", "X-Amz-Security-Token", "X-Csrf-Token", "Private-Token"),
    ],
)
def test_secret_headers_are_recognised(name: str) -> None:
    assert is_secret_header(name)
    assert is_secret_header(name.upper())


@pytest.mark.parametrize(
    "name",
    ["Accept", "X-Idempotency-Key", "User-Agent", "X-Request-Id", "Content-Type", "X-Author", "Keep-Alive"],
)
def test_plain_headers_are_recognised(name: str) -> None:
    assert not is_secret_header(name)


@pytest.mark.parametrize(
    "name",
    ["weights_access_token", "jwt", "password", "apiKey", "api_key", "clientSecret", "accessKeyId", "token"],
)
def test_secret_fields_are_recognised(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["tokens", "max_tokens", "stop_tokens", "key", "monkey", "keys", "designation", "sigma", "path", ""],
)
def test_plain_fields_are_recognised(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("X-Amz-Signature", "X-Amz-Credential", "X-Amz-Security-Token", "X-Goog-Signature", "sig", "token"),
        *("Signature", "key", "Policy", "Key-Pair-Id", "AWSAccessKeyId", "GoogleAccessId", "access_token"),
    ],
)
def test_secret_parameters_are_recognised(name: str) -> None:
    assert is_secret_parameter(name)


# ----------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("https://h/p", "https://h/p"),
        ("http://user:pass@h:1/p?q=1", "http://***@h:1/p?q=1"),
        ("http://us@er:p@ss@h/p", "http://***@h/p"),
        (
            "https://b/o?X-Amz-Date=1&X-Amz-Signature=s&part=2",
            "https://b/o?X-Amz-Date=1&X-Amz-Signature=***&part=2",
        ),
        ("https://b/o?X%2DAmz%2DSignature=s", "https://b/o?X%2DAmz%2DSignature=***"),
        ("https://b/o?sig=a%2Fb#token=t", "https://b/o?sig=***#token=***"),
        ("/path?key=s", "/path?key=***"),
        ("https://h/a@b?x=c@d", "https://h/a@b?x=c@d"),
        ("", ""),
    ],
)
def test_urls_are_masked(url: str, masked: str) -> None:
    assert mask_url(url) == masked
    assert mask_url(masked) == masked


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (f"invalid key {TEXT}.", "invalid key ***."),
        (f"token {JWT} expired", "token *** expired"),
        ("Authorization: Bearer abcdef.ghi", "Authorization: ***"),
        ("sent Basic dXNlcjpwYXNz to it", "sent Basic *** to it"),
        ("X-API-Key: whatever, Accept: x", "X-API-Key: ***, Accept: x"),
        ("{'X-Api-Key': 'opaque', 'a': 'b'}", "{'X-Api-Key': '***', 'a': 'b'}"),
        ('{"weights_access_token": "a\\"b", "path": "p"}', '{"weights_access_token": "***", "path": "p"}'),
        (r'"{\"jwt\": \"a.b\", \"path\": \"p\"}"', r'"{\"jwt\": \"***\", \"path\": \"p\"}"'),
        (r'"{\\\"jwt\\\":\\\"a.b\\\"}"', r'"{\\\"jwt\\\":\\\"***\\\"}"'),
        (
            "Max retries with url: /x?token=abc (Caused by ...)",
            "Max retries with url: /x?token=*** (Caused by ...)",
        ),
        ("ProxyError('http://me:pw@proxy:3128')", "ProxyError('http://***@proxy:3128')"),
        ("the api_key must start with the 'tml-' prefix", "the api_key must start with the 'tml-' prefix"),
        ("tinker://run-1/weights/step-3", "tinker://run-1/weights/step-3"),
        ("tml:organization:abc", "tml:organization:abc"),
        ("max_tokens=3 is fine", "max_tokens=3 is fine"),
    ],
)
def test_texts_are_masked(text: str, masked: str) -> None:
    assert mask_text(text) == masked


def test_known_values_are_masked_in_every_encoding() -> None:
    known = Secret("p@ss/wörd +1")
    text = "a p@ss/wörd +1 b p%40ss%2Fw%C3%B6rd%20%2B1 c p%40ss%2Fw%C3%B6rd+%2B1 d"
    assert mask_text(text, [known]) == "a *** b *** c *** d"


def test_known_values_may_hold_lone_surrogates() -> None:
    assert mask_text("a half\ud800pair b", ["half\ud800pair"]) == "a *** b"


def test_overlapping_known_values_are_masked_completely() -> None:
    assert mask_text("secret-and-more secret-", ["secret-", "secret-and-more"]) == "*** ***"


def test_short_values_are_not_masked() -> None:
    assert mask_text("a cat on a mat", ["a", "cat", ""]) == "a cat on a mat"


def test_json_trees_are_masked() -> None:
    tree = {
        "path": f"https://u:p@h/{TEXT}",
        "weights_access_token": "opaque",
        "deep": [{"jwt": "j", "tokens": [1, 2]}, None, 1.5, True],
        "token": 17,
        "detail": [
            {"loc": ["body", "weights_access_token"], "msg": "bad", "input": {"any": "thing"}, "ctx": 1}
        ],
    }
    assert mask_json(tree) == {
        "path": "https://***@h/***",
        "weights_access_token": "***",
        "deep": [{"jwt": "***", "tokens": [1, 2]}, None, 1.5, True],
        "token": 17,
        "detail": [{"loc": ["body", "weights_access_token"], "msg": "bad", "input": "***", "ctx": "***"}],
    }
    assert tree["weights_access_token"] == "opaque"


def test_texts_at_any_depth_below_a_secret_name_are_masked() -> None:
    tree = {"password": ["abcdef", [None]], "auth": {"user": "me", "tokens": [1]}, "token_ids": [7, 8]}
    shown = {"password": ["***", [None]], "auth": {"user": "***", "tokens": [1]}, "token_ids": [7, 8]}
    assert mask_json(tree) == shown


def test_names_in_json_trees_are_masked() -> None:
    tree = {f"heard {TEXT}": 1, "hello hunter22": {"hunter22": "x"}, "detail": [{"loc": ["token"], "ctx": 2}]}
    shown = {"heard ***": 1, "hello ***": {"***": "x"}, "detail": [{"loc": ["token"], "ctx": "***"}]}
    assert mask_json(tree, ["hunter22"]) == shown


def test_deep_json_is_masked() -> None:
    tree: Any = "opaque-value"
    for _ in range(50_000):
        tree = [tree]
    assert "opaque-value" not in json.dumps(mask_json(tree))


def test_headers_are_masked() -> None:
    headers = {
        "X-API-Key": TEXT,
        "Location": "https://b/o?sig=s",
        "X-Note": TEXT,
        "X-Bytes": b"v",
        "X-Known": "value-1",
    }
    assert mask_headers(headers, ["value-1"]) == {  # type: ignore[arg-type]  # libraries below use bytes
        "X-API-Key": "***",
        "Location": "https://b/o?sig=***",
        "X-Note": "***",
        "X-Bytes": "v",
        "X-Known": "***",
    }


@pytest.mark.parametrize(
    "hostile",
    [
        "a" * 200_000,
        "a:" * 100_000,
        "http://" * 30_000,
        "http://a" * 30_000,
        "?a=" * 60_000,
        "&" * 200_000,
        '"a":"' * 40_000,
        "'a':\"" * 40_000,
        '"a":"' + '\\"' * 100_000,
        '\\"a\\":\\"' * 30_000,
        "\\" * 200_000,
        '\\"' * 100_000,
        "Bearer " * 30_000,
        "authorization" * 15_000,
        "authorization:" * 15_000,
        "eyJ" * 60_000,
        "tml-" * 50_000,
        "eyJaaaaaaaa." * 15_000,
        " " * 200_000,
        '"a"' + " " * 200_000,
    ],
    ids=lambda text: text[:12],
)
def test_masking_takes_linear_time(hostile: str) -> None:
    def cpu_s(text: str) -> float:
        begin = time.process_time()
        mask_text(text)
        return time.process_time() - begin

    # A quadratic pattern takes minutes for these; linear ones some milliseconds.
    assert cpu_s(hostile) < 2.0


# ------------------------------------------------------------------------------------------ header map


def test_header_maps_ignore_case_and_keep_order() -> None:
    headers = HeaderMap({"B": "2", "a": "1", "X-API-Key": TEXT})
    assert (headers["b"], headers["A"], headers["x-api-key"]) == ("2", "1", TEXT)
    assert list(headers) == ["B", "a", "X-API-Key"]
    assert ("B" in headers, "b" in headers, "c" in headers, 3 in headers) == (True, True, False, False)
    assert len(headers) == 3
    assert headers.get("nothing") is None
    assert HeaderMap([("A", "1"), ("a", "2")]) == {"A": "2"}


def test_header_maps_do_not_show_or_pickle_secrets() -> None:
    headers = HeaderMap({"X-API-Key": TEXT, "Accept": "*/*"})
    assert TEXT not in repr(headers) + repr(dict(headers)) + repr(list(headers.items()))
    again = pickle.loads(pickle.dumps(headers))
    assert dict(again) == {"X-API-Key": "***", "Accept": "*/*"}
    assert copy.copy(headers) is copy.deepcopy(headers) is headers
