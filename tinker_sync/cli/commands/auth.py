"""`tinker-sync auth`: the keys in the credentials file, which the reference client shares."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final

from tinker_sync.cli.failures import CliError
from tinker_sync.cli.lazy import Cli, Group, command

if TYPE_CHECKING:
    from tinker_sync.auth import KeyDetails
    from tinker_sync.config.credentials_file import StoredKey

_HERE: Final = "tinker_sync.cli.commands.auth:"
auth = Group(
    "auth",
    "Log in, log out, and see who you are.",
    {
        "login": (f"{_HERE}login", "Store an API key."),
        "logout": (f"{_HERE}logout", "Forget the stored API key."),
        "status": (f"{_HERE}status", "Is there a key, and does the server take it?"),
        "whoami": (f"{_HERE}whoami", "Show the user and organization of the key in use."),
    },
)


@command("login", example="tinker-sync auth login")
def login(cli: Cli) -> None:
    """Store an API key.

    Make one at the address shown, then paste it; from a pipe it is read as a line. It is checked with the
    server and kept in ~/.tinker/credentials.json, readable by you alone.
    """
    from tinker_sync._secret import Secret
    from tinker_sync.auth import describe_key
    from tinker_sync.cli.secret_prompt import ask_for_key
    from tinker_sync.config.credentials_file import CredentialsFile, StoredKey
    from tinker_sync.types._console import new_api_key_url

    file = CredentialsFile()
    if file.default_key() is not None:
        raise CliError("you are logged in already", "Run tinker-sync auth logout first.")
    machine = socket.gethostname().partition(".")[0].strip() or "unknown"
    cli.sink.say(f"Make an API key here: {new_api_key_url(f'tinker-cli-{machine}')}\n")
    key = Secret(ask_for_key("Paste it: ").strip())
    if not key.reveal():
        raise CliError("the key is empty")
    known: KeyDetails = describe_key(key.reveal(), base_url=cli.base_url)
    stored = StoredKey(
        key=key, name=known.name, note=known.note, organization=known.organization, email=known.email
    )
    file.add(known.key_id, stored, make_default=True)
    cli.sink.say(
        f"Logged in as {known.email} ({known.organization}); the key {known.name!r} is used from now on."
    )


@command("logout", example="tinker-sync auth logout")
def logout(cli: Cli) -> None:
    """Forget the stored API key.

    A key you pasted stays valid: delete it at the address shown. One that an older command line made for
    itself is deleted on the server too.
    """
    from tinker_sync.config.credentials_file import CredentialsFile
    from tinker_sync.types._console import api_key_url

    file = CredentialsFile()
    key_id, stored = file.default_id(), file.default_key()
    if key_id is None or stored is None:
        raise CliError("no key is stored", "There is nothing to log out from.")
    where = f"Its organization: {stored.organization or 'unknown'}. Delete it here: {api_key_url(key_id)}"
    problem = _deleted_on_server(stored, cli.base_url) if stored.type == "generated" else None
    file.delete(key_id)
    if problem is not None:
        raise CliError(f"the key {stored.name!r} is forgotten here, but still valid: {problem}", where)
    if stored.type == "generated":
        cli.sink.say(f"The key {stored.name!r} is forgotten here and deleted on the server.")
    else:
        cli.sink.say(f"The key {stored.name!r} is forgotten here. It is still valid.\n{where}")


def _deleted_on_server(stored: StoredKey, base_url: str | None) -> Exception | None:
    from tinker_sync.auth import delete_key
    from tinker_sync.errors import TinkerError

    try:
        delete_key(stored.key.reveal(), base_url=base_url)
    except TinkerError as error:
        return error
    return None


@command("status", example="tinker-sync auth status")
def status(cli: Cli) -> None:
    """Is there a key, and does the server take it? Fails when not."""
    from tinker_sync.auth import raise_if_tinker_not_accessible, tinker_has_credentials

    has_key = tinker_has_credentials(base_url=cli.base_url)
    failure: Exception | None = None
    try:
        raise_if_tinker_not_accessible(base_url=cli.base_url)  # without a key it says why and asks nobody
    except Exception as error:  # noqa: BLE001  # said first, then raised
        failure = error
    if cli.sink.for_people:
        cli.sink.raw(f"Credentials available: {'yes' if has_key else 'no'}")
        if has_key:
            cli.sink.raw(f"Tinker accessible: {'no' if failure else 'yes'}")
    else:
        cli.sink.show_data({"credentials_available": has_key, "tinker_accessible": failure is None})
    if failure is not None:
        raise failure


@command("whoami", example="tinker-sync auth whoami")
def whoami(cli: Cli) -> None:
    """Show the user and organization of the key in use."""
    from tinker_sync.cli.table import record
    from tinker_sync.cli.words import MISSING

    with cli.rest() as rest:
        you = rest.whoami().result()
    pairs = [("E-mail", you.email or MISSING), ("User", you.user_urn), ("Organization", you.org_urn)]
    cli.sink.show(you.model_dump(), record("", pairs))
