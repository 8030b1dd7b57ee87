"""All settings of a client in one frozen object.

`Settings.resolve` reads arguments, then environment variables, then the credentials file, once for a client.
(The price table and the hub's cache read variables of their own.) `show_logs` prints the log records of the
package; importing this module has no effect.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Literal, cast
from urllib.parse import unquote, urlsplit

from attrs import Attribute, evolve, field, fields, frozen
from attrs.validators import optional

from tinker_sync import _embedded
from tinker_sync._base.clock import pace_of_block
from tinker_sync._base.log import Log
from tinker_sync._base.secret import (
    MASK,
    HeaderMap,
    Secret,
    is_secret_header,
    mask_text,
    secrets_of_header,
    secrets_of_login,
)
from tinker_sync._version import PROTOCOL_VERSION
from tinker_sync.config.address import DEFAULT_BASE_URL, is_vendor_url, normalize_base_url
from tinker_sync.config.credentials_file import CredentialsFile
from tinker_sync.config.timeout import Timeout
from tinker_sync.errors import ConfigurationError

if TYPE_CHECKING:
    import requests

LogLevel = Literal["info", "debug", "curl"]
LOG_LEVELS: Final[dict[str, int]] = {"info": logging.INFO, "debug": logging.DEBUG, "curl": logging.DEBUG}

_LOGGER: Final = logging.getLogger("tinker_sync")
# Scripts for the reference client configure its logger: its level and handlers hold for this package too.
_LOGGER.parent = logging.getLogger("tinker")
_FORMAT: Final = "[%(asctime)s - %(name)s:%(lineno)d - %(levelname)s] %(message)s"
_DATE_FORMAT: Final = "%Y-%m-%d %H:%M:%S"
_lock = threading.Lock()


class _Console(logging.Handler):
    """A log handler that prints this package's records on stderr in programs without their own logging.

    `emit` checks the root logger each time: a program may configure logging after its first client, and then
    each line would be printed twice. It also looks up `sys.stderr` each time, because programs replace it.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
        except Exception:  # noqa: BLE001 - logging never breaks the program; handleError follows raiseExceptions
            self.handleError(record)


def show_logs(level: LogLevel | None) -> None:
    """Set the level of the logger `tinker_sync`, and print its records on stderr. None has no effect.

    The records are not printed while the root logger has handlers. The root logger stays as it is.
    """
    if level is None:
        return
    _LOGGER.setLevel(LOG_LEVELS[level])
    with _lock:
        if not any(isinstance(handler, _Console) for handler in _LOGGER.handlers):
            console = _Console()
            console.setFormatter(logging.Formatter(_FORMAT, _DATE_FORMAT))
            _LOGGER.addHandler(console)


_log: Final = Log(__name__)

KeySource = Literal["argument", "environment", "stored", "local"]


class DefaultInt(int):
    """An int that is a default value, so code can distinguish it from the same number given by the user.

    >>> DefaultInt(10), DefaultInt(10) == 10
    (10, True)
    """


# The protocol version that this package implements. Hosted servers enable features by the declared version.
SDK_VERSION: Final = PROTOCOL_VERSION
# No answer is larger. Each kind of call has a lower limit (`transport.call`), unless the user sets one.
MAX_BODY_BYTES: Final = DefaultInt(1 << 30)
MAX_RETRIES: Final = DefaultInt(10)
COMMAND_TIME_LIMIT_S: Final = 30.0

_NOT_IN_PICKLES: Final = frozenset(
    {"api_key", "api_key_source", "credential_cmd", "cf_access_id", "cf_access_secret", "session"}
)
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_HEADER_VALUE: Final = re.compile(r"[\t -~]*")
_DIALECTS: Final = ("auto", "proto", "json")


