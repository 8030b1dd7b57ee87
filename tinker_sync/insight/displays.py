"""Displays of values for notebooks, loaded when the first value is displayed.

A display never waits, sends nothing and shows no credential. It inherits the colours of the notebook, so that
light and dark themes both work. Any thread may call this module.

>>> import tinker_sync
>>> "2 tokens" in html_of(tinker_sync.SampledSequence("stop", None, [20, 21], [-0.1, -2.0]))
True
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

from tinker_sync.errors import MissingExtraError
from tinker_sync.insight import page
from tinker_sync.runtime.futures import APIFuture

if TYPE_CHECKING:
    from tinker_sync.insight.metrics import Metrics
    from tinker_sync.insight.usage import Usage
    from tinker_sync.types import (
        Checkpoint,
        ForwardBackwardOutput,
        OptimStepResponse,
        SampledSequence,
        SampleResponse,
        TrainingRun,
    )

__all__ = ["frame_of", "html_of", "shade"]


def html_of(value: object) -> str | None:
    """Return the display of a value as HTML, or None if its class has none.

    >>> html_of(3) is None
    True
    """
    for kind in type(value).__mro__:
        make = _DISPLAYS.get(kind.__name__) if kind.__module__.startswith("tinker_sync.") else None
        if make is not None:
            return make(value)
    return None


# -------------------------------------------------------------------------------------------- samples


# A token with a log-probability of -6 (a probability of 1/400) or less has the darkest shade.
_DARKEST: Final = 6.0
_MOST_TOKENS: Final = 2000
# The number of earlier tokens that are decoded together with a token, because they can change its text.
_CONTEXT: Final = 6


class Shaded:
    """The result of `shade`: a value that a notebook displays as HTML."""

    def __init__(self, html: str) -> None:
        self._html = html

    def _repr_html_(self) -> str:
        return self._html


def shade(sampled: SampleResponse | SampledSequence, tokenizer: Any) -> Shaded:
    """Return a value that a notebook displays as the text of a sample, decoded with the given tokenizer.

    Without `shade`, a notebook displays a sample as text if the process has loaded exactly one tokenizer,
    and names that one, because a sample does not know its model; else as token ids.

    >>> from tinker_sync import SampledSequence, get_tokenizer
    >>> from tinker_sync.local import tiny
    >>> tokenizer = get_tokenizer(str(tiny.directory()))
    >>> sequence = SampledSequence("length", None, tokenizer.encode("cat"), [-0.1, -3.0])
    >>> "cat" in "".join(pieces(sequence.tokens, tokenizer)), type(shade(sequence, tokenizer)).__name__
    (True, 'Shaded')
    """
    sequences: list[SampledSequence] | None = getattr(sampled, "sequences", None)
    given: list[Any] = [sampled] if sequences is None else list(sequences)
    return Shaded("".join(_shaded(one, tokenizer) for one in given))


def sequence_html(sequence: SampledSequence) -> str:
    """Return one sampled sequence as HTML."""
    return _shaded(sequence, _known_tokenizer(), guessed=True)


def response_html(response: SampleResponse) -> str:
    """Return the sequences of a response, at most 20, as HTML."""
    tokenizer = _known_tokenizer()
    parts = [_shaded(sequence, tokenizer, guessed=True) for sequence in response.sequences[:20]]
    more = len(response.sequences) - len(parts)
    return "".join(parts) + (page.note(f"and {more} more sequences") if more else "")


def pieces(tokens: Sequence[int], tokenizer: Any) -> list[str]:
    """Return the text that each token adds to the tokens before it; without a tokenizer, its id as text.

    >>> pieces([5, 6], None)
    ['5', '6']
    """
    if tokenizer is None:
        return [str(token) for token in tokens]
    found = []
    for at in range(len(tokens)):
        begin = max(0, at - _CONTEXT)
        before = tokenizer.decode(tokens[begin:at]) if at > begin else ""
        through = tokenizer.decode(tokens[begin : at + 1])
        # Several tokens may hold the bytes of one character; the last of these tokens gets the character.
        complete = not through.endswith("\ufffd")
        found.append(through[len(before.rstrip("\ufffd")) :] if complete else "")
    return found


def _known_tokenizer() -> Any:
    from tinker_sync.data.tokenizer import find_only_tokenizer

    return find_only_tokenizer()


def _shaded(sequence: SampledSequence, tokenizer: Any, *, guessed: bool = False) -> str:
    tokens, logprobs = sequence.tokens, sequence.logprobs
    if guessed and tokenizer is not None and max(tokens, default=0) >= len(tokenizer):
        tokenizer = None  # the sample is of a model with more tokens
    shown = tokens[:_MOST_TOKENS]
    gap = "" if tokenizer is not None else " "
    body = gap.join(
        _span(text, token, None if logprobs is None else logprobs[at])
        for at, (token, text) in enumerate(zip(shown, pieces(shown, tokenizer), strict=True))
    )
    ending = {"length": "stopped by max_tokens", "stop": "stopped by itself"}[sequence.stop_reason]
    words = [f"{len(tokens)} tokens", ending]
    if logprobs:
        words.append(f"mean log-probability {sum(logprobs) / len(logprobs):.3f}")
    if tokenizer is None:
        words.append("token ids; shade(sample, tokenizer) shows text")
    elif guessed:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        words.append(f"text of the tokenizer of {name}")
    if len(tokens) > len(shown):
        words.append(f"the first {len(shown)} are shown")
    return (
        '<div style="border-left:3px solid #3b82f6;padding:2px 10px;margin:4px 0">'
        '<div style="white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace">'
        f"{body}</div>{page.note(', '.join(words))}</div>"
    )


def _span(text: str, token: int, logprob: float | None) -> str:
    visible = escape(text).replace("\n", "↵\n")
    if logprob is None or logprob != logprob:
        return f'<span title="token {token}">{visible}</span>'
    # The square root keeps a token of probability one half visibly shaded, also on a dark page.
    shade_of_it = math.sqrt(min(1.0, max(0.0, -logprob / _DARKEST))) * 0.6
    chance = 2.718281828 ** min(logprob, 0.0)
    title = f"token {token}: log-probability {logprob:.3f}, probability {chance:.2%}"
    return f'<span title="{title}" style="background:rgba(239,68,68,{shade_of_it:.2f})">{visible}</span>'


# --------------------------------------------------------------------------------- lists and metrics


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


# ------------------------------------------------------------------------------- futures and clients


_COLOURS: Final = {
    "queued": "#9ca3af",
    "sending": "#3b82f6",
    "waiting": "#3b82f6",
    "paused": "#f59e0b",
    "done": "#22c55e",
}
_FAILED: Final = "#ef4444"
_WORDS: Final = {
    "queued": "queued here",
    "sending": "being sent",
    "waiting": "the server works on it",
    "paused": "paused by the server",
    "done": "done",
}


def metrics_html(metrics: Metrics) -> str:
    """Return the times of calls by phase as an HTML table, with the counters below it."""
    times = page.table(metrics.rows(), "milliseconds")
    return page.lines([times, *(page.note(line) for line in metrics.summary())])


def future_html(future: APIFuture[Any]) -> str:
    """Return the state of a call with the reason and the times, and the result if it has arrived, as HTML."""
    parts = [_state(future)]
    if future.done() and not future.cancelled() and APIFuture.exception(future) is None:
        parts.append(html_of(APIFuture.result(future)) or "")
    return page.lines(part for part in parts if part)


def client_html(client: Any) -> str:
    """Return a client, and the state of its creation until it is ready, as HTML."""
    return page.lines([f"<code>{escape(repr(client))}</code>", "" if _is_ready(client) else _state(client)])


def training_html(client: Any) -> str:
    """Return a training client with the curve of the losses of its passes, as HTML."""
    return client_html(client) + page.curve([loss for _, loss in client.curve], "loss")


def _is_ready(client: Any) -> bool:
    return bool(client.done()) and not client.cancelled() and APIFuture.exception(client) is None


def _state(future: APIFuture[Any]) -> str:
    status, timeline = future.status(), future.timeline
    failure = None
    if future.done() and not future.cancelled():
        failure = APIFuture.exception(future)
    bad = failure is not None or future.cancelled()
    colour = _FAILED if bad else _COLOURS[status.state.value]
    now = future._clock.now() if timeline.completed is None else timeline.completed
    times = [f"{page.seconds(now - timeline.queued)} {'so far' if timeline.completed is None else 'in all'}"]
    if timeline.sending is not None:
        times.append(f"{page.seconds(timeline.sending - timeline.queued)} in the queue")
    if timeline.accepted is not None:
        times.append(f"{page.seconds(now - timeline.accepted)} at the server")
    words = _WORDS[status.state.value] if not bad else status.reason or "failed"
    if status.reason and not bad:
        words += f": {status.reason}"
    if failure is not None:
        words = f"{words}: {failure}"
    ids = f" · request {future.request_ids[0]}" if future.request_ids else ""
    return f'<span style="color:{colour}">●</span> {escape(words)}{page.note(", ".join(times) + ids)}'


# By the class's name, because the class itself would need an import.
_DISPLAYS: Final[dict[str, Callable[[Any], str]]] = {
    "SampledSequence": sequence_html,
    "SampleResponse": response_html,
    "ForwardBackwardOutput": pass_html,
    "OptimStepResponse": step_html,
    "TrainingRunsResponse": list_html,
    "CheckpointsListResponse": list_html,
    "GetServerCapabilitiesResponse": list_html,
    "TrainingRun": entry_html,
    "Checkpoint": entry_html,
    "Usage": usage_html,
    "Metrics": metrics_html,
    "TrainingClient": training_html,
    "ClientFuture": client_html,
    "APIFuture": future_html,
}
