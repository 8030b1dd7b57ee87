"""Routes, headers and cookies from the user's `requests.Session`, or from the environment.

The client has its own connections. It takes the session's proxies, certificates, `trust_env`, headers, user
name and password, and cookies. A new client refuses a session that changes how requests are sent: a subclass,
hooks, other adapters or authentication, parameters. It refuses a proxy that is not an HTTP proxy when it
first needs the proxy.

Without a session, the environment alone counts. This module imports `requests` for a session, for a proxy of
the environment, and for transfers of files.

Any thread may use this module. The client reads proxies and certificates when it first contacts an origin. It
reads headers, user name and password, and cookies with every request.
"""

from __future__ import annotations

import base64
import os
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve

from tinker_sync._base.lazy import LazyModule
from tinker_sync._base.secret import HeaderMap, Secret, mask_url
from tinker_sync.errors import ConfigurationError
from tinker_sync.transport.pools import Known, Origin, Route

if TYPE_CHECKING:
    import ssl
    import urllib.request
    from email.message import Message
    from http.cookiejar import CookieJar

    import requests
    import requests.adapters
    import requests.auth
    import requests.utils
else:
    requests = LazyModule("requests")
    ssl = LazyModule("ssl")

_NONE: Final = HeaderMap()
_BUNDLES: Final = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables that name trusted certificates; the first one counts. Requests reads two of them, OpenSSL two."""


class SessionRules:
    """The routes, headers and cookies of requests. Thread-safe.

    They come from the user's session. Without a session, the environment decides on the routes, no headers
    are added, and the only cookies are those that servers set.

    Args:
        session: the user's session.
        direct: True to bypass the environment's proxies and certificates, as for a server on this machine;
            it has no effect on a user's session.
        http2: True to offer HTTP/2 to servers that are reached over TLS.

    Raises:
        ConfigurationError: the session changes how requests are sent.
    """

    def __init__(
        self, session: requests.Session | None, *, direct: bool = False, http2: bool = False
    ) -> None:
        if session is not None:
            _refuse_unusual(session)
        self._given = session
        self.adds_nothing = session is None
        """True while requests carry no header, authorization or cookie beyond those of the client."""
        self._trust_environment = not direct
        self._protocols = ("h2", "http/1.1") if http2 else ("http/1.1",)
        self._plain: requests.Session | None = None  # guarded by _lock
        self._own_jar: CookieJar | None = None  # guarded by _lock; set once
        self._lock = threading.Lock()
        self._routes: dict[Origin, Route] = {}  # written under _lock, read without
        self._without_http2: dict[Route, Route] = {}  # written under _lock, read without
        self._contexts: dict[object, ssl.SSLContext] = {}  # guarded by _lock

    @property
    def session(self) -> requests.Session:
        """The user's session, or else a plain one, made on first use."""
        if self._given is not None:
            return self._given
        made = requests.Session()
        made.trust_env = self._trust_environment
        with self._lock:
            if self._plain is None:
                self._plain = made
            return self._plain

    def route_to(self, origin: Origin) -> Route:
        """Return the route to an origin: for one origin, always the same object.

        Raises:
            ConfigurationError: a certificate file or a proxy cannot be used.
        """
        route = self._routes.get(origin)  # entries are added and never removed
        if route is None:
            found = self._find_route(origin)
            with self._lock:  # two threads may have searched; the first result stays
                route = self._routes.setdefault(origin, found)
        return route

    def without_http2(self, route: Route) -> Route:
        """Return the route that leads the same way and offers HTTP/1.1 alone: always the same object.

        Raises:
            ConfigurationError: a certificate file cannot be used any more.
        """
        if not route.offers_http2:
            return route
        other = self._without_http2.get(route)
        if other is None:
            tls = self._context_for(route.origin, route.options, ("http/1.1",))
            made = evolve(route, tls=tls, known=Known(), offers_http2=False)
            with self._lock:
                other = self._without_http2.setdefault(route, made)
        return other

    def headers(self) -> HeaderMap:
        """Return the session's headers without those that requests puts into every session."""
        if self._given is None:
            return _NONE
        usual = requests.utils.default_headers()
        return HeaderMap(
            {
                str(name): _text(value)
                for name, value in self._given.headers.items()
                if usual.get(name) != value
            }
        )

    def authorization(self, route: Route) -> str | None:
        """Return the `Authorization` header for the configured server, or None.

        The user's session takes precedence over the netrc file. Without a session, the result is None.
        """
        if self._given is None:
            return None
        auth = self._given.auth
        if type(auth) is requests.auth.HTTPBasicAuth:
            return _basic(auth.username, auth.password)
        if isinstance(auth, tuple):
            return _basic(*auth)
        return route.netrc if auth is None else None

    @property
    def _jar(self) -> CookieJar | None:
        return self._own_jar if self._given is None else self._given.cookies

    @property
    def has_cookies(self) -> bool:
        """True if a cookie may have to be sent."""
        jar = self._jar
        return jar is not None and len(jar) > 0

    def cookies_for(self, url: str) -> str | None:
        """Return the value of `Cookie` for an address, or None."""
        jar = self._jar
        if jar is None:
            return None
        request = _cookie_request(url)
        jar.add_cookie_header(request)
        cookies = request.get_header("Cookie")
        return Secret(cookies).reveal() if cookies else None

    def keep_cookies(self, url: str, headers: list[tuple[str, str]]) -> None:
        """Store the cookies that an answer sets: in the user's session or, without one, in this object."""
        self.adds_nothing = False
        from http.cookiejar import CookieJar

        with self._lock:
            jar = self._jar
            if jar is None:
                jar = self._own_jar = CookieJar()
        values = [value for name, value in headers if name.lower() == "set-cookie"]
        jar.extract_cookies(_CookieReply(values), _cookie_request(url))  # type: ignore[arg-type]

    def renew_after_fork(self) -> None:
        """Drop the copies of the parent's connections, in a forked child. The session stays usable."""
        self._lock = threading.Lock()  # a thread of the parent may hold the old one
        session = self._given or self._plain
        for adapter in session.adapters.values() if session is not None else ():
            adapter.close()

    def close(self) -> None:
        """Close the session that this object has made. A user's session stays open."""
        with self._lock:
            plain = self._plain
        if plain is not None:
            plain.close()

    def _find_route(self, origin: Origin) -> Route:
        url = f"{origin}/"
        options: dict[str, Any]
        if self._given is None and not (self._trust_environment and _may_have_proxies()):
            options = {"proxies": {}, "verify": self._trusted(True), "cert": None}
            tls = self._context_for(origin, options, self._protocols)
            return Route(origin, tls, options=options, offers_http2=self._offers(tls))
        options = self._options(url)
        tls, netrc = self._context_for(origin, options, self._protocols), self._netrc(url)
        http2 = self._offers(tls)
        proxy = requests.utils.select_proxy(url, options["proxies"])
        if not proxy:
            return Route(origin, tls, options=options, netrc=netrc, offers_http2=http2)
        if "://" not in proxy:
            proxy = f"http://{proxy}"
        elif not proxy.lower().startswith("http://"):
            raise ConfigurationError(
                f"the proxy {mask_url(proxy)!r} cannot be used: only HTTP proxies (http://HOST:PORT) are "
                "supported; set another one in the session, in HTTPS_PROXY or HTTP_PROXY, or exempt "
                f"{origin.host} with NO_PROXY"
            )
        try:
            peer, headers = Origin.of(proxy), _proxy_headers(proxy)
            return Route(origin, tls, peer, headers, options, netrc, offers_http2=http2)
        except ValueError:
            raise ConfigurationError(f"the proxy address {mask_url(proxy)!r} is not valid") from None

    def _options(self, url: str) -> dict[str, Any]:
        merged: Mapping[str, Any] = self.session.merge_environment_settings(url, {}, None, None, None)
        # Addresses of proxies hold passwords; the repr of this form is masked.
        proxies = {scheme: Secret(proxy).reveal() for scheme, proxy in merged["proxies"].items() if proxy}
        return {"proxies": proxies, "verify": self._trusted(merged["verify"]), "cert": merged["cert"]}

    def _trusted(self, verify: bool | str) -> bool | str:
        """Return the trusted certificates: without a user's session, those that the environment names."""
        if self._given is not None or not self._trust_environment:
            return verify
        return next(filter(None, map(os.environ.get, _BUNDLES)), verify)

    def _netrc(self, url: str) -> str | None:
        # The netrc file counts only with a session from the user: a user who gives an API key alone does not
        # expect a password to be sent.
        if self._given is None or not self._given.trust_env:
            return None
        found = requests.utils.get_netrc_auth(url)
        return _basic(*found) if found else None

    def _offers(self, tls: ssl.SSLContext | None) -> bool:
        return tls is not None and "h2" in self._protocols

    def _context_for(
        self, origin: Origin, options: Mapping[str, Any], protocols: tuple[str, ...]
    ) -> ssl.SSLContext | None:
        if origin.scheme != "https":
            return None
        key = options["verify"], options["cert"], protocols
        with self._lock:
            context = self._contexts.get(key)
        if context is None:
            made = _make_context(*key)
            with self._lock:
                context = self._contexts.setdefault(key, made)
        return context


