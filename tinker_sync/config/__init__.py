"""The user's configuration: arguments, environment variables and the credentials file, resolved once.

`Settings` is frozen, so any thread may read it. Resolving the base URL "local" prepares the embedded server
of this process (see `launch`); apart from that, nothing here opens a connection.
"""

from __future__ import annotations

from tinker_sync._secret import HeaderMap, Secret
from tinker_sync.config.address import CONSOLE_URL, DEFAULT_BASE_URL
from tinker_sync.config.credentials_file import CredentialsFile, StoredKey
from tinker_sync.config.settings import Settings
from tinker_sync.config.timeout import RequestOptions, Timeout

__all__ = [
    "CONSOLE_URL",
    "DEFAULT_BASE_URL",
    "CredentialsFile",
    "HeaderMap",
    "RequestOptions",
    "Secret",
    "Settings",
    "StoredKey",
    "Timeout",
]
