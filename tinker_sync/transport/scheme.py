"""What an address says a port speaks, and what it speaks: TLS or plain HTTP. Pure but for the one question.

Whoever writes https:// for http:// would else be told of record layers, and the other way round of nothing
but a broken connection.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final

from tinker_sync._lazy import LazyModule

if TYPE_CHECKING:
    import ssl
else:
    ssl = LazyModule("ssl")

# What OpenSSL calls the first bytes of an answer that is no TLS; its versions differ.
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")


def answered_without_tls(error: BaseException) -> bool:
    """Whether a handshake failed because the other side does not know what that is."""
    return isinstance(error, ssl.SSLError) and error.reason in _NO_TLS


def speaks_tls(host: str, port: int, timeout_s: float) -> bool:
    """Greet a port in TLS and hear whether it understands. Nothing else is sent; no certificate matters."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), timeout_s) as plain:
            context.wrap_socket(plain, server_hostname=host).close()
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # it understood, and wants something else of us
    except (OSError, ValueError):
        return False
    return True


def without_tls(netloc: str) -> str:
    """The words for an https address whose port speaks plain HTTP."""
    return f"the server at {netloc} does not speak TLS; begin its address with http://, or name another port"


def with_tls(netloc: str) -> str:
    """The words for an http address whose port speaks TLS."""
    return f"the server at {netloc} speaks TLS; begin its address with https://, or name another port"
