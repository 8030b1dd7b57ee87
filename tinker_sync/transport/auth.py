"""Which credential goes with which call.

Three sources: a static key, a command that prints one, and the exchange of either for a short-lived token.
The vendor's servers take keys of known kinds and tell whether they want tokens; other servers take any key,
or none. `KeyRing` hands the text out at the moment of sending; everywhere else it is a `Secret`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync._lazy import LazyModule
from tinker_sync._secret import Secret
from tinker_sync.config import Settings
from tinker_sync.errors import CredentialError

if TYPE_CHECKING:
    from tinker_sync.transport import tokens
    from tinker_sync.transport.credential_command import CredentialCommand
else:  # most clients have a key, and use it
    tokens = LazyModule("tinker_sync.transport.tokens")

__all__ = ["KeyRing", "choose_source", "static_key"]

_KEY_PREFIX: Final = "tml-"
_JWT_PREFIX: Final = "eyJ"
# Tokens of this issuer, given as the key, tell who the user is.
_IDENTITY_ISSUER: Final = "passport-"

# Each is looked for in whatever is logged; servers that repeat something do so soon.
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
    """Find the long-lived credential: for the first call of a client, and for the token exchange.

    Args:
        settings: Where the key and the command are.
        enforce_cmd: The server wants what the command prints; only a key that is a token may stand in.

    Returns:
        A key, a command to run for one, or None where another server than the vendor's may go without.

    Raises:
        CredentialError: There is none, or it is of no known kind; the text says what to do.

    >>> choose_source(Settings.resolve(api_key="tml-example"), enforce_cmd=False)
    Secret('***')
    """
    key, command = settings.api_key, _command_of(settings)
    if key is not None and _is_jwt(key):
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
    """Find the credential for ordinary calls to a server that exchanges no tokens.

    Raises:
        CredentialError: The vendor's server needs one and there is none, or it is of no known kind.
    """
    if settings.api_key is not None:
        return _checked(settings, settings.api_key)
    if settings.is_vendor_host:
        raise CredentialError(_COMMAND_USELESS if settings.credential_cmd else _MISSING)
    return None


class KeyRing:
    """The credentials of one client. Thread-safe.

    It starts with the long-lived credential; once the server has said that it wants tokens, `use_exchange`
    changes over. A thread may call `step` after every `next_refresh_in_s`, to renew tokens ahead of time.

    >>> ring = KeyRing(Settings.resolve(api_key="tml-example"))
    >>> ring.credential() == "tml-example", ring.for_exchange() == "tml-example"
    (True, True)
    """

    def __init__(self, settings: Settings, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._settings = settings
        self._clock = clock
        # Both are written by the thread that sets the client up, before others come in.
        self._enforce_cmd = False
        self._tokens = _printed_tokens(settings, clock)
        self._static: str | None = None  # the settings' key, once it was looked at; they do not change
        self._lock = threading.Lock()
        self._kept: dict[Secret, None] = {}  # guarded by _lock; in the order in which they came

    def credential(self) -> str:
        """Give the credential for an ordinary call; empty where none is to be sent. Its repr is masked.

        Raises:
            CredentialError: There is none.
            TinkerError: The token exchange failed, and there is no token from before.
        """
        if self._tokens is not None:
            return self._tokens.get().reveal()
        if self._static is None:
            key = static_key(self._settings)
            self._static = key.reveal() if key else ""
        return self._static

    def renewed(self, rejected: Secret) -> Secret | None:
        """Give a credential in place of one that the server rejected; None where there is no other source.

        Threads whose credentials are rejected together share one exchange, or one run of the command.

        Raises:
            CredentialError: The exchange or the command failed.
        """
        return None if self._tokens is None else self._tokens.renewed(rejected)

    def for_exchange(self) -> str:
        """Give the long-lived credential, for the first call of a client and for the token exchange itself.

        Runs the credential command when that is the source. Empty where none is to be sent.
        """
        secret = self._long_lived()
        return secret.reveal() if secret else ""

    def use_exchange(self, fetch_token: Callable[[], tokens.Grant], *, enforce_cmd: bool = False) -> None:
        """From now on send tokens with ordinary calls.

        Args:
            fetch_token: Makes the exchange call with `for_exchange` and reads its answer with `read_grant`.
            enforce_cmd: The server wants the credential command's output exchanged, not a static key.
        """
        self._enforce_cmd = enforce_cmd
        self._tokens = tokens.TokenCache(fetch_token, self._clock)

    def check(self) -> None:
        """Raise `CredentialError` when there is no usable credential, without running anything."""
        choose_source(self._settings, enforce_cmd=self._enforce_cmd)

    def step(self) -> None:
        """Renew the token if it is time to. A failure is logged and tried again later."""
        if self._tokens is not None:
            self._tokens.step()

    def renew_after_fork(self) -> None:
        """Replace the locks, in a forked child."""
        self._lock = threading.Lock()
        if self._tokens is not None:
            self._tokens.renew_after_fork()

    def next_refresh_in_s(self) -> float | None:
        """When to call `step` next; None while there is nothing to renew."""
        return None if self._tokens is None else self._tokens.next_step_in_s()

    def identity(self) -> Mapping[str, Any] | None:
        """Read who the user is from the token: `sub`, `org_id`, `email`. None when no token tells.

        May fetch a token, and raises as `credential` does.
        """
        if self._tokens is not None:
            return tokens.claims_of(self._tokens.get()) or None
        claims = tokens.claims_of(self._settings.api_key) if self._settings.api_key else {}
        return claims if str(claims.get("iss", "")).startswith(_IDENTITY_ISSUER) else None

    @property
    def secrets(self) -> tuple[Secret, ...]:
        """Every value that must not show up in logs and errors: the settings', tokens, and what was kept."""
        tokens = self._tokens.known if self._tokens else ()
        with self._lock:
            kept = tuple(self._kept)
        return (*self._settings.secrets, *tokens, *kept)

    def keep(self, secret: Secret) -> None:
        """Add to `secrets` what calls bring along, such as a token for somebody else's weights.

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
    """At servers without our vendor's exchange, what the command prints is itself the credential."""
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


def _is_jwt(key: Secret) -> bool:
    return key.reveal().startswith(_JWT_PREFIX)


def _has_known_prefix(settings: Settings, key: Secret) -> bool:
    return not settings.is_vendor_host or key.reveal().startswith((_KEY_PREFIX, _JWT_PREFIX))


def _checked(settings: Settings, key: Secret) -> Secret:
    if not _has_known_prefix(settings, key):
        name = {"environment": "TINKER_API_KEY", "stored": "the stored API key"}.get(
            settings.api_key_source or "", "api_key"
        )
        raise CredentialError(f"{name} must start with '{_KEY_PREFIX}'; is it complete, and of this service?")
    return key
