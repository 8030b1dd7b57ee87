"""`tinker-sync auth`: store, remove and check the API key, in a file that the reference client uses too."""

from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING, Final

import click

from tinker_sync.cli.failures import CliError
from tinker_sync.cli.framework import Cli, Group, command

if TYPE_CHECKING:
    from tinker_sync.auth import KeyDetails, StoredKey

_HERE: Final = "tinker_sync.cli.commands.auth:"
auth = Group(
    "auth",
    "Log in, log out, and see who you are.",
    {
        "login": (f"{_HERE}login", "Store an API key."),
        "logout": (f"{_HERE}logout", "Forget the stored API key."),
        "status": (f"{_HERE}status", "Check that there is a key and that the server accepts it."),
        "whoami": (f"{_HERE}whoami", "Show the user and organization of the key in use."),
    },
)


@command("login", example="tinker-sync auth login")
def login(cli: Cli) -> None:
    """Store an API key.

    For the hosted service, the command shows the address at which to make a key. Paste the key, or send it as
    one line through a pipe. The server checks the key; then it is stored in ~/.tinker/credentials.json, which
    only you can read. A server of your own on this machine needs no login.
    """
    from tinker_sync._base.secret import Secret
    from tinker_sync.auth import CredentialsFile, StoredKey, describe_key, find_access
    from tinker_sync.types._console import new_api_key_url

    file = CredentialsFile()
    if file.default_key() is not None:
        raise CliError("you are logged in already", "Run tinker-sync auth logout first.")
    access = find_access(base_url=cli.base_url)
    if access.has_own_key:
        raise CliError(
            f"the server at {access.base_url} needs no login", "Programs on this machine find its key."
        )
    machine = socket.gethostname().partition(".")[0].strip() or "unknown"
    if access.is_hosted:
        cli.sink.say(f"Make an API key here: {new_api_key_url(f'tinker-cli-{machine}')}\n")
    else:
        cli.sink.say(f"Ask the operator of {access.base_url} for an API key.\n")
    key = Secret(_ask_for_key().strip())
    if not key.reveal():
        raise CliError("the key is empty")
    known: KeyDetails = describe_key(key.reveal(), base_url=cli.base_url)
    stored = StoredKey(
        key=key, name=known.name, note=known.note, organization=known.organization, email=known.email
    )
    file.add(known.key_id, stored, make_default=True)
    cli.sink.say(f"Logged in as {known.email} ({known.organization}); the key {known.name!r} is now in use.")


@command("logout", example="tinker-sync auth logout")
def logout(cli: Cli) -> None:
    """Forget the stored API key.

    A key that you pasted stays valid; for the hosted service, the command shows the address at which to
    delete the key. A key that an older version of the command line created is also deleted on the server.
    """
    from tinker_sync.auth import CredentialsFile, find_access
    from tinker_sync.types._console import api_key_url

    file = CredentialsFile()
    key_id, stored = file.default_id(), file.default_key()
    if key_id is None or stored is None:
        raise CliError("no key is stored", "There is nothing to log out from.")
    where = f"Its organization: {stored.organization or 'unknown'}."
    if find_access(base_url=cli.base_url).is_hosted:
        where += f" Delete it here: {api_key_url(key_id)}"
    problem = _delete_on_server(stored, cli.base_url) if stored.type == "generated" else None
    file.delete(key_id)
    if problem is not None:
        raise CliError(f"the key {stored.name!r} is forgotten here, but still valid: {problem}", where)
    if stored.type == "generated":
        cli.sink.say(f"The key {stored.name!r} is forgotten here and deleted on the server.")
    else:
        cli.sink.say(f"The key {stored.name!r} is forgotten here. It is still valid.\n{where}")


def _delete_on_server(stored: StoredKey, base_url: str | None) -> Exception | None:
    from tinker_sync.auth import delete_key
    from tinker_sync.errors import TinkerError

    try:
        delete_key(stored.key.reveal(), base_url=base_url)
    except TinkerError as error:
        return error
    return None


@command("status", example="tinker-sync auth status")
def status(cli: Cli) -> None:
    """Check that there is a key and that the server accepts it; fail if not.

    It also names the server, and where the key comes from.
    """
    from tinker_sync.auth import (
        describe_key_source,
        find_access,
        raise_if_tinker_not_accessible,
        tinker_has_credentials,
    )
    from tinker_sync.errors import TinkerError

    server: str | None = None
    source: str | None = None
    try:
        server = find_access(base_url=cli.base_url).base_url
        source = describe_key_source(base_url=cli.base_url)
    except TinkerError:
        pass  # the check below raises it too
    has_key = tinker_has_credentials(base_url=cli.base_url)
    failure: Exception | None = None
    try:
        raise_if_tinker_not_accessible(base_url=cli.base_url)  # without a key this raises without a request
    except Exception as error:  # noqa: BLE001  # raised after the report
        failure = error
    if cli.sink.for_people:
        cli.sink.raw(f"Credentials available: {'yes' if has_key else 'no'}")
        if has_key:
            cli.sink.raw(f"Tinker accessible: {'no' if failure else 'yes'}")
        for label, about in (("Server", server), ("Key", source)):
            if about is not None:
                cli.sink.raw(f"{label}: {about}")
    else:
        about_key = {"credentials_available": has_key, "tinker_accessible": failure is None}
        cli.sink.show_data({**about_key, "base_url": server, "key_source": source})
    if failure is not None:
        raise failure


@command("whoami", example="tinker-sync auth whoami")
def whoami(cli: Cli) -> None:
    """Show the user and organization of the key in use."""
    from tinker_sync.cli.formatting import MISSING
    from tinker_sync.cli.table import record

    with cli.rest() as rest:
        you = rest.whoami().result()
    pairs = [("E-mail", you.email or MISSING), ("User", you.user_urn), ("Organization", you.org_urn)]
    cli.sink.show(you.model_dump(), record("", pairs))


def _ask_for_key() -> str:
    """Read a key from the terminal, which does not show it, or a line from a pipe."""
    if not sys.stdin.isatty():
        return sys.stdin.readline()
    key: str = click.prompt(
        "Paste it (it is not shown)", default="", hide_input=True, show_default=False, err=True
    )
    return key
