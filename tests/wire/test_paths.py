"""Paths and queries are built from ids and matched."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinker_sync.errors import InvalidInputError
from tinker_sync.wire.paths import PathTemplate, encode_query, segment, segments

TEXT = st.text(min_size=1).filter(lambda text: text not in (".", ".."))


@given(TEXT.filter(lambda text: text.isprintable() or text.isascii()))
def test_a_segment_round_trips(text: str) -> None:
    encoded = segment(text)
    assert not set(encoded) & set("/?# \r\n\t%") - {"%"}
    assert encoded.isascii()
    assert unquote(encoded) == text


@pytest.mark.parametrize("bad", ["", ".", "..", "\ud800"])
def test_dots_and_empty_ids_are_refused(bad: str) -> None:
    with pytest.raises(InvalidInputError):
        segment(bad)


@pytest.mark.parametrize("bad", ["../x", "weights/..", "weights/", "/a", "a/b/c", "weights/a/../../x"])
def test_bad_checkpoint_ids_are_refused(bad: str) -> None:
    with pytest.raises(InvalidInputError):
        segments(bad)


def test_queries_follow_the_protocol() -> None:
    zone = timezone(timedelta(hours=2))
    assert (
        encode_query(
            {
                "day": datetime(2026, 1, 1, 2, tzinfo=zone),
                "naive": datetime(2026, 1, 1),  # noqa: DTZ001 - taken for UTC
                "yes": True,
                "no": False,
                "ids": ["a", "b"],
                "none": None,
                "empty": "",
                "nothing": [],
                "zero": 0,
            }
        )
        == "day=2026-01-01T00:00:00Z&naive=2026-01-01T00:00:00Z&yes=true&no=false&ids=a,b&zero=0"
    )


def test_ids_must_match_the_template() -> None:
    template = PathTemplate("/a/{one}/b")
    for ids in ({}, {"two": 1}, {"one": 1, "two": 2}):
        with pytest.raises(TypeError):
            template.fill(ids)


@given(TEXT.filter(str.isprintable), st.sampled_from(["weights", "sampler_weights", "external_weights"]))
def test_filling_and_matching_are_inverse(name: str, kind: str) -> None:
    template = PathTemplate("/r/{run}/c/{*checkpoint}/ttl")
    if "/" in name:
        return
    ids = {"run": name, "checkpoint": f"{kind}/{name}"}
    assert template.match(template.fill(ids)) == ids
