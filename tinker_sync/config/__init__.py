"""The user's configuration: arguments, environment variables and the credentials file, resolved once.

`Settings` is frozen, so any thread may read it. Resolving the base URL "local" reserves the port of the
embedded server (see `_embedded`). Nothing here opens a connection or starts a process.
"""

from __future__ import annotations

from tinker_sync._base.secret import HeaderMap, Secret
from tinker_sync.config.address import DEFAULT_BASE_URL
from tinker_sync.config.credentials_file import CredentialsFile, StoredKey
from tinker_sync.config.settings import Settings
from tinker_sync.config.timeout import RequestOptions, Timeout

__all__ = [
    "DEFAULT_BASE_URL",
    "CredentialsFile",
    "HeaderMap",
    "RequestOptions",
    "Secret",
    "Settings",
    "StoredKey",
    "Timeout",
]
