"""Calls made from rows of the table."""

from __future__ import annotations

import json

import pytest

from tinker_sync.errors import InvalidInputError
from tinker_sync.transport.calls import call_for
from tinker_sync.types import AdamParams, FutureRetrieveRequest, OptimStepRequest
from tinker_sync.wire.dialect import Dialect
from tinker_sync.wire.endpoints import ENDPOINTS

NEW, OLD = Dialect.of_vendor(), Dialect.forced("json")


def test_path_and_query() -> None:
    call = call_for(
        ENDPOINTS["get_training_run"], NEW, ids={"run": "r/1"}, query={"access_scope": "owned", "none": None}
    )
    assert (call.method, call.path, call.query) == (
        "GET",
        "/api/v1/training_runs/r%2F1",
        "access_scope=owned",
    )
    assert call.body is None
    with pytest.raises(InvalidInputError):
        call_for(ENDPOINTS["get_training_run"], NEW, ids={"run": ".."})


def test_the_body_is_shaped_for_the_server() -> None:
    request = FutureRetrieveRequest(request_id="r", allow_metadata_only=True)
    new, old = (call_for(ENDPOINTS["retrieve_future"], d, request=request).body or b"" for d in (NEW, OLD))
    assert set(json.loads(new)) - set(json.loads(old)) == {"allow_metadata_only"}


def test_retries_timeouts_and_credentials_come_from_the_row() -> None:
    retrieve = call_for(ENDPOINTS["retrieve_future"], NEW, body=b"{}")
    assert (retrieve.max_retries, retrieve.read_s, retrieve.timeout) == (0, 45, None)
    config = call_for(ENDPOINTS["client_config"], NEW, body=b"{}")
    assert (config.max_retries, config.read_s, config.credential) == (None, None, "exchange")
    assert (
        call_for(
            ENDPOINTS["get_checkpoint_archive"], OLD, ids={"run": "r", "checkpoint": "a"}
        ).follow_redirects
        is False
    )


def test_only_a_server_that_keeps_numbers_may_get_a_step_twice() -> None:
    step = OptimStepRequest(optim_params=AdamParams(), model_id="m", seq_id=1)
    assert call_for(ENDPOINTS["optim_step"], NEW, request=step).repeatable
    assert not call_for(ENDPOINTS["optim_step"], OLD, request=step).repeatable


def test_fields_may_be_given() -> None:
    call = call_for(ENDPOINTS["asample"], NEW, body=b"{}", idempotency_key="k", max_retries=3)
    assert (call.idempotency_key, call.max_retries) == ("k", 3)
