"""The dialect of a server is decided from its recorded answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tinker_sync.config import Settings
from tinker_sync.errors import ConfigurationError, UnsupportedByServerError
from tinker_sync.runtime.calls import make_call
from tinker_sync.wire.dialect import (
    CURRENT,
    FEATURES,
    Dialect,
    DialectCache,
    NeedsProbe,
    decide,
    read_probe,
)
from tinker_sync.wire.endpoints import ENDPOINTS, Endpoint

# The settings that servers of each kind send.
FOUR_FLAGS = {
    "pjwt_auth_enabled": False,
    "credential_default_source": "api_key",
    "sample_dispatch_bytes_semaphore_size": 10485760,
    "inflight_response_bytes_semaphore_size": 52428800,
}
V25 = {**FOUR_FLAGS, "proto_compress_fwdbwd": False, "fwdbwd_max_chunk_len": 1024}
V36 = {
    **V25,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "custom_loss_server_side": False,
}


def decided(status: int, config: object, **options: Any) -> Dialect:
    found = decide(status, config, **options)
    assert isinstance(found, Dialect)
    return found


@pytest.mark.parametrize("status", [404, 405, 501])
def test_no_client_config_means_an_old_json_server(status: int) -> None:
    dialect = decided(status, None)
    assert (dialect.protobuf, dialect.forward_only, dialect.client_config) == (False, False, False)
    assert not dialect.offers("auth_token")
    assert not dialect.offers("finish_session")
    assert dialect.offers("get_checkpoint_archive")


def test_chunk_settings_mean_protobuf() -> None:
    dialect = decided(200, V25)
    assert (dialect.protobuf, dialect.forward_only, dialect.zstd) == (True, True, False)
    assert dialect.version == (0, 25)


def test_versions_that_no_server_speaks_are_refused_with_what_to_do() -> None:
    with pytest.raises(UnsupportedByServerError, match=r"0\.19 to 0\.24 .*dialect='json'"):
        decide(200, {**FOUR_FLAGS, "proto_write_fwdbwd": False})
    newer = {**V25, "proto_write_fwdbwd": True, "create_model_via_load_weights": False}
    assert decided(200, newer).version == (0, 25)  # a setting may stay when others come


@pytest.mark.parametrize("config", [FOUR_FLAGS, {"pjwt_auth_enabled": False}, {}, None, []])
def test_settings_without_an_age_ask_for_a_probe(config: object) -> None:
    assert decide(200, config) == NeedsProbe()
    assert decided(200, config, probe="json").protobuf is False
    assert decided(200, config, probe="protobuf").protobuf is True


def test_a_probed_server_is_never_asked_to_train_by_mistake() -> None:
    # A server with protobuf and without `forward_only` would accumulate gradients in a forward pass.
    assert decided(200, FOUR_FLAGS, probe="protobuf").forward_only is False


def complaint(place: list[object], kind: str) -> bytes:
    return json.dumps({"detail": [{"loc": place, "type": kind, "msg": "m", "input": "\n\x05probe"}]}).encode()


@pytest.mark.parametrize(
    ("status", "body", "spoken"),
    [
        (422, complaint(["body"], "model_attributes_type"), "json"),
        (422, complaint(["body"], "type_error.dict"), "json"),
        (422, complaint(["body", 0], "json_invalid"), "json"),
        (415, b"", "json"),
        (500, b"Internal Server Error", "json"),
        (422, complaint(["body", "forward_backward_input"], "missing"), "protobuf"),
        (422, b'{"detail": "unknown model probe"}', "protobuf"),
        (404, b'{"detail": "Model not found"}', "protobuf"),
        (400, b"<html>", "protobuf"),
        (200, b'{"request_id": "r"}', "protobuf"),
        (202, b"{}", "protobuf"),
        (401, b"{}", None),
        (429, b"", None),
        (503, b"", None),
    ],
)
def test_reading_the_answer_to_the_probe(status: int, body: bytes, spoken: str | None) -> None:
    assert read_probe(status, body) == spoken


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b'{"detail": []}', b'{"detail": [1]}', b'{"detail": [{"loc": 3}]}', b"[" * 100_000],
)
def test_odd_answers_to_the_probe_do_not_break_it(body: bytes) -> None:
    assert read_probe(422, body) == "protobuf"


def test_what_dynamic_config_adds() -> None:
    old = decided(200, V25)
    assert old.dynamic_config is None
    assert old.offers("dynamic_config")
    missing = old.after_dynamic_config(404, None)
    assert missing.dynamic_config is False
    assert not missing.offers("dynamic_config")
    newer = old.after_dynamic_config(200, {"refresh_interval_sec": 300, "sample_cancel_enabled": True})
    assert newer.dynamic_config is True
    assert newer.version == (0, 26)
    assert old.after_dynamic_config(503, None) is old
    assert decided(200, V36).after_dynamic_config(200, {"refresh_interval_sec": 1}).version == CURRENT


@pytest.mark.parametrize("feature", FEATURES)
def test_features_belong_to_versions(feature: str) -> None:
    assert Dialect.of_vendor().knows(feature)
    assert decided(200, V36).knows(feature)
    assert not decided(404, None).knows(feature)
    assert not decided(200, FOUR_FLAGS, probe="protobuf").knows(feature)


def repeatable(row: Endpoint, dialect: Dialect | None) -> bool:
    settings = Settings.resolve(base_url="http://h", api_key="tml-test", environ={})
    return make_call(row.name, settings, {}, dialect=dialect).repeatable


def test_only_servers_that_keep_numbers_get_numbered_calls_twice() -> None:
    optim_step, asample = ENDPOINTS["optim_step"], ENDPOINTS["asample"]
    assert not optim_step.repeatable
    assert repeatable(optim_step, decided(200, V36))
    assert not repeatable(optim_step, decided(404, None))
    assert not repeatable(optim_step, None)
    assert repeatable(asample, decided(404, None))
    assert repeatable(ENDPOINTS["retrieve_future"], decided(404, None))


def test_the_dialect_can_be_forced() -> None:
    assert Dialect.forced("json").protobuf is False
    assert Dialect.forced("proto").forward_only is True
    mine = Dialect(version=(0, 18), protobuf=True)
    assert Dialect.forced(mine) is mine
    with pytest.raises(ConfigurationError):
        Dialect.forced("auto")


def test_what_was_found_can_be_forgotten() -> None:
    cache = DialectCache()
    cache.keep("http://h", Dialect.of_vendor())
    cache.clear()
    assert cache.get("http://h") is None