class _Environment:
    """The environment variables, in an object whose repr does not show them."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, str] | None) -> None:
        self._values = os.environ if values is None else values

    def text(self, name: str) -> str | None:
        """Return the value of a variable, or None if it is unset or empty."""
        return self._values.get(name) or None

    def raw(self, name: str) -> str | None:
        return self._values.get(name)

    def secret(self, name: str) -> Secret | None:
        return wrap_secret(self._values.get(name), name)


def wrap_secret(value: Any, name: str) -> Secret | None:
    """Return a text as a `Secret` without blanks around it, None if nothing is left; refuse other types."""
    text = value.reveal() if isinstance(value, Secret) else value
    if not isinstance(text, str | None):
        raise ConfigurationError(f"{name}: expected text, got {type(text).__name__}")
    return Secret(text.strip()) if text and text.strip() else None


def _check_base_url(_: object, attribute: Attribute[str], value: str) -> None:
    if normalize_base_url(Secret(value), attribute.name) != value:
        raise ConfigurationError(f"{attribute.name} {value!r} ends with a slash")


def _require_minimum(lowest: int) -> Callable[[object, Attribute[Any], Any], None]:
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


def _mask_values(headers: HeaderMap) -> str:
    return repr(dict.fromkeys(headers, MASK))


@frozen(kw_only=True)
class Settings:
    """The settings of a client. Immutable; any thread may read.

    The repr shows no secret. A pickle carries neither secrets nor `session`, which may hold passwords; the
    process that loads it takes keys from its own environment and credentials file.

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
    log: LogLevel | None = None
    cf_access_id: Secret | None = None
    cf_access_secret: Secret | None = None
    default_headers: HeaderMap = field(factory=HeaderMap, repr=_mask_values)
    session: requests.Session | None = field(default=None, repr=lambda session: type(session).__name__)
    timeout: Timeout = field(factory=Timeout)
    max_retries: int = field(default=MAX_RETRIES, validator=_require_minimum(0))
    max_body_bytes: int = field(default=MAX_BODY_BYTES, validator=_require_minimum(1))
    max_connections: int | None = field(default=None, validator=optional(_require_minimum(1)))
    http2: bool = True
    sdk_version: str = SDK_VERSION
    dialect: object = field(default="auto", validator=_check_dialect)
    deadline_s: float | None = field(default=None, validator=optional(_check_seconds))
    pace: float = field(default=1.0, validator=_check_pace)

    @property
    def is_vendor_host(self) -> bool:
        """True if the server is one of the hosted service, which requires a key of a known kind."""
        return is_vendor_url(self.base_url)

    @property
    def log_curl(self) -> bool:
        """True if each request is logged as a curl command line."""
        return self.log == "curl"

    @property
    def secrets(self) -> tuple[Secret, ...]:
        """The secret values in these settings, which must not appear in logs and errors."""
        own = (self.api_key, self.credential_cmd, self.cf_access_id, self.cf_access_secret)
        texts = [
            *chain.from_iterable(
                secrets_of_header(name, value)
                for name, value in self.default_headers.items()
                if is_secret_header(name)
            ),
            *_find_session_secrets(self.session, self.base_url),
            *_find_environment_secrets(),
        ]
        return (*(secret for secret in own if secret), *(Secret(text) for text in texts if text))

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
        log: LogLevel | None = None,
        cf_access_id: str | Secret | None = None,
        cf_access_secret: str | Secret | None = None,
        default_headers: Mapping[str, str] | None = None,
        session: requests.Session | None = None,
        timeout: Timeout | float | tuple[float, float] | None = None,
        max_retries: int = MAX_RETRIES,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_connections: int | None = None,
        http2: bool | None = None,
        sdk_version: str | None = None,
        dialect: object = "auto",
        deadline_s: float | None = None,
        environ: Mapping[str, str] | None = None,
        credentials_file: CredentialsFile | None = None,
    ) -> Settings:
        """Resolve every setting from its argument, else its environment variable, else its default.

        An empty environment variable counts as missing. So does an empty address, key, command or project. A
        level in `log` or `TINKER_LOG` prints log records on stderr (`show_logs`).

        Args:
            base_url: `TINKER_BASE_URL`. The address of the server, which may have a path. "local" is an
                embedded server, which keeps its checkpoints in `~/.tinker/local`. "local:PATH" or
                `TINKER_LOCAL_DATA_DIR` names another directory, and "temporary" one that ends with it.
                `TINKER_LOCAL_MODEL` adds a Hugging Face directory to the built-in models.
            api_key: `TINKER_API_KEY`, else the default key of the credentials file, unless there is a
                command. An embedded server has its own key.
            credential_cmd: `TINKER_CREDENTIAL_CMD`. A shell command that prints the credential.
            credential_cmd_timeout_s: the time limit of the command.
            project_id: `TINKER_PROJECT_ID`. The project of new sessions.
            tags: `TINKER_TAGS`, separated by commas. Empty and repeated tags are dropped.
            log: `TINKER_LOG`: info, debug, or curl (debug, with each request as a curl line). Another value
                of the variable has no effect.
            cf_access_id, cf_access_secret: `CLOUDFLARE_ACCESS_CLIENT_ID` and
                `CLOUDFLARE_ACCESS_CLIENT_SECRET`. A service token for a server behind Cloudflare Access.
            default_headers: sent with every request; they override the client's own headers.
            session: a `requests.Session` whose headers, proxies, certificates, `auth` and cookies are used.
            timeout: seconds to wait for a response, or another form that `Timeout.of` takes.
            max_retries: how often a request is repeated; by default for five minutes, if that may help.
            max_body_bytes: a larger response is an error. The default depends on the call: 1 MiB where the
                answer is a promise, in proportion to the request where it is a result, 8 MiB for most
                others, and never more than 1 GiB.
            max_connections: `TINKER_MAX_CONNECTIONS`. The most requests under way for samples and passes,
                each with a connection of its own unless they share some over HTTP/2. None: half of the files
                that the process may open. Further requests wait, and a warning says so.
            http2: `TINKER_HTTP2`, 1 or 0. False to keep to HTTP/1.1 although the extra `http2` is installed.
            sdk_version: the protocol version to declare.
            dialect: the calls, fields and encodings of the server: auto, proto, json or a `Dialect`.
            deadline_s: the limit for a call with all its retries; None: minutes or hours, by kind of call.
            environ: variables to read instead of `os.environ`.
            credentials_file: file to read instead of `~/.tinker/credentials.json`.

        Raises:
            ConfigurationError: a setting cannot be used; the text names it and gives the reason.
        """
        api_key = wrap_secret(api_key, "api_key")
        cf_access_id = wrap_secret(cf_access_id, "cf_access_id")
        cf_access_secret = wrap_secret(cf_access_secret, "cf_access_secret")
        # It may be an object of a URL class, and may hold a password by mistake.
        address = wrap_secret(str(base_url) if hasattr(base_url, "scheme") else base_url, "base_url")
        env = _Environment(environ)
        problem = header_problem(default_headers)
        if problem:
            raise ConfigurationError(f"default_headers{problem}")
        level = _read_log_level(log, env)
        show_logs(level)
        command = wrap_secret(credential_cmd, "credential_cmd") or env.secret("TINKER_CREDENTIAL_CMD")
        server, key = _resolve_server(address, env, api_key)
        source: KeySource | None = "local"
        if key is None:
            key, source = _find_key(api_key, command, env, credentials_file)
        return cls(
            base_url=server,
            api_key=key,
            api_key_source=source,
            credential_cmd=None if source == "local" else command,
            credential_cmd_timeout_s=credential_cmd_timeout_s,
            project_id=project_id or env.text("TINKER_PROJECT_ID"),
            tags=_read_tags(env.raw("TINKER_TAGS") or "" if tags is None else tags),
            log=level,
            cf_access_id=_check_sendable(cf_access_id, "cf_access_id")
            or _check_sendable(env.secret("CLOUDFLARE_ACCESS_CLIENT_ID"), "CLOUDFLARE_ACCESS_CLIENT_ID"),
            cf_access_secret=_check_sendable(cf_access_secret, "cf_access_secret")
            or _check_sendable(
                env.secret("CLOUDFLARE_ACCESS_CLIENT_SECRET"), "CLOUDFLARE_ACCESS_CLIENT_SECRET"
            ),
            default_headers=HeaderMap(default_headers or {}),
            session=session,
            timeout=Timeout.of(timeout),
            max_retries=max_retries,
            max_body_bytes=max_body_bytes,
            max_connections=_read_max_connections(max_connections, env),
            http2=_read_http2(http2, env),
            sdk_version=sdk_version or SDK_VERSION,
            dialect=dialect,
            deadline_s=deadline_s,
            pace=_read_pace(env),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        shown = {a.name: getattr(self, a.name) for a in fields(Settings) if a.name not in _NOT_IN_PICKLES}
        headers = {n: v for n, v in self.default_headers.items() if not is_secret_header(n)}
        shown["default_headers"] = {n: v for n, v in headers.items() if mask_text(v, self.secrets) == v}
        return _revive, (shown,)

    def __copy__(self) -> Settings:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        return self


def _revive(shown: dict[str, Any]) -> Settings:
    """Restore pickled settings, with secrets from the environment and credentials file of this process."""
    here = Settings.resolve(base_url=shown["base_url"])
    return evolve(here, **{**shown, "default_headers": HeaderMap(shown["default_headers"])})


def _find_key(
    argument: Secret | None, command: Secret | None, env: _Environment, file: CredentialsFile | None
) -> tuple[Secret | None, KeySource | None]:
    key, source = argument, "argument"
    if key is None:
        key, source = env.secret("TINKER_API_KEY"), "environment"
    if key is None and command is None:
        # A command takes precedence over the stored key, so the file is read only without a command.
        stored = (file or CredentialsFile()).default_key()
        key, source = wrap_secret(stored.key, "the stored key") if stored else None, "stored"
    name = {"argument": "api_key", "environment": "TINKER_API_KEY", "stored": "the stored key"}[source]
    return _check_sendable(key, name), cast("KeySource", source) if key else None


def _check_sendable(secret: Secret | None, name: str) -> Secret | None:
    """Return a secret that a header can carry; else raise a ConfigurationError that does not show it."""
    if secret is not None and not all("!" <= character <= "~" for character in secret.reveal()):
        raise ConfigurationError(
            f"{name} holds blanks, line breaks or characters outside ASCII; is it complete?"
        )
    return secret


def _resolve_server(
    address: Secret | None, env: _Environment, api_key: Secret | None
) -> tuple[str, Secret | None]:
    """Return the URL of the server, and its key if it is an embedded server.

    With base_url="local", the server's key replaces the `api_key` of the user, so scripts written for the
    hosted service run unchanged. With the address of an embedded server, the argument `api_key` wins, but
    the server's key replaces `TINKER_API_KEY` and the stored key.
    """
    asked = address or env.secret("TINKER_BASE_URL")
    if asked is not None and _embedded.is_local(asked.reveal()):
        data_dir = _embedded.find_data_dir(asked.reveal(), env.text("TINKER_LOCAL_DATA_DIR"))
        reserved = _embedded.reserve_server(data_dir=data_dir, model=env.text("TINKER_LOCAL_MODEL"))
        return reserved.base_url, reserved.key
    base_url = _read_base_url(address, env)
    found = _embedded.find_key(base_url) if api_key is None else None
    if found is not None and env.secret("TINKER_API_KEY") not in (None, found):
        _warn_once(
            f"TINKER_API_KEY is not used for {base_url}, an embedded server whose own key is known here; "
            "pass api_key to use another one"
        )
    return base_url, found


@lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    _log.warning("%s", text)


def _read_base_url(argument: Secret | None, env: _Environment) -> str:
    if argument is not None:
        return normalize_base_url(argument, "base_url")
    variable = env.secret("TINKER_BASE_URL")
    return DEFAULT_BASE_URL if variable is None else normalize_base_url(variable, "TINKER_BASE_URL")


def _read_tags(given: str | Iterable[str]) -> tuple[str, ...]:
    parts = given.split(",") if isinstance(given, str) else given
    return tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))