def _refuse_unusual(session: requests.Session) -> None:
    """Refuse a session with a feature that this client would silently ignore."""
    problem = _first_problem(session)
    if problem is not None:
        raise ConfigurationError(
            f"session: {problem}; a session is used for its headers, proxies, certificates, user name and "
            "password, and cookies alone"
        )


def _first_problem(session: requests.Session) -> str | None:
    if type(session) is not requests.Session:
        return (
            f"{type(session).__name__} is a subclass of requests.Session, whose methods would not be called"
        )
    if any(session.hooks.values()):
        return "it has hooks, which would not be called"
    if session.params:
        return "it has params, which would not be sent"
    if type(session.auth) not in (type(None), tuple, requests.auth.HTTPBasicAuth):
        return f"its auth is a {type(session.auth).__name__}; pass such a header in default_headers"
    for prefix, adapter in session.adapters.items():
        if type(adapter) is not requests.adapters.HTTPAdapter:
            return (
                f"the adapter mounted at {prefix!r} is a {type(adapter).__name__}, which would not be called"
            )
        if adapter.max_retries.total:
            return f"the adapter mounted at {prefix!r} retries; pass max_retries to the client"
        if getattr(adapter, "_pool_block", False):
            return f"the adapter mounted at {prefix!r} limits connections, which this client does by itself"
    return None


