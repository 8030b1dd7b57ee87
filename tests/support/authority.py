"""A private certificate authority for TLS servers in tests."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme


class Authority:
    """A certificate authority that signs server and client certificates. `ca_file` has its own certificate.

    >>> Authority.__name__
    'Authority'
    """

    def __init__(self, folder: Path) -> None:
        self._ca = trustme.CA()
        self._folder = folder
        self.ca_file = str(folder / "ca.pem")
        self._ca.cert_pem.write_to_path(self.ca_file)

    def server_context(self, *names: str, wants_client: bool = False) -> ssl.SSLContext:
        """Return the TLS context of a server with a certificate for these names or addresses."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._ca.issue_cert(*(names or ("127.0.0.1", "localhost"))).configure_cert(context)
        if wants_client:
            self._ca.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_certificate(self, name: str) -> str:
        """Return the path of a file with a client's certificate and key."""
        path = self._folder / f"{name}.pem"
        self._ca.issue_cert(f"{name}@test.invalid").private_key_and_cert_chain_pem.write_to_path(str(path))
        return str(path)
