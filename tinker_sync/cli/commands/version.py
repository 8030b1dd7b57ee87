"""`tinker-sync version`: the version of the package and of the protocol."""

from __future__ import annotations

from tinker_sync.cli.framework import Cli, command


@command("version", example="tinker-sync version")
def version(cli: Cli) -> None:
    """Print the version.

    JSON also has the version of the protocol.
    """
    from tinker_sync._version import __version__

    if cli.sink.for_people:
        cli.sink.raw(f"tinker-sync {__version__}")
        return
    from tinker_sync.config.settings import SDK_VERSION

    cli.sink.item({"version": __version__, "protocol": SDK_VERSION})