def _read_pace(env: _Environment) -> float:
    """Return the factor for pauses: that of `paced`, else `TINKER_PACE`, else 1."""
    pace = pace_of_block()
    if pace is not None:
        return pace
    text = env.text("TINKER_PACE")
    try:
        return 1.0 if text is None else float(text)
    except ValueError:
        raise ConfigurationError(f"TINKER_PACE must be a positive factor, not {text!r}") from None


def _read_max_connections(argument: int | None, env: _Environment) -> int | None:
    text = env.text("TINKER_MAX_CONNECTIONS")
    if argument is not None or text is None:
        return argument
    if not (text.strip().isdecimal() and int(text)):
        raise ConfigurationError(f"TINKER_MAX_CONNECTIONS must be a whole number from 1, not {text!r}")
    return int(text)


def _read_http2(argument: bool | None, env: _Environment) -> bool:
    text = env.text("TINKER_HTTP2")
    if argument is not None or text is None:
        return argument is not False
    if text.strip() not in ("0", "1"):
        raise ConfigurationError(f"TINKER_HTTP2 must be 1 or 0, not {text!r}")
    return text.strip() == "1"


def _read_log_level(argument: LogLevel | None, env: _Environment) -> LogLevel | None:
    if argument is not None and argument not in LOG_LEVELS:
        raise ConfigurationError(f"log is one of {', '.join(LOG_LEVELS)}, not {argument!r}")
    variable = env.text("TINKER_LOG")
    return argument or (cast("LogLevel", variable) if variable in LOG_LEVELS else None)


