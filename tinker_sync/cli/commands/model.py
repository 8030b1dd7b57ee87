"""`tinker-sync model`: the models of a server."""

from __future__ import annotations

import click

from tinker_sync.cli.failures import CliError
from tinker_sync.cli.framework import Cli, Group, command

_HERE = "tinker_sync.cli.commands.model:"
model = Group("model", "See the models you can use.", {"list": (f"{_HERE}list_models", "List the models.")})


@command("list", example="tinker-sync model list qwen")
@click.argument("substring", required=False)
def list_models(cli: Cli, substring: str | None) -> None:
    """List the models.

    SUBSTRING selects the models whose name contains it, in upper or lower case.
    """
    from tinker_sync.cli.formatting import MISSING, format_count, format_flag
    from tinker_sync.cli.table import Column, Table

    with cli.service() as service:
        models = service.get_server_capabilities().supported_models
    wanted = [each for each in models if (substring or "").lower() in (each.model_name or "").lower()]
    if substring and not wanted:
        raise CliError(f"no model's name contains {substring!r}", "See tinker-sync model list.")
    rows = [
        (
            each.model_name or MISSING,
            MISSING if each.max_context_length is None else f"{each.max_context_length:,}",
            format_flag(each.trainable),
            format_flag(each.sampleable),
        )
        for each in wanted
    ]
    columns = (Column("Model"), Column("Context", right=True), Column("Train"), Column("Sample"))
    table = Table(columns, rows, format_count(len(rows), "model"))
    cli.sink.show({"models": [each.model_dump() for each in wanted]}, table, items="models")
