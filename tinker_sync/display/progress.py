"""A future with its state, and a client with its curve. Nothing here waits for a result."""

from __future__ import annotations

from html import escape
from typing import Any, Final

from tinker_sync.display import page
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.progress import FutureState

_COLOURS: Final = {
    FutureState.QUEUED: "#9ca3af",
    FutureState.SENDING: "#3b82f6",
    FutureState.WAITING: "#3b82f6",
    FutureState.PAUSED: "#f59e0b",
    FutureState.DONE: "#22c55e",
}
_FAILED: Final = "#ef4444"
_WORDS: Final = {
    FutureState.QUEUED: "queued here",
    FutureState.SENDING: "being sent",
    FutureState.WAITING: "the server works on it",
    FutureState.PAUSED: "paused by the server",
    FutureState.DONE: "done",
}


def future_html(future: APIFuture[Any]) -> str:
    """Return the state of a call with the reason and the times, and the result if it has arrived, as HTML."""
    from tinker_sync.display import html_of

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
    colour = _FAILED if bad else _COLOURS[status.state]
    now = future._clock.now() if timeline.completed is None else timeline.completed
    times = [f"{page.seconds(now - timeline.queued)} {'so far' if timeline.completed is None else 'in all'}"]
    if timeline.sending is not None:
        times.append(f"{page.seconds(timeline.sending - timeline.queued)} in the queue")
    if timeline.accepted is not None:
        times.append(f"{page.seconds(now - timeline.accepted)} at the server")
    words = _WORDS[status.state] if not bad else status.reason or "failed"
    if status.reason and not bad:
        words += f": {status.reason}"
    if failure is not None:
        words = f"{words}: {failure}"
    ids = f" · request {future.request_ids[0]}" if future.request_ids else ""
    return f'<span style="color:{colour}">●</span> {escape(words)}{page.note(", ".join(times) + ids)}'
