"""`tinker-sync model`."""

from __future__ import annotations

import click

from tinker_sync.cli.failures import CliError
from tinker_sync.cli.lazy import Cli, Group, command

_HERE = "tinker_sync.cli.commands.model:"
model = Group("model", "See the models you can use.", {"list": (f"{_HERE}list_models", "List the models.")})


@command("list", example="tinker-sync model list qwen")
@click.argument("substring", required=False)
def list_models(cli: Cli, substring: str | None) -> None:
    """List the models.

    SUBSTRING keeps those whose name contains it, in either case.
    """
    from tinker_sync.cli.table import Column, Table
    from tinker_sync.cli.words import MISSING, counted, yes_no

    with cli.service() as service:
        models = service.get_server_capabilities().supported_models
    wanted = [each for each in models if (substring or "").lower() in (each.model_name or "").lower()]
    if substring and not wanted:
        raise CliError(f"no model's name contains {substring!r}", "See tinker-sync model list.")
    rows = [
        (
            each.model_name or MISSING,
            MISSING if each.max_context_length is None else f"{each.max_context_length:,}",
            yes_no(each.trainable),
            yes_no(each.sampleable),
        )
        for each in wanted
    ]
    columns = (Column("Model"), Column("Context", right=True), Column("Train"), Column("Sample"))
    table = Table(columns, rows, counted(len(rows), "model"))
    cli.sink.show({"models": [each.model_dump() for each in wanted]}, table, items="models")
