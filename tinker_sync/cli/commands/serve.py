"""`tinker-sync serve`: a server on this machine, which `tinker_sync.local.serve` runs until Ctrl-C."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from tinker_sync.cli.failures import CliError
from tinker_sync.cli.framework import Cli, command

if TYPE_CHECKING:
    from tinker_sync._base.secret import Secret

KEY_VARIABLE = "TINKER_LOCAL_KEY"


@command("serve", example="tinker-sync serve --port 8000 --data-dir ./tinker-data")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="The port to listen on; 0: a free one."
)
@click.option("--data-dir", metavar="DIR", help="The directory for checkpoints; default: ~/.tinker/local.")
@click.option("--model", metavar="DIR", help="A Hugging Face directory to offer beside the built-in model.")
@click.option(
    "--key", metavar="KEY", help=f"The key for clients; others can see it here: better set {KEY_VARIABLE}."
)
@click.option("--show-key", is_flag=True, help="Print the key.")
@click.option("--json-only", is_flag=True, help="Speak JSON only, as older servers do.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--allow-remote", is_flag=True, help="Allow a --host that other machines reach.")
@click.option(
    "--log", type=click.Choice(["debug", "info", "warning", "error"]), default="warning", show_default=True
)
def serve(
    cli: Cli, port: int, data_dir: str | None, model: str | None, key: str | None, show_key: bool,
    json_only: bool, host: str, allow_remote: bool, log: str,
) -> None:  # fmt: skip
    """Run a server on this machine until Ctrl-C. It trains and samples small models like the hosted service.

    Your programs on this machine need only the address of the server: they find its key. When the server is
    ready, the command prints the address, as JSON with --format json. With --show-key it also prints the key.
    """
    import logging

    from tinker_sync._base.secret import Secret
    from tinker_sync.local import serve as run

    secret = Secret(key or os.environ.get(KEY_VARIABLE, "").strip())
    key = None
    logging.basicConfig(level=log.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s")

    def ready(url: str, used: Secret) -> None:
        shown = used.reveal() if show_key else None
        if cli.sink.for_people:
            cli.sink.say(f"Serving on {url}; Ctrl-C ends it.")
            cli.sink.raw(url)
            if shown:
                cli.sink.raw(shown)
        else:
            cli.sink.item({"base_url": url, **({"key": shown} if shown else {})})

    try:
        run(
            port=port,
            data_dir=data_dir,
            model=model,
            key=secret if secret.reveal() else None,
            json_only=json_only,
            host=host,
            allow_remote=allow_remote,
            ready=ready,
        )
    except OSError as error:
        raise CliError(f"cannot serve on {host}:{port}: {error.strerror or error}") from error