def header_problem(headers: Mapping[Any, Any] | None) -> str:
    """Return why headers of the user cannot be sent, or "". The text quotes no header value.

    >>> header_problem({"X-Team": "blue"}), header_problem({"X-Team": 7})
    ('', "['X-Team'] is int, not str")
    """
    for name, value in (headers or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            return f"[{name!r}] is {type(value).__name__}, not str"
        if not _HEADER_NAME.fullmatch(name):
            return f"[{name!r}] cannot be sent: that is no header name"
        if not _HEADER_VALUE.fullmatch(value):
            # Servers disagree on the meaning of other bytes, so a key or a name would arrive as another one.
            problem = "its value has line breaks, control characters or characters outside ASCII"
            return f"[{name!r}] cannot be sent: {problem}"
    return ""


def _find_session_secrets(session: requests.Session | None, base_url: str) -> Iterator[str]:
    """Yield the secrets of the user's session: passwords, headers and cookies."""
    if session is None:
        return
    with suppress(Exception):  # the user's object may have any class, and this only helps masking
        yield from chain.from_iterable(map(_find_proxy_secrets, session.proxies.values()))
    with suppress(Exception):
        for name, value in session.headers.items():
            if is_secret_header(name):
                yield from secrets_of_header(name, _text(value))
    with suppress(Exception):
        yield from (cookie.value for cookie in session.cookies if cookie.value)
    with suppress(Exception):
        auth = session.auth  # a pair, or an object such as `HTTPBasicAuth`
        if auth is None and session.trust_env:
            from requests.utils import get_netrc_auth

            auth = get_netrc_auth(base_url)
        if auth:
            login = auth if isinstance(auth, tuple) else (auth.username, auth.password)  # type: ignore[attr-defined]
            yield from secrets_of_login(*map(_text, login))


def _find_proxy_secrets(proxy: str) -> Iterator[str]:
    try:
        parts = urlsplit(proxy if "://" in proxy else f"//{proxy}")
        password = parts.password
    except ValueError:
        return
    if password:
        yield from secrets_of_login(unquote(parts.username or ""), password)


def _find_environment_secrets() -> Iterator[str]:
    """Yield the passwords of the proxies in the environment."""
    for name, value in os.environ.items():
        if name.lower().endswith("_proxy") and "@" in value:
            yield from _find_proxy_secrets(value)


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
