"""Checks of the configured credential before a program begins, and calls that show or delete one API key.

The functions have no state; any thread may call them. `get_tinker_token` and `tinker_has_credentials` neither
open a connection nor run a command.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from attrs import evolve, frozen

from tinker_sync._base.secret import Secret, mask_text
from tinker_sync.config import CredentialsFile, Settings, StoredKey
from tinker_sync.errors import (
    APIResponseValidationError,
    AuthenticationError,
    PermissionDeniedError,
    TinkerError,
)
from tinker_sync.runtime.calls import make_call
from tinker_sync.runtime.client import Connection
from tinker_sync.runtime.handshake import Handshake
from tinker_sync.transport.auth import choose_source, static_key
from tinker_sync.transport.call import Reply
from tinker_sync.wire.endpoints import ENDPOINTS

__all__ = [
    "Access",
    "CredentialsFile",
    "KeyDetails",
    "StoredKey",
    "delete_key",
    "describe_key",
    "describe_key_source",
    "find_access",
    "get_tinker_token",
    "raise_if_tinker_not_accessible",
    "tinker_has_credentials",
]


def get_tinker_token() -> str | None:
    """Return the key from the environment, else the default key of the credentials file, else None.

    If `TINKER_BASE_URL` names an embedded server, return the key of that server. This function never runs the
    credential command. It returns None for a key of a form that the service does not accept, and if the
    configuration cannot be read.

    >>> get_tinker_token() is None
    True
    """
    try:
        settings = Settings.resolve()
        if settings.api_key is None:
            stored = CredentialsFile().default_key()  # also when a command takes precedence
            settings = evolve(settings, api_key=stored.key if stored else None, api_key_source="stored")
        key = static_key(settings)
    except TinkerError:
        return None
    return str(key.reveal()) if key else None


def tinker_has_credentials(*, base_url: str | None = None) -> bool:
    """Return True if a credential is configured: a key in the environment, a stored key, or a command.

    This function does not run the command. At the hosted service, a key of an unknown kind does not count.

    Args:
        base_url: the server that takes the credential; None means `TINKER_BASE_URL` or, if that is not set,
            the hosted service.

    >>> tinker_has_credentials()
    False
    """
    try:
        return choose_source(Settings.resolve(base_url=base_url), enforce_cmd=False) is not None
    except TinkerError:
        return False


def raise_if_tinker_not_accessible(*, base_url: str | None = None) -> None:
    """Raise an error if the configured credential does not give access to the service.

    This function exchanges the key for a token if the server wants one. It then requests the server's
    capabilities, which needs an account in good order. It makes no retries.

    Args:
        base_url: the server; None means `TINKER_BASE_URL` or, if that is not set, the hosted service.

    Raises:
        CredentialError: No usable credential is configured, or the credential command failed.
        AuthenticationError: The service does not accept the credential.
        BillingError: The account is not set up.
        APIConnectionError: The service cannot be reached.
        TinkerError: Anything else.

    >>> raise_if_tinker_not_accessible()
    Traceback (most recent call last):
    tinker_sync.errors.CredentialError: there is no API key: pass api_key, set TINKER_API_KEY, or ...
    """
    try:
        _ask(Settings.resolve(base_url=base_url, max_retries=0))
    except TinkerError:
        raise
    except Exception as error:
        raise TinkerError(mask_text(f"{type(error).__name__}: {error}")) from error


@frozen
class Access:
    """The server that a client would use, and what it wants for access. Nothing was sent to find out.

    >>> find_access(base_url="http://gpu-17:8000")
    Access(base_url='http://gpu-17:8000', is_hosted=False, has_own_key=False, api_key=None)
    """

    base_url: str
    is_hosted: bool
    """True for the hosted service, whose console makes and deletes keys."""
    has_own_key: bool
    """True for a server on this machine whose key programs find without a login."""
    api_key: Secret | None
    """The key, unless a command gives it."""


def find_access(*, base_url: str | None = None, api_key: str | None = None) -> Access:
    """Return the server that a client with these arguments would use, and the key.

    Raises:
        ConfigurationError: an address or a variable cannot be used.

    >>> find_access().is_hosted
    True
    """
    settings = Settings.resolve(base_url=base_url, api_key=api_key)
    has_own_key = settings.api_key_source == "local"
    return Access(settings.base_url, settings.is_vendor_host, has_own_key, settings.api_key)


def describe_key_source(*, base_url: str | None = None) -> str | None:
    """Return where the key that a client would use comes from, such as "from TINKER_API_KEY"; None without.

    Raises:
        TinkerError: there is no usable key, or a setting cannot be used.

    >>> describe_key_source(base_url="http://gpu-17:8000") is None
    True
    """
    settings = Settings.resolve(base_url=base_url)
    source = choose_source(settings, enforce_cmd=False)
    if source is None:
        return None
    if source is settings.credential_cmd or settings.api_key is None:
        return "from TINKER_CREDENTIAL_CMD"
    if settings.api_key_source == "stored":
        stored = CredentialsFile().default_key()
        return f"from the credentials file{f', {stored.name!r}' if stored and stored.name else ''}"
    origins = {
        "argument": "given",
        "environment": "from TINKER_API_KEY",
        "local": "of the server on this machine",
    }
    return origins[settings.api_key_source or "argument"]


@frozen
class KeyDetails:
    """The service's record of an API key, without the key itself.

    >>> KeyDetails("17", "laptop", "", "ada@example.com", "Analytical Engines").name
    'laptop'
    """

    key_id: str
    name: str
    note: str
    email: str
    organization: str


def describe_key(api_key: str, *, base_url: str | None = None) -> KeyDetails:
    """Return the service's record of a key. The service accepts the key if this function returns.

    Args:
        api_key: the key; it need not be configured anywhere.
        base_url: the server; None means `TINKER_BASE_URL` or, if that is not set, the hosted service.

    Raises:
        AuthenticationError: the service does not accept the key.
        TinkerError: anything else.
    """
    reply = _about_key("get_api_key", Secret(api_key), base_url)
    try:
        tree = json.loads(reply.body)
        return KeyDetails(
            str(tree["key_id"]),
            str(tree["name"]),
            str(tree.get("note") or ""),
            str(tree["details"]["user_details"]["email"]),
            str(tree["details"]["org_details"]["name"]),
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        message = "the answer does not describe a key"
    row = ENDPOINTS["get_api_key"]
    raise APIResponseValidationError(
        message, status_code=reply.status, method=row.method, path=row.path_for()
    )


def delete_key(api_key: str, *, base_url: str | None = None) -> None:
    """Delete a key in the service, permanently and for all its users.

    The arguments and the errors are those of `describe_key`.
    """
    _about_key("revoke_api_key", Secret(api_key), base_url)


def _about_key(name: str, api_key: Secret, base_url: str | None) -> Reply:
    settings = Settings.resolve(base_url=base_url, api_key=api_key, max_retries=0)
    with _connected(settings) as connection:
        return connection.caller.call(make_call(name, settings))


def _ask(settings: Settings) -> None:
    with _connected(settings) as connection:
        Handshake(connection).sign_in()
        connection.caller.call(make_call("get_server_capabilities", settings))
        if not settings.is_vendor_host:
            _refuse_wrong_key(connection)


def _refuse_wrong_key(connection: Connection) -> None:
    """Raise an error if an open server (one that is not of the hosted service) does not accept the key.

    Some open servers answer the request for their capabilities without a key, so this function makes a call
    that needs a key. A server that fails in another way raises no error.

    Raises:
        AuthenticationError, PermissionDeniedError: the server does not accept the key.
    """
    try:
        connection.caller.call(make_call("list_training_runs", connection.settings, query={"limit": 1}))
    except (AuthenticationError, PermissionDeniedError):
        raise
    except TinkerError:  # the server has no such list, or cannot return it now
        return


@contextmanager
def _connected(settings: Settings) -> Iterator[Connection]:
    connection = Connection(settings)
    connection.keys.check()
    try:
        yield connection
    finally:
        connection.http.close()
