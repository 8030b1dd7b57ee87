"""Requests as they are handed to the user's session."""

from __future__ import annotations

import pytest
import requests

from tinker_sync.transport.session_line import prepare


def prepared(session: requests.Session, body: bytes | None) -> requests.PreparedRequest:
    headers = {"Host": "h", "Content-Length": str(len(body or b""))}
    return prepare(session, "POST", "http://h/x", headers, body, authenticate=False)


@pytest.mark.parametrize("size", [1, 10, 64 * 1024])
def test_a_small_body_goes_as_it_is(size: int) -> None:
    with requests.Session() as session:
        assert prepared(session, bytes(size)).body == bytes(size)


def test_w30_a_large_body_goes_in_pieces_that_have_the_timeout_for_themselves() -> None:
    with requests.Session() as session:
        request = prepared(session, bytes(64 * 1024 + 1))
    assert len(request.body.read()) == 64 * 1024 + 1  # type: ignore[union-attr]  # a file
    assert request.headers["Content-Length"] == str(64 * 1024 + 1)
    assert "Transfer-Encoding" not in request.headers


def test_no_header_of_requests_gets_in() -> None:
    with requests.Session() as session:
        assert set(prepared(session, b"{}").headers) == {"Host", "Content-Length"}
