"""Types of the names that packages load on first use. mypy reads this file; nothing runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tinker_sync
import tinker_sync.types
from tinker_sync import AdamParams, Datum, errors
from tinker_sync.types import TensorData

if TYPE_CHECKING:
    from typing_extensions import assert_type


def names_have_their_types(datum: Datum, failure: tinker_sync.RateLimitError) -> None:
    assert_type(tinker_sync.AdamParams(), AdamParams)
    assert_type(tinker_sync.types.AdamParams(), AdamParams)
    assert_type(datum.loss_fn_inputs["weights"], TensorData)
    assert_type(tinker_sync.__version__, str)
    refusal: errors.APIStatusError = failure
    assert_type(refusal.request_id, str | None)


def a_mistyped_name_is_seen() -> None:
    assert tinker_sync.Datm  # type: ignore[attr-defined]
    assert tinker_sync.types.TensorDate  # type: ignore[attr-defined]


def a_mistyped_argument_is_seen() -> None:
    AdamParams(learning_rat=1e-4)  # type: ignore[call-arg]
    AdamParams(learning_rate="fast")  # type: ignore[arg-type]
