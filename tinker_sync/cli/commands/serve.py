"""`tinker-sync serve`: a server on this machine, which `tinker_sync.local.running` runs until Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from tinker_sync.cli.framework import Cli, command
from tinker_sync.local.running import OPTIONS, serve_with


def _take_options(function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(OPTIONS):
        how: dict[str, Any] = {"type": option.kind, "metavar": option.name.rpartition("-")[2].upper()}
        if option.kind is bool:
            how = {"is_flag": True}
        elif isinstance(option.kind, tuple):
            how = {"type": click.Choice(option.kind)}
        function = click.option(f"--{option.name}", default=option.default, help=option.help, **how)(function)
    return function


@command("serve", example="tinker-sync serve --port 8000 --data-dir ./tinker-data")
@_take_options
def serve(cli: Cli, **options: Any) -> None:
    """Run a server on this machine until Ctrl-C. It trains and samples small models like the hosted service.

    Your programs on this machine need only the address of the server: they find its key. When the server is
    ready, the command prints the address, as JSON with --format json. With --show-key it also prints the key.
    """

    def ready(url: str, key: str | None) -> None:
        if cli.sink.for_people:
            cli.sink.say(f"Serving on {url}; Ctrl-C ends it.")
            cli.sink.raw(url)
            if key:
                cli.sink.raw(key)
        else:
            cli.sink.item({"base_url": url, **({"key": key} if key else {})})

    serve_with(options, ready)
