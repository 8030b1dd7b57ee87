"""All settings of a client in one frozen object.

`Settings.resolve` looks at arguments, then at environment variables, then at the credentials file, once.
Nothing else in the package reads the environment. Functions in here wrap a key before they do anything that
can fail, because tracebacks may show local variables.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal, cast
from urllib.parse import unquote, urlsplit

from attrs import Attribute, evolve, field, fields, frozen
from attrs.validators import optional

from tinker_sync import launch
from tinker_sync._secret import MASK, HeaderMap, Secret, is_secret_header, mask_text
from tinker_sync.config.address import DEFAULT_BASE_URL, checked_base_url, is_vendor_url
from tinker_sync.config.credentials_file import CredentialsFile
from tinker_sync.config.logs import LOG_LEVELS, LogLevel, show_logs
from tinker_sync.config.timeout import Timeout
from tinker_sync.errors import ConfigurationError

if TYPE_CHECKING:
    import requests

    from tinker_sync.launch.server import EmbeddedServer

KeySource = Literal["argument", "environment", "stored", "local"]


class Unchosen(int):
    """A number that stands where nobody has given one; in every other respect it is that number.

    >>> Unchosen(10), Unchosen(10) == 10
    (10, True)
    """


# The protocol level this package implements; hosted servers hand out features by it.
SDK_VERSION: Final = "0.38.0"
# Results of one chunk stay far below; it only keeps a broken or hostile server from filling the memory.
MAX_BODY_BYTES: Final = 1 << 30
MAX_RETRIES: Final = Unchosen(10)
COMMAND_TIME_LIMIT_S: Final = 30.0

_TRUE_WORDS: Final = frozenset({"1", "true", "yes", "on"})
_NOT_IN_PICKLES: Final = frozenset(
    {"api_key", "api_key_source", "credential_cmd", "cf_access_id", "cf_access_secret", "session", "local"}
)
_DIALECTS: Final = ("auto", "proto", "json")


class _Environment:
    """The environment variables, in a form whose repr does not list them."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, str] | None) -> None:
        self._values = os.environ if values is None else values

    def text(self, name: str) -> str | None:
        """Give a variable; set but empty counts as unset."""
        return self._values.get(name) or None

    def raw(self, name: str) -> str | None:
        return self._values.get(name)

    def secret(self, name: str) -> Secret | None:
        return hidden(self._values.get(name))


def hidden(value: str | Secret | None) -> Secret | None:
    """Wrap a key or the like, freed of surrounding blanks; None when nothing is left."""
    text = value.reveal() if isinstance(value, Secret) else value
    return Secret(text.strip()) if text and text.strip() else None


def _check_base_url(_: object, attribute: Attribute[str], value: str) -> None:
    if checked_base_url(Secret(value), attribute.name) != value:
        raise ConfigurationError(f"{attribute.name} {value!r} ends with a slash")


