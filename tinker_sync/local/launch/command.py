"""`python -m tinker_sync.local`: a server from the command line."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tinker_sync._secret import Secret
from tinker_sync.errors import ConfigurationError, TinkerError
from tinker_sync.local.launch.serving import DEFAULT_DATA_DIR, LOOPBACK, serve

KEY_VARIABLE: Final = "TINKER_LOCAL_KEY"
_LEVELS: Final = ("debug", "info", "warning", "error")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code.

    Args:
        arguments: instead of those of this process.
    """
    asked = _parser().parse_args(arguments)
    logging.basicConfig(level=asked.log.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s")
    key = None if asked.key is None else Secret(asked.key)
    asked.key = None

    def ready(url: str, secret: Secret) -> None:
        _say(f"Serving on {url} - Ctrl-C ends it.")
        if asked.show_key:
            sys.stdout.write(f"{secret.reveal()}\n")
            sys.stdout.flush()
        else:
            _say("Your own programs on this machine find the key by themselves; --show-key prints it.")

    try:
        serve(
            port=asked.port,
            data_dir=asked.data_dir,
            model=asked.model,
            key=key or _key_from(asked.key_file),
            json_only=asked.json_only,
            host=asked.host,
            allow_remote=asked.allow_remote,
            ready=ready,
        )
    except TinkerError as problem:
        _say(f"Error: {problem}")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tinker_sync.local",
        description="Run an embedded server: it trains and samples on this machine.",
    )
    parser.add_argument("--port", type=int, default=0, help="where to listen; 0, the default, is a free port")
    parser.add_argument(
        "--data-dir", default=DEFAULT_DATA_DIR, help="where checkpoints are kept (default: %(default)s)"
    )
    parser.add_argument("--model", help="a Hugging Face directory to offer beside the built-in model")
    parser.add_argument(
        "--key", help=f"what clients have to send; other users can see it here: better set {KEY_VARIABLE}"
    )
    parser.add_argument("--key-file", help="a file with the key in its first line")
    parser.add_argument("--show-key", action="store_true", help="print the key, once, to standard output")
    parser.add_argument(
        "--json-only", action="store_true", help="be like older servers, which speak JSON alone"
    )
    parser.add_argument(
        "--log", choices=_LEVELS, default="warning", help="what to log (default: %(default)s)"
    )
    parser.add_argument("--host", default=LOOPBACK, help="the address to listen on (default: %(default)s)")
    parser.add_argument("--allow-remote", action="store_true", help="let --host be one that others can reach")
    return parser


def _key_from(path: str | None) -> Secret | None:
    """The key from a file, else from the environment, else none."""
    if path is None:
        text = os.environ.get(KEY_VARIABLE, "").strip()
        return Secret(text) if text else None
    try:
        lines = Path(path).read_text(encoding="utf-8").split()
    except (OSError, ValueError) as problem:
        raise ConfigurationError(f"{path} cannot be read: {problem}") from problem
    if not lines:
        raise ConfigurationError(f"{path} is empty")
    return Secret(lines[0])


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
