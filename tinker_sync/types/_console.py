"""Addresses of pages in the web console, for a browser. The package sends no requests there."""

from __future__ import annotations

from urllib.parse import quote, urlencode

CONSOLE_URL = "https://tinker.thinkingmachines.ai"


def sessions_url() -> str:
    """Return the address of the page that lists the sessions."""
    return f"{CONSOLE_URL}/sessions"


def session_url(session_id: str) -> str:
    """Return the address of the page of a session."""
    return f"{CONSOLE_URL}/sessions/{session_id}"


def training_run_url(training_run_id: str) -> str:
    """Return the address of the page of a training run."""
    return f"{CONSOLE_URL}/training_runs/{training_run_id}"


def checkpoint_url(training_run_id: str, checkpoint_id: str) -> str:
    """Return the address of the page of a checkpoint.

    >>> checkpoint_url("run-1", "weights/final")
    'https://tinker.thinkingmachines.ai/checkpoints/run-1/weights%2Ffinal'
    """
    return f"{CONSOLE_URL}/checkpoints/{quote(training_run_id, safe='')}/{quote(checkpoint_id, safe='')}"


def playground_url(tinker_path: str) -> str:
    """Return the address of the playground, the page on which people try out a checkpoint.

    >>> playground_url("tinker://run-1/sampler_weights/a")
    'https://tinker.thinkingmachines.ai/playground?mode=checkpoint&checkpoint=tinker%3A%2F%2Frun-1%2Fsampler_weights%2Fa'
    """
    return f"{CONSOLE_URL}/playground?mode=checkpoint&checkpoint={quote(tinker_path, safe='')}"


def new_api_key_url(key_name: str) -> str:
    """Return the address of the dialog that creates an API key, with the name of the key filled in.

    >>> new_api_key_url("my laptop")
    'https://tinker.thinkingmachines.ai/keys?new_key=true&key_name=my+laptop'
    """
    return f"{CONSOLE_URL}/keys?{urlencode({'new_key': 'true', 'key_name': key_name})}"


def api_key_url(key_id: str) -> str:
    """Return the address of the page of an API key."""
    return f"{CONSOLE_URL}/keys/{quote(key_id, safe='')}"
