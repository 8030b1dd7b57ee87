"""Selection of the credential for each call.

A credential has three sources: a static key, a command that prints one, and the token exchange, a call that
returns a short-lived token for either. The servers of the vendor (the company of the hosted service) accept
keys of known kinds and state whether they want tokens. Other servers accept any key, or none. `KeyRing`
returns the credential as text when a call is sent; everywhere else the credential is a `Secret`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync._base.lazy import LazyModule
from tinker_sync._base.secret import Secret
from tinker_sync.config import Settings
from tinker_sync.errors import CredentialError

if TYPE_CHECKING:
    from tinker_sync.transport import tokens
    from tinker_sync.transport.credential_command import CredentialCommand
else:  # most clients send a static key and need no tokens
    tokens = LazyModule("tinker_sync.transport.tokens")

__all__ = ["KeyRing", "choose_source", "static_key"]

_KEY_PREFIX: Final = "tml-"
_JWT_PREFIX: Final = "eyJ"
# A token of this issuer identifies the user when it serves as the key.
_IDENTITY_ISSUER: Final = "passport-"

# The limit of kept secrets, since each is searched for in every logged text. The oldest can go: servers that
# echo a secret do so soon.
_MOST_KEPT: Final = 100

_MISSING: Final = (
    "there is no API key: pass api_key, set TINKER_API_KEY, or store one with `tinker-sync auth login`; "
    "base_url='local' runs a server on this machine, without a key"
)
_COMMAND_REQUIRED: Final = (
    "your organization requires dynamic credentials: set TINKER_CREDENTIAL_CMD to a command that prints one"
)
_COMMAND_USELESS: Final = (
    "this server takes a static API key only, so TINKER_CREDENTIAL_CMD does not help here: "
    "pass api_key or set TINKER_API_KEY"
)


def choose_source(settings: Settings, *, enforce_cmd: bool) -> Secret | CredentialCommand | None:
    """Return the long-lived credential, for the first call of a client and for the token exchange.

    Args:
        settings: the source of the key and the command.
        enforce_cmd: True if the server wants the output of the command; a key that is a token is accepted
            in its place.

    Returns:
        A key, a command that prints one, or None if the server is not the vendor's and neither is set.

    Raises:
        CredentialError: No suitable credential is set, or it is of no known kind; the text names the remedy.

    >>> choose_source(Settings.resolve(api_key="tml-example"), enforce_cmd=False)
    Secret('***')
    """
    key, command = settings.api_key, _command_of(settings)
    if key is not None and key.reveal().startswith(_JWT_PREFIX):
        return key
    if enforce_cmd:
        if command is None:
            raise CredentialError(_COMMAND_REQUIRED)
        return command
    if key is not None and (command is None or _has_known_prefix(settings, key)):
        return _checked(settings, key)
    if command is None and settings.is_vendor_host:
        raise CredentialError(_MISSING)
    return command


def static_key(settings: Settings) -> Secret | None:
    """Return the key for ordinary calls to a server that exchanges no tokens, or None if no key is set.

    Raises:
        CredentialError: No key is set but the vendor's server needs one, or the key is of no known kind.
    """
    if settings.api_key is not None:
        return _checked(settings, settings.api_key)
    if settings.is_vendor_host:
        raise CredentialError(_COMMAND_USELESS if settings.credential_cmd else _MISSING)
    return None


class KeyRing:
    """The credentials of one client. Thread-safe.

    A ring starts with the long-lived credential. `use_exchange` switches to tokens, for a server that wants
    them. A thread may call `step` after every `next_refresh_in_s` to renew tokens ahead of time.

    >>> ring = KeyRing(Settings.resolve(api_key="tml-example"))
    >>> ring.credential() == "tml-example", ring.for_exchange() == "tml-example"
    (True, True)
    """

    def __init__(self, settings: Settings, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._settings = settings
        self._clock = clock
        # Written by the thread that sets up the client. Calls that are sent before use the key.
        self._enforce_cmd = False
        self._tokens = _printed_tokens(settings, clock)
        self._static: str | None = None  # the settings' key, cached: settings do not change
        self._lock = threading.Lock()
        self._kept: dict[Secret, None] = {}  # guarded by _lock; in order of arrival

    def credential(self) -> str:
        """Return the credential for an ordinary call, or "" if none is set. The repr of the text is masked.

        Raises:
            CredentialError: The call needs a credential and none is usable.
            TinkerError: The token exchange failed before there was a token.
        """
        if self._tokens is not None:
            return self._tokens.get().reveal()
        if self._static is None:
            key = static_key(self._settings)
            self._static = key.reveal() if key else ""
        return self._static

    def renewed(self, rejected: Secret) -> Secret | None:
        """Return a credential that replaces a rejected one, or None for a static key, which stays the same.

        Threads whose credentials are rejected together share one exchange, or one run of the command.

        Raises:
            CredentialError: The exchange or the command failed.
        """
        return None if self._tokens is None else self._tokens.renewed(rejected)

    def for_exchange(self) -> str:
        """Return the long-lived credential, for the first call of a client and for the token exchange itself.

        This method runs the credential command if that is the source. It returns "" if there is no source.

        Raises:
            CredentialError: No suitable credential is set, or the command failed.
        """
        secret = self._long_lived()
        return secret.reveal() if secret else ""

    def use_exchange(self, fetch_token: Callable[[], tokens.Grant], *, enforce_cmd: bool = False) -> None:
        """Send tokens with ordinary calls from now on.

        Args:
            fetch_token: makes the exchange call with `for_exchange` and reads its answer with `read_grant`.
            enforce_cmd: True if the server exchanges the credential command's output, not a static key.
        """
        self._enforce_cmd = enforce_cmd
        self._tokens = tokens.TokenCache(fetch_token, self._clock)

    def check(self) -> None:
        """Raise `CredentialError` if the server needs a credential and no usable one is configured.

        This method runs no command.
        """
        choose_source(self._settings, enforce_cmd=self._enforce_cmd)

    def step(self) -> None:
        """Renew the token if it is due. This method logs a failure; a later call tries again."""
        if self._tokens is not None:
            self._tokens.step()

    def renew_after_fork(self) -> None:
        """Replace the locks, in a forked child."""
        self._lock = threading.Lock()
        if self._tokens is not None:
            self._tokens.renew_after_fork()

    def next_refresh_in_s(self) -> float | None:
        """Return the seconds until the next call of `step`, or None if there is no token to renew."""
        return None if self._tokens is None else self._tokens.next_step_in_s()

    def identity(self) -> Mapping[str, Any] | None:
        """Return the claims of the token, which name the user (`sub`, `org_id`, `email`).

        If the server wants no tokens and the key is itself a token of an identity service, return the claims
        of the key. None means that there are no claims. This method may fetch a token. It raises the errors
        of `credential`.
        """
        if self._tokens is not None:
            return tokens.claims_of(self._tokens.get()) or None
        claims = tokens.claims_of(self._settings.api_key) if self._settings.api_key else {}
        return claims if str(claims.get("iss", "")).startswith(_IDENTITY_ISSUER) else None

    @property
    def secrets(self) -> tuple[Secret, ...]:
        """Every value to mask in logs and errors: from the settings, the tokens and `keep`."""
        tokens = self._tokens.known if self._tokens else ()
        with self._lock:
            kept = tuple(self._kept)
        return (*self._settings.secrets, *tokens, *kept)

    def keep(self, secret: Secret) -> None:
        """Add a value to `secrets`, such as a token for another user's weights that a call carries.

        The ring forgets the oldest of more than 100 such values.

        >>> ring = KeyRing(Settings.resolve(base_url="http://localhost:1"))
        >>> ring.keep(Secret("of somebody else"))
        >>> ring.secrets
        (Secret('***'),)
        """
        with self._lock:
            self._kept.pop(secret, None)
            self._kept[secret] = None
            while len(self._kept) > _MOST_KEPT:
                del self._kept[next(iter(self._kept))]

    def _long_lived(self) -> Secret | None:
        source = choose_source(self._settings, enforce_cmd=self._enforce_cmd)
        if source is None or isinstance(source, Secret):
            return source
        printed = source.run()
        self.keep(printed)
        return printed


def _printed_tokens(settings: Settings, clock: Clock) -> tokens.TokenCache | None:
    """Return a cache of the command's output if that output is itself the credential, otherwise None.

    It is the credential if no key is set and the server is not the vendor's, because only the vendor's server
    exchanges it for tokens.
    """
    command = _command_of(settings)
    if command is None or settings.api_key is not None or settings.is_vendor_host:
        return None
    return tokens.TokenCache(lambda: tokens.Grant(command.run()), clock)


def _command_of(settings: Settings) -> CredentialCommand | None:
    command = settings.credential_cmd
    if not command:
        return None
    from tinker_sync.transport.credential_command import CredentialCommand

    return CredentialCommand(command, settings.credential_cmd_timeout_s)


def _has_known_prefix(settings: Settings, key: Secret) -> bool:
    return not settings.is_vendor_host or key.reveal().startswith((_KEY_PREFIX, _JWT_PREFIX))


def _checked(settings: Settings, key: Secret) -> Secret:
    if not _has_known_prefix(settings, key):
        name = {"environment": "TINKER_API_KEY", "stored": "the stored API key"}.get(
            settings.api_key_source or "", "api_key"
        )
        raise CredentialError(f"{name} must start with '{_KEY_PREFIX}'; is it complete, and of this service?")
    return key