def _whole_from(lowest: int) -> Callable[[object, Attribute[Any], Any], None]:
    def check(_: object, attribute: Attribute[Any], value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            raise ConfigurationError(f"{attribute.name} must be a whole number from {lowest}, not {value!r}")

    return check


def _check_seconds(_: object, attribute: Attribute[Any], value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not value > 0:
        raise ConfigurationError(f"{attribute.name} must be a positive number of seconds, not {value!r}")


def _check_pace(_: object, attribute: Attribute[Any], value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ConfigurationError(f"{attribute.name} must be a positive factor, not {value!r}")


def _check_dialect(_: object, attribute: Attribute[Any], value: Any) -> None:
    if value is None or (isinstance(value, str) and value not in _DIALECTS):
        raise ConfigurationError(
            f"{attribute.name} is one of {', '.join(_DIALECTS)} or a Dialect, not {value!r}"
        )


def _names_only(headers: HeaderMap) -> str:
    return repr(dict.fromkeys(headers, MASK))


@frozen(kw_only=True)
class Settings:
    """What a client was told by arguments, environment or credentials file. Immutable; any thread may read.

    Neither repr nor pickle show a secret. A pickle carries none: the process that loads it takes keys from
    its own environment and credentials file. It carries no `session` either, for those may hold passwords.

    >>> settings = Settings.resolve(base_url="http://localhost:8000/", api_key="tml-example")
    >>> settings.base_url, settings.api_key, settings.is_vendor_host
    ('http://localhost:8000', Secret('***'), False)
    """

    base_url: str = field(default=DEFAULT_BASE_URL, validator=_check_base_url)
    api_key: Secret | None = None
    api_key_source: KeySource | None = None
    credential_cmd: Secret | None = None
    credential_cmd_timeout_s: float = field(default=COMMAND_TIME_LIMIT_S, validator=_check_seconds)
    project_id: str | None = None
    tags: tuple[str, ...] = ()
    telemetry: bool = True
    log: LogLevel | None = None
    cf_access_id: Secret | None = None
    cf_access_secret: Secret | None = None
    default_headers: HeaderMap = field(factory=HeaderMap, repr=_names_only)
    session: requests.Session | None = field(default=None, repr=lambda session: type(session).__name__)
    timeout: Timeout = field(factory=Timeout)
    max_retries: int = field(default=MAX_RETRIES, validator=_whole_from(0))
    max_body_bytes: int = field(default=MAX_BODY_BYTES, validator=_whole_from(1))
    sdk_version: str = SDK_VERSION
    dialect: object = field(default="auto", validator=_check_dialect)
    deadline_s: float | None = field(default=None, validator=optional(_check_seconds))
    pace: float = field(default=1.0, validator=_check_pace)
    local: EmbeddedServer | None = field(default=None, eq=False, repr=False)
    """The embedded server of this process, if that is the one; it starts when it is first needed."""

    @property
    def is_vendor_host(self) -> bool:
        """Whether the vendor's rules hold: keys of the known kinds only, and never none."""
        return is_vendor_url(self.base_url)

    @property
    def log_curl(self) -> bool:
        """Whether each request is logged as a curl line."""
        return self.log == "curl"

    @property
    def secrets(self) -> tuple[Secret, ...]:
        """All values that must not show up in logs and errors, as far as the settings know them."""
        own = (self.api_key, self.credential_cmd, self.cf_access_id, self.cf_access_secret)
        named = [Secret(value) for name, value in self.default_headers.items() if is_secret_header(name)]
        return (*(secret for secret in own if secret), *named, *_session_secrets(self.session))

    @classmethod
    def resolve(
        cls,
        *,
        base_url: str | None = None,
        api_key: str | Secret | None = None,
        credential_cmd: str | Secret | None = None,
        credential_cmd_timeout_s: float = COMMAND_TIME_LIMIT_S,
        project_id: str | None = None,
        tags: Iterable[str] | None = None,
        telemetry: bool | None = None,
        log: LogLevel | None = None,
        cf_access_id: str | Secret | None = None,
        cf_access_secret: str | Secret | None = None,
        default_headers: Mapping[str, str] | None = None,
        session: requests.Session | None = None,
        timeout: Timeout | float | tuple[float, float] | None = None,
        max_retries: int = MAX_RETRIES,
        max_body_bytes: int = MAX_BODY_BYTES,
        sdk_version: str | None = None,
        dialect: object = "auto",
        deadline_s: float | None = None,
        pace: float | None = None,
        environ: Mapping[str, str] | None = None,
        credentials_file: CredentialsFile | None = None,
    ) -> Settings:
        """Find every setting: the argument, else the environment variable, else the default.

        An empty text counts as not given. The first call also sets up what `TINKER_LOG` asks for.

        Args:
            base_url: `TINKER_BASE_URL`. Where the server is; it may have a path. "local" is an embedded one,
                with state in the directory `TINKER_LOCAL_DATA_DIR`, else only as long as it runs, and with
                the Hugging Face directory `TINKER_LOCAL_MODEL` beside the built-in model.
            api_key: `TINKER_API_KEY`, else the default key of the credentials file unless a command is set.
                An embedded server has a key of its own.
            credential_cmd: `TINKER_CREDENTIAL_CMD`. A shell command that prints the credential.
            credential_cmd_timeout_s: How long the command may take.
            project_id: `TINKER_PROJECT_ID`. The project that new sessions belong to.
            tags: `TINKER_TAGS`, separated by commas. Empty ones and repetitions are dropped, the order stays.
            telemetry: Tell the server of failures, never of content. None: the vendor's servers are told
                unless `TINKER_TELEMETRY` is something else than 1, true, yes or on; others are not.
            log: `TINKER_LOG`: info, debug, or curl (debug, with each request as a curl line).
            cf_access_id, cf_access_secret: `CLOUDFLARE_ACCESS_CLIENT_ID` and `_SECRET`.
            default_headers: Sent with every request; they win over our own.
            session: Headers, proxies, certificates, user name and password, and cookies are taken from it.
            timeout: Seconds to wait for an answer, a pair (connect, read), or a `Timeout`.
            max_retries: How often a failed request is repeated. What a script cannot do without is repeated
                for at least five minutes, unless a number is given.
            max_body_bytes: A larger answer is an error.
            sdk_version: The protocol level to declare.
            dialect: What the server speaks: auto, proto, json or a `Dialect`.
            deadline_s: Limit for one call with all its repetitions; None for none.
            pace: `TINKER_PACE`, else 1. Pauses before another try are multiplied by it; tests of programs
                that meet failures use a hundredth.
            environ: Variables to read instead of `os.environ`.
            credentials_file: File to read instead of `~/.tinker/credentials.json`.

        Raises:
            ConfigurationError: One of them cannot be used; the text names it and says why.
        """
        # Secrets first: from here on no local variable shows one, whatever is raised below.
        api_key, credential_cmd = hidden(api_key), hidden(credential_cmd)
        cf_access_id, cf_access_secret = hidden(cf_access_id), hidden(cf_access_secret)
        address, base_url = hidden(base_url), None  # it may hold a password by mistake
        env, environ = _Environment(environ), None
        default_headers, header_problem = _header_map(default_headers)
        if header_problem:
            raise ConfigurationError(header_problem)
        level = _log_level(log, env)
        show_logs(level)
        command = credential_cmd or env.secret("TINKER_CREDENTIAL_CMD")
        server, local = _server(address, env)
        key, source = _local_key(server, local, api_key)
        if key is None:
            key, source = _find_key(api_key, command, env, credentials_file)
        return cls(
            base_url=server,
            api_key=key,
            api_key_source=source,
            credential_cmd=None if source == "local" else command,
            credential_cmd_timeout_s=credential_cmd_timeout_s,
            project_id=project_id or env.text("TINKER_PROJECT_ID"),
            tags=_tags(env.raw("TINKER_TAGS") or "" if tags is None else tags),
            telemetry=_telemetry(env, server) if telemetry is None else telemetry,
            log=level,
            cf_access_id=_usable(cf_access_id, "cf_access_id")
            or _usable(env.secret("CLOUDFLARE_ACCESS_CLIENT_ID"), "CLOUDFLARE_ACCESS_CLIENT_ID"),
            cf_access_secret=_usable(cf_access_secret, "cf_access_secret")
            or _usable(env.secret("CLOUDFLARE_ACCESS_CLIENT_SECRET"), "CLOUDFLARE_ACCESS_CLIENT_SECRET"),
            default_headers=default_headers,
            session=session,
            timeout=Timeout.of(timeout),
            max_retries=max_retries,
            max_body_bytes=max_body_bytes,
            sdk_version=sdk_version or SDK_VERSION,
            dialect=dialect,
            deadline_s=deadline_s,
            pace=_pace(env) if pace is None else pace,
            local=local or launch.find_own_server(server),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        if self.local is not None:  # whoever loads the pickle can only use what runs
            self.local.start()
        shown = {a.name: getattr(self, a.name) for a in fields(Settings) if a.name not in _NOT_IN_PICKLES}
        headers = self.default_headers.items()
        shown["default_headers"] = {n: v for n, v in headers if not is_secret_header(n) and mask_text(v) == v}
        return _revive, (shown,)

    def __copy__(self) -> Settings:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        return self


def _revive(shown: dict[str, Any]) -> Settings:
    """Load a pickle: all as it was, but secrets from this process's own environment and credentials file."""
    here = Settings.resolve(base_url=shown["base_url"])
    return evolve(here, **{**shown, "default_headers": HeaderMap(shown["default_headers"])})


def _find_key(
    argument: Secret | None, command: Secret | None, env: _Environment, file: CredentialsFile | None
) -> tuple[Secret | None, KeySource | None]:
    key, source = argument, "argument"
    if key is None:
        key, source = env.secret("TINKER_API_KEY"), "environment"
    if key is None and command is None:
        # The stored key never stands in front of a command, so then the file is not even read.
        stored = (file or CredentialsFile()).default_key()
        key, source = hidden(stored.key) if stored else None, "stored"
    name = {"argument": "api_key", "environment": "TINKER_API_KEY", "stored": "the stored key"}[source]
    return _usable(key, name), cast("KeySource", source) if key else None


def _usable(secret: Secret | None, name: str) -> Secret | None:
    """Refuse what cannot stand in a header, without showing it."""
    if secret is not None and not all("!" <= character <= "~" for character in secret.reveal()):
        raise ConfigurationError(
            f"{name} holds blanks, line breaks or characters outside ASCII; is it complete?"
        )
    return secret


def _server(argument: Secret | None, env: _Environment) -> tuple[str, EmbeddedServer | None]:
    """The address, and the embedded server of this process if that was asked for."""
    asked = argument or env.secret("TINKER_BASE_URL")
    if asked is not None and asked.reveal() == launch.LOCAL:
        local = launch.get_server(
            data_dir=env.text("TINKER_LOCAL_DATA_DIR"), model=env.text("TINKER_LOCAL_MODEL")
        )
        return local.base_url, local
    return _base_url(argument, env), None


def _local_key(
    server: str, local: EmbeddedServer | None, argument: Secret | None
) -> tuple[Secret | None, KeySource | None]:
    """The key of an embedded server of this user, which no variable or file can know.

    A script that gives the key for the hosted service shall run here unchanged; but at an address that it
    has given too the key is the one that it means.
    """
    if local is not None:
        return local.key, "local"
    key = launch.find_key(server) if argument is None else None
    return key, None if key is None else "local"


def _base_url(argument: Secret | None, env: _Environment) -> str:
    if argument is not None:
        return checked_base_url(argument, "base_url")
    variable = env.secret("TINKER_BASE_URL")
    return DEFAULT_BASE_URL if variable is None else checked_base_url(variable, "TINKER_BASE_URL")


def _tags(given: str | Iterable[str]) -> tuple[str, ...]:
    parts = given.split(",") if isinstance(given, str) else given
    return tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))


def _telemetry(env: _Environment, base_url: str) -> bool:
    value = env.raw("TINKER_TELEMETRY")
    return is_vendor_url(base_url) and (value is None or value.lower() in _TRUE_WORDS)


def _pace(env: _Environment) -> float:
    text = env.text("TINKER_PACE")
    try:
        return 1.0 if text is None else float(text)
    except ValueError:
        raise ConfigurationError(f"TINKER_PACE must be a positive factor, not {text!r}") from None


def _log_level(argument: LogLevel | None, env: _Environment) -> LogLevel | None:
    if argument is not None and argument not in LOG_LEVELS:
        raise ConfigurationError(f"log is one of {', '.join(LOG_LEVELS)}, not {argument!r}")
    variable = env.text("TINKER_LOG")
    return argument or (cast("LogLevel", variable) if variable in LOG_LEVELS else None)


def _header_map(headers: Mapping[Any, Any] | None) -> tuple[HeaderMap, str]:
    """Take over the user's headers, and say what is wrong with them, without their values."""
    for name, value in (headers or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            return HeaderMap(), f"default_headers[{name!r}] is {type(value).__name__}, not str"
        if not name or set(f"{name}{value}") & set("\r\n\0") or set(name) & set(" :\t"):
            return (
                HeaderMap(),
                f"default_headers[{name!r}] cannot be sent: line breaks, or blanks in the name",
            )
    return HeaderMap(headers or {}), ""


def _session_secrets(session: requests.Session | None) -> list[Secret]:
    """Passwords in the user's session: of proxies, of basic authentication, and in its headers."""
    found: list[str | bytes | None] = []
    with suppress(Exception):  # it is the user's object, of whatever class, and this only helps masking
        for proxy in session.proxies.values() if session else ():
            password = urlsplit(proxy).password
            found += [password, unquote(password or "")]
        if session and isinstance(session.auth, tuple):
            found.append(session.auth[1])
        found += (
            [value for name, value in session.headers.items() if is_secret_header(name)] if session else []
        )
    texts = [value.decode("latin-1") if isinstance(value, bytes) else value for value in found]
    return [Secret(text) for text in texts if text]
