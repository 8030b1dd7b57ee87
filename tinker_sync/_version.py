"""The package's name and version. The build reads this file without importing the package."""

from __future__ import annotations

__title__ = "tinker_sync"
__version__ = "0.3.0"
PROTOCOL_VERSION = "0.38.0"
"""The version of the reference client that this package follows."""
