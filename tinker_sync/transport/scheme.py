"""Detection of a wrong scheme: an http address whose port uses TLS, or an https address whose port does not.

Without this detection, a wrong https:// fails with an error about TLS records, and a wrong http:// with a
broken connection.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final

from tinker_sync._base.lazy import LazyModule

if TYPE_CHECKING:
    import ssl
else:
    ssl = LazyModule("ssl")

# The names in various versions of OpenSSL for an answer that is not TLS.
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")
_RECORD_BYTES: Final = 1 << 14


def answered_without_tls(error: BaseException) -> bool:
    """Return True if a TLS handshake failed with this error because the other side does not use TLS."""
    return isinstance(error, ssl.SSLError) and error.reason in _NO_TLS


def speaks_tls(host: str, port: int, timeout_s: float) -> bool:
    """Send the greeting of TLS to a port. Return True if the answer is TLS, False for another or no answer.

    This function sends nothing else and checks no certificate. The handshake runs in memory, because a socket
    that is reset while the `ssl` module wraps it stays open.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    answer, greeting, received = ssl.MemoryBIO(), ssl.MemoryBIO(), b""
    try:
        handshake = context.wrap_bio(answer, greeting, server_hostname=host)
        with socket.create_connection((host, port), timeout_s) as plain:
            try:
                handshake.do_handshake()
            except ssl.SSLWantReadError:
                plain.sendall(greeting.read())
            received = plain.recv(_RECORD_BYTES)
        answer.write(received)
        handshake.do_handshake()
    except ssl.SSLWantReadError:
        return bool(received)  # the answer continues in another record
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # an alert is TLS: the server requires other parameters
    except (OSError, ValueError):
        return False
    return True


def without_tls(netloc: str) -> str:
    """Return the error text for an https address whose port uses plain HTTP."""
    return f"the server at {netloc} does not speak TLS; begin its address with http://, or name another port"


def with_tls(netloc: str) -> str:
    """Return the error text for an http address whose port uses TLS."""
    return f"the server at {netloc} speaks TLS; begin its address with https://, or name another port"
