"""`python -m tinker_sync.local`: `serve` from the command line, without the extra `cli`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tinker_sync._base.secret import Secret
from tinker_sync._embedded import DEFAULT_DATA_DIR
from tinker_sync.errors import ConfigurationError, TinkerError
from tinker_sync.local.process.serving import LOOPBACK, serve

KEY_VARIABLE: Final = "TINKER_LOCAL_KEY"
_LEVELS: Final = ("debug", "info", "warning", "error")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a server until a signal ends it. Return 0, or 1 if the server cannot run; the problem is printed.

    Args:
        arguments: the command line; None: the command line of this process.

    An address that other machines can reach needs `--allow-remote`:

    >>> main(["--host", "0.0.0.0"])
    1
    """
    options = _make_parser().parse_args(arguments)
    logging.basicConfig(level=options.log.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s")
    key = None if options.key is None else Secret(options.key)
    options.key = None

    def ready(url: str, secret: Secret) -> None:
        _print(f"Serving on {url} - Ctrl-C ends it.")
        if options.show_key:
            sys.stdout.write(f"{secret.reveal()}\n")
            sys.stdout.flush()
        else:
            _print("Your programs on this machine find the key by the address; --show-key prints it.")

    try:
        serve(
            port=options.port,
            data_dir=options.data_dir,
            model=options.model,
            key=key or _read_key(options.key_file),
            json_only=options.json_only,
            host=options.host,
            allow_remote=options.allow_remote,
            ready=ready,
        )
    except TinkerError as problem:
        _print(f"Error: {problem}")
        return 1
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tinker_sync.local",
        description="Run an embedded server: it trains and samples on this machine.",
    )
    parser.add_argument("--port", type=int, default=0, help="the port to listen on; default: a free one")
    parser.add_argument(
        "--data-dir", default=DEFAULT_DATA_DIR, help="the directory for checkpoints (default: %(default)s)"
    )
    parser.add_argument("--model", help="a Hugging Face directory to offer beside the built-in model")
    parser.add_argument(
        "--key", help=f"the key for clients; other users can see it here: better set {KEY_VARIABLE}"
    )
    parser.add_argument("--key-file", help="a file with the key in its first line")
    parser.add_argument("--show-key", action="store_true", help="print the key, once, to standard output")
    parser.add_argument("--json-only", action="store_true", help="speak JSON only, as older servers do")
    parser.add_argument(
        "--log", choices=_LEVELS, default="warning", help="what to log (default: %(default)s)"
    )
    parser.add_argument("--host", default=LOOPBACK, help="the address to listen on (default: %(default)s)")
    parser.add_argument("--allow-remote", action="store_true", help="allow a --host that others can reach")
    return parser


def _read_key(path: str | None) -> Secret | None:
    """Return the key in a file; without a path, the key in `TINKER_LOCAL_KEY`, or None if that is not set.

    Raises:
        ConfigurationError: the file cannot be read or is empty.
    """
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


def _print(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
