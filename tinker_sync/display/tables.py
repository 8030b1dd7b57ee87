"""Metrics, runs, checkpoints, models and usage as tables, and as rows for pandas."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from tinker_sync.display import page
from tinker_sync.errors import MissingExtraError

if TYPE_CHECKING:
    from tinker_sync.types import Checkpoint, ForwardBackwardOutput, OptimStepResponse, TrainingRun
    from tinker_sync.usage import Usage

_ENTRIES: Final = ("training_runs", "checkpoints", "supported_models", "rows")


def rows_of(value: Any) -> list[dict[str, Any]]:
    """Return the entries of a response that lists values, or of an iterable, as flat dicts.

    >>> from tinker_sync import types
    >>> model = {"model_name": "tinker-sync/tiny", "max_context_length": 4096}
    >>> listed = types.GetServerCapabilitiesResponse(supported_models=[model])
    >>> rows_of(listed)[0]["model_name"]
    'tinker-sync/tiny'
    """
    name = next((name for name in _ENTRIES if hasattr(value, name)), None)
    entries: Iterable[Any] = value if name is None else getattr(value, name)
    return [_flat(entry) for entry in entries]


def frame_of(value: Any) -> Any:
    """Return the entries that `rows_of` finds as a `pandas.DataFrame`.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    try:
        pandas: Any = importlib.import_module("pandas")
    except ImportError as error:
        raise MissingExtraError("notebook", feature="to_pandas") from error
    return pandas.DataFrame(rows_of(value))


def _flat(entry: Any) -> dict[str, Any]:
    if isinstance(entry, str):
        return {"id": entry}
    if hasattr(entry, "cost_usd"):
        return {"base_model": entry.base_model, **dict(entry.tokens.items()), "cost_usd": entry.cost_usd}
    found: dict[str, Any] = dict(entry._fields_out())
    for name, value in found.items():
        if hasattr(value, "tinker_path"):
            found[name] = value.tinker_path
    return found


def list_html(listed: Any) -> str:
    """Return a list of runs, checkpoints or models as an HTML table."""
    name = next(name for name in _ENTRIES if hasattr(listed, name))
    entries, cursor = getattr(listed, name), getattr(listed, "cursor", None)
    plural = name.replace("_", " ")
    words = f"{len(entries)} {plural if len(entries) != 1 else plural[:-1]}"
    if cursor is not None and cursor.total_count != len(entries):
        words += f" of {cursor.total_count}, from number {cursor.offset} on"
    return page.table([_shown(entry) for entry in entries], words)


def _shown(entry: Any) -> dict[str, Any]:
    kind = type(entry).__name__
    return _SHOWN[kind](entry) if kind in _SHOWN else dict(entry._fields_out())


def _shown_run(run: TrainingRun) -> dict[str, Any]:
    last = run.last_checkpoint
    return {
        "run": run.training_run_id,
        "base_model": run.base_model,
        "rank": run.lora_rank,
        "last_used": run.last_request_time,
        "last_checkpoint": None if last is None else last.checkpoint_id,
        "metadata": _words(run.user_metadata) + (" damaged" if run.corrupted else ""),
    }


def _shown_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "path": checkpoint.tinker_path,
        "saved": checkpoint.time,
        "size": None if checkpoint.size_bytes is None else page.size(checkpoint.size_bytes),
        "public": checkpoint.public,
        "kept_until": "you delete it" if checkpoint.expires_at is None else checkpoint.expires_at,
        "metadata": _words(checkpoint.user_metadata),
    }


_SHOWN: Final[dict[str, Any]] = {"TrainingRun": _shown_run, "Checkpoint": _shown_checkpoint}


def _words(metadata: dict[str, str] | None) -> str:
    return ", ".join(f"{name}={value}" for name, value in (metadata or {}).items())


def entry_html(entry: Any) -> str:
    """Return one run or checkpoint as an HTML table with a row for each property."""
    return page.pairs({name.replace("_", " "): value for name, value in _shown(entry).items()})


def pass_html(output: ForwardBackwardOutput) -> str:
    """Return the metrics of a pass as an HTML table."""
    count = len(output.loss_fn_outputs)
    return _metrics(output.metrics, f"a pass over {count} {'example' if count == 1 else 'examples'}")


def step_html(response: OptimStepResponse) -> str:
    """Return the metrics of an optimizer step as an HTML table."""
    return _metrics(response.metrics or {}, "an optimizer step")


def _metrics(metrics: dict[str, Any], caption: str) -> str:
    rows = []
    for name, value in metrics.items():
        plain, _, reduction = name.partition(":")
        rows.append({"metric": plain, "value": value, "over the pass": reduction})
    return page.table(rows, caption)


def usage_html(usage: Usage) -> str:
    """Return the tokens used and their cost, by base model, as an HTML table."""
    rows = [
        {
            "base_model": row.base_model or "unknown",
            "trained": row.tokens.trained,
            "prompt": row.tokens.prompt,
            "cached": row.tokens.cached,
            "sampled": row.tokens.sampled,
            "cost": "unknown price" if row.cost_usd is None else f"${row.cost_usd:.4f}",
        }
        for row in usage.rows
    ]
    return page.table(rows, f"tokens by base model; {usage.tokens.total:,} in all")
