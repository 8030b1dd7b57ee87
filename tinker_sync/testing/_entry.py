"""The pytest entry point. It names the module of the fixtures, so that pytest registers it only once."""

from __future__ import annotations

pytest_plugins = ("tinker_sync.testing.pytest_plugin",)