class _CookieReply:
    """The part of an answer that a cookie jar reads."""

    def __init__(self, values: list[str]) -> None:
        from email.message import Message

        self._message = Message()
        for value in values:
            self._message["Set-Cookie"] = value

    def info(self) -> Message:
        return self._message


def _cookie_request(url: str) -> urllib.request.Request:
    """Return a request for a cookie jar to read; the client does not send it."""
    from urllib.request import Request

    return Request(url)  # noqa: S310 - it is never opened


def _may_have_proxies() -> bool:
    """Return True if the environment, or the settings of macOS or Windows, may name a proxy."""
    if sys.platform in ("darwin", "win32"):
        from urllib.request import getproxies

        return bool(getproxies())
    names = {name.lower() for name, value in os.environ.items() if value}
    return any(name.endswith("_proxy") and name != "no_proxy" for name in names)


def _make_context(
    verify: bool | str | None, cert: str | tuple[str, str] | None, protocols: tuple[str, ...]
) -> ssl.SSLContext:
    if verify is False:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        path = verify if isinstance(verify, str) else _usual_bundle()
        is_folder = os.path.isdir(path)
        try:
            context = ssl.create_default_context(
                cafile=None if is_folder else path, capath=path if is_folder else None
            )
        except OSError as error:
            raise ConfigurationError(f"the trusted certificates {path!r} cannot be used: {error}") from error
    context.set_alpn_protocols(list(protocols))
    if cert:
        files = (cert,) if isinstance(cert, str) else tuple(cert)
        try:
            context.load_cert_chain(*files)
        except OSError as error:
            raise ConfigurationError(
                f"the client certificate {files[0]!r} cannot be used: {error}"
            ) from error
    return context


def _usual_bundle() -> str:
    """Return the file of certificates that requests trusts, without loading requests."""
    from certifi import where

    return where()


def _proxy_headers(proxy: str) -> dict[str, str]:
    user, password = requests.utils.get_auth_from_url(proxy)
    return {"Proxy-Authorization": _basic(user, password)} if user else {}


def _basic(user: str | bytes, password: str | bytes) -> str:
    text = b":".join(part if isinstance(part, bytes) else _latin1(part) for part in (user, password))
    return Secret("Basic " + base64.b64encode(text).decode("ascii")).reveal()


def _latin1(text: str) -> bytes:
    """Return a text in latin-1, as requests encodes it, or in UTF-8 (RFC 7617) if latin-1 lacks a letter."""
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return text.encode("utf-8")


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
